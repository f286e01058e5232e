"""Stored runs show the stored tables, sentences and plots; views.py stores them after a change on purpose."""

import pytest
from golden.views import FOLDER, RUNS, text_of


@pytest.mark.parametrize("name", RUNS)
def test_a_stored_run_shows_its_stored_view(name: str) -> None:
    assert text_of(RUNS[name]) == (FOLDER / "views" / f"{name}.md").read_text()
