"""The README keeps its word: both commands, the plots, and what CI runs is what it says."""

import re
import runpy
from pathlib import Path

import pytest

from efficient_attn.report.files import save
from efficient_attn.report.text import layer_words
from efficient_attn.studies.bench.comparison import comparisons
from efficient_attn.studies.results import read

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUNS = ROOT / "results/epyc-2-cores"
# Picture: run whose records it shows.
RECORDS = runpy.run_path(str(ROOT / "docs/images.py"))["RECORDS"]
# Lines that a screen shows before anybody scrolls.
SCREEN = 36


def commands() -> list[str]:
    """The two commands of the README: to see it work, and to test it."""
    return re.findall(r"```bash\n(python3 -m venv .*)\n```", README)


def test_the_first_screen_has_both_commands_the_figure_and_the_way_into_a_model() -> None:
    screen = "\n".join(README.splitlines()[:SCREEN])
    assert len(commands()) == 2
    assert all(command in screen for command in commands())
    assert "](docs/images/advise.png)" in screen
    assert all(word in screen for word in ("'.[hf]'", "`swap`", "attach(model"))


def test_the_first_command_runs_the_main_job() -> None:
    assert commands()[0].split(" && ")[-1] == ".venv/bin/efficient-attn advise"


def figures() -> list[tuple[str, str]]:
    """The captions of the figures that show records, and their pictures."""
    found = re.findall(r"^!\[(.*?)\]\(docs/images/(.*?)\.png\)$", README, re.MULTILINE)
    return [(caption, picture) for caption, picture in found if picture in RECORDS]


def test_each_figure_is_made_by_the_command_above_it() -> None:
    for caption, picture in figures():
        above = README.partition(f"![{caption}]")[0]
        ran = (RUNS / RECORDS[picture] / "command.txt").read_text(encoding="utf-8").splitlines()
        assert ran and all(re.sub(r" --out \S+$", "", command) in above for command in ran)


def test_the_caption_of_the_comparison_has_the_inputs_of_its_records() -> None:
    (caption,) = (caption for caption, picture in figures() if picture == "compare")
    encoder, decoder = comparisons(read(RUNS / RECORDS["compare"]).records)
    assert (
        f"over {layer_words(encoder.case.inputs)} of a real encoder on {encoder.case.tokens} tokens"
        in caption
    )
    assert f"{layer_words(decoder.case.inputs)} of a real decoder on {decoder.case.tokens} tokens" in caption
    assert encoder.case.inputs.startswith("encoder(layers=") and decoder.case.causal and "causal" in caption


@pytest.mark.parametrize(("picture", "file"), [("advise", "advise.svg"), ("compare", "comparison.svg")])
def test_the_figures_show_what_their_records_hold(picture: str, file: str, tmp_path: Path) -> None:
    """A drawing from the records has the labels and points of the committed one, or that one is stale."""
    run = RUNS / RECORDS[picture]
    save(read(run).plot().figure, tmp_path, Path(file).stem)
    kept, fresh = (shown(folder / file) for folder in (run, tmp_path))
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
