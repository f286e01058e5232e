"""The README keeps its word: both commands, both plots, and what CI runs is what it says."""

import re
import runpy
from pathlib import Path

import pytest

from efficient_attn.report.error_table import layer_words
from efficient_attn.report.save import save
from efficient_attn.studies.compare.analysis import comparisons
from efficient_attn.studies.results import read

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUNS = ROOT / "results/epyc-2-cores"
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


def first_figure() -> tuple[str, Path]:
    """The caption of the first figure, and the reference run whose records it shows."""
    caption, image = re.findall(r"^!\[(.*?)\]\((.*?)\)$", README, re.MULTILINE)[0]
    return caption, RUNS / runpy.run_path(str(ROOT / "docs/images.py"))["RECORDS"][Path(image).stem]


def test_the_first_figure_is_made_by_the_command_above_it() -> None:
    above = README.partition("![")[0]
    assert commands()[0] in above
    _, run = first_figure()
    ran = (run / "command.txt").read_text(encoding="utf-8").strip()
    assert re.sub(r" --out \S+$", "", ran) == "efficient-attn compare"


def test_the_caption_of_the_first_figure_has_the_inputs_of_its_records() -> None:
    caption, run = first_figure()
    (one,) = comparisons(read(run).records)
    assert f"{one.case.tokens} tokens" in caption
    assert f"over {layer_words(one.case.inputs)} of a real encoder" in caption
    assert one.case.inputs.startswith("encoder(layers=") and "one text" in caption


def test_the_first_figure_shows_what_its_records_hold(tmp_path: Path) -> None:
    """A drawing from the records has the labels and points of the committed one, or that one is stale."""
    _, run = first_figure()
    save(read(run).plot().figure, tmp_path, "comparison")
    kept, fresh = (shown(folder / "comparison.svg") for folder in (run, tmp_path))
    assert kept == fresh, f"run: efficient-attn report {run.relative_to(ROOT)}"


def shown(path: Path) -> tuple[list[str], list[list[float]]]:
    """The texts of a drawing, and the positions of its markers to a tenth of a point."""
    svg = path.read_text(encoding="utf-8")
    places = re.findall(r'<use [^>]*x="([-\d.]+)" y="([-\d.]+)"', svg)
    return re.findall(r"<!-- (.*?) -->", svg), [[round(float(x), 1) for x in pair] for pair in places]


def test_continuous_integration_runs_the_test_command_of_the_readme_literally() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    ends_in_a_status = " || failed+=(pytest)"
    assert f"{commands()[1]}{ends_in_a_status}" in lines


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "results/README.md"])
def test_every_file_that_a_page_links_to_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
