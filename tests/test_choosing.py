"""The page that decides holds the numbers of the records it names, and no others."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_page_on_choosing_is_what_the_records_in_results_say() -> None:
    made = runpy.run_path(str(ROOT / "docs/choosing.py"))["page"]()
    written = (ROOT / "docs/choosing.md").read_text(encoding="utf-8")
    assert made == written, "run: python docs/choosing.py"
