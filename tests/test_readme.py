"""The README keeps its word: both commands, both plots, and what CI runs is what it says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Lines that a screen shows before anybody scrolls.
SCREEN = 30


def commands() -> list[str]:
    """The two commands of the README: to see it work, and to test it."""
    return re.findall(r"```bash\n(python3 -m venv .*)\n```", README)


def test_the_first_screen_has_the_two_commands_and_the_two_plots() -> None:
    screen = "\n".join(README.splitlines()[:SCREEN])
    assert len(commands()) == 2
    assert all(command in screen for command in commands())
    assert screen.count("](docs/images/") == 2


def test_the_first_command_runs_the_main_job() -> None:
    steps = commands()[0].split(" && ")
    assert steps[-2:] == [".venv/bin/efficient-attn compare", ".venv/bin/efficient-attn show"]


def test_continuous_integration_runs_the_test_command_of_the_readme_literally() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    ends_in_a_status = " || failed+=(pytest)"
    assert f"{commands()[1]}{ends_in_a_status}" in lines


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "results/README.md"])
def test_every_file_that_a_page_links_to_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
