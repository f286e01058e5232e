"""Figures: readable at the width of a phone, the same for page, file and paper, with names of one's own."""

import base64
from pathlib import Path

import pytest
from drawn import outside, overlaps, shown, texts
from made_records import costs, errors, folder
from PIL import Image

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.report.drawing import STYLES, WIDTH_INCHES, draw
from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.studies import report as redraw
from efficient_attn.studies.reading import read
from efficient_attn.studies.results import Results

RUNS = Path(__file__).parent.parent / "results" / "epyc-2-cores"
LINE = {"color": "#0072b2", "marker": "o", "linestyle": "-"}


def plots_of(run):
    """The plots of a committed run."""
    return list(read(RUNS / run).plots().values())


# One run of each kind is drawn for papers too; a map of colours takes seconds.
PAPER = ("bench-256-4096", "compare", "mse-default", "recall-default", "swap-encoder")
DRAWN = [
    *((path.parent.name, {}) for path in sorted(RUNS.glob("*/records.jsonl"))),
    *((name, {"style": "paper", "width": 3.3}) for name in PAPER),
]


@pytest.mark.parametrize(
    ("run", "look"),
    [
        # One run of each study in both styles; the others of a study are drawn by the same code.
        pytest.param(*one, marks=[pytest.mark.slow] * (one[0] not in PAPER), id=" ".join((one[0], *one[1])))
        for one in DRAWN
    ],
)
def test_texts_of_committed_runs_are_large_enough_and_none_lies_on_another(run, look):
    smallest = STYLES[look.get("style", "screen")].small
    assert look or smallest >= 9
    for plot in plots_of(run):
        figure = draw(plot, **look)[0].figure
        assert figure.get_figwidth() == look.get("width", WIDTH_INCHES) <= 6
        assert min(text.get_fontsize() for text in shown(figure)) >= smallest
        assert overlaps(figure) == []
        assert outside(figure) == []


@pytest.mark.parametrize("run", ["advise", "compare", "compare-probes-encoder"])
def test_no_two_entries_of_a_legend_look_the_same(run):
    for plot in plots_of(run):
        looks = [
            tuple(str(one.style.get(key)) for key in ("color", "marker", "linestyle")) for one in plot.entries
        ]
        assert len(looks) == len(set(looks)) and "None" not in {colour for colour, *_ in looks}


def one_chart(*series, **more):
    return Plot("Title", "conditions", ((Chart(Axis("x", "log2"), Axis("y", "log"), series, **more),),))


def test_markers_that_would_coincide_are_left_out_and_each_line_keeps_some():
    lines = [Series(name, (1, 2, 4, 8), (1.0, 1.0, 1.0, 2.0), LINE) for name in "abcd"]
    (ax,) = draw(one_chart(*lines, apart=True))
    kept = [tuple(line.get_markevery()) for line in ax.lines]
    assert sorted(number for one in kept for number in one) == [0, 1, 2, 3] and all(kept)


def test_points_that_would_coincide_are_moved_and_a_dot_stays_at_their_place():
    points = [Series(name, (2,), (1.0,), {**LINE, "linestyle": "none"}) for name in "ab"]
    (ax,) = draw(one_chart(*points, Series("c", (1, 8), (1.0, 2.0), LINE), apart=True))
    a, b, _, dot = ax.lines
    assert a.get_transform() == ax.transData != b.get_transform()
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (2, 1.0) and dot.get_marker() == "."
    first, second = (line.get_transform().transform((2, 1.0)) for line in (a, b))
    assert second[0] - first[0] >= 5 / 72 * ax.figure.dpi


def test_values_without_a_place_on_a_logarithmic_axis_are_left_out():
    line = Series("a", (1, 2, 4), (0.0, 5.0, 1e308), LINE, low=(0.0, 0.0, 1.0), high=(1.0, 6.0, 1.0))
    (ax,) = draw(one_chart(line))
    assert ax.lines[0].get_ydata().tolist() == [5.0]
    assert one_chart(line._replace(x=(1,), y=(0.0,), low=(), high=())).is_empty


def test_a_single_error_bar_on_a_logarithmic_axis_has_room_and_no_warning():
    # Places of which matplotlib's rounding makes one or two; pytest makes errors of warnings.
    for place in (0.023988217000351142, *(1.1**power for power in range(40))):
        bar = Series("a", (place,), (0.5,), LINE, (0.4,), (0.6,), bars=True)
        (ax,) = draw(Plot("", "", ((Chart(Axis(scale="log"), Axis(scale="log"), (bar,)),),)))
        low, high = ax.get_xlim()
        assert low < place < high and high > 2 * low


def test_narrow_figures_have_one_chart_in_a_row():
    chart = Chart(Axis(), Axis(), (Series("a", (1, 2), (1, 2), LINE),))
    plot = Plot("", "", ((chart, chart),))
    rows = [[ax.get_subplotspec().num1 for ax in draw(plot, width=width)] for width in (6, 3)]
    assert rows == [[0, 1], [0, 1]]
    heights = [draw(plot, width=width)[0].figure.get_figheight() / width for width in (6, 3)]
    assert heights[1] > 1.5 * heights[0]


def test_the_style_for_papers_has_small_letters_and_no_title():
    plot = one_chart(Series("a", (1, 2), (1, 2), LINE))
    screen, paper = (draw(plot, style=style)[0].figure for style in STYLES)
    assert "Title" in texts(screen) and "conditions" in texts(screen)
    assert "Title" not in texts(paper) and "conditions" not in texts(paper)
    assert max(text.get_fontsize() for text in shown(paper)) == 8


def test_labels_replace_names_in_legends_and_tables(tmp_path):
    run = folder(tmp_path / "run", costs() + errors())
    redraw.report(run, labels={"window": "Ours (local)"}, width=3.3, style="paper")
    for name in ("time.svg", "tables.md", "report.html"):
        assert "Ours (local)" in (run / name).read_text(encoding="utf-8"), name
    assert (
        "window" in (run / "records.jsonl").read_text() and ">window<" not in (run / "time.svg").read_text()
    )
    with Image.open(run / "time.png") as image:
        assert image.width / image.info["dpi"][0] == pytest.approx(3.3, abs=0.01)


def test_the_look_of_a_plot_is_chosen_in_python_too():
    figure = Results(costs()).plot(labels={"window": "ours"}, width=3.3, style="paper").figure
    assert figure.get_figwidth() == 3.3 and "ours" in texts(figure)


def test_wrong_looks_are_refused_in_one_line_that_names_what_would_work(tmp_path):
    run = folder(tmp_path / "run", costs())
    with pytest.raises(UnknownNameError, match=r"No line or row is called 'windw'. Did you mean 'window'"):
        redraw.report(run, labels={"windw": "ours"})
    with pytest.raises(
        OptionError, match=r"width is 2 to 40 inches, not 0\.5; a column of a paper is about 3\.3"
    ):
        redraw.report(run, width=0.5)
    with pytest.raises(UnknownNameError, match=r"No style is called 'papers'. Did you mean 'paper'"):
        redraw.report(run, style="papers")


def test_the_page_has_the_drawings_of_the_files(tmp_path):
    run = folder(tmp_path / "run", costs())
    redraw.report(run)
    drawing = base64.b64encode((run / "time.svg").read_bytes()).decode()
    assert drawing in (run / "report.html").read_text(encoding="utf-8")


def test_the_command_takes_labels_width_and_style(tmp_path):
    pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
    from efficient_attn_cli.main import main

    run = folder(tmp_path / "run", costs() + errors())
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run), "--label", "window=Ours (a=b)", "--width", "3.3", "--style", "paper"])
    assert ended.value.code == 0 and "Ours (a=b)" in (run / "time.svg").read_text(encoding="utf-8")


def test_a_label_names_a_variant_with_the_equals_signs_of_its_settings():
    report = pytest.importorskip("efficient_attn_cli.report", reason="needs an installation")
    assert report._labels(["linformer(rank=64)=Linformer, k = 64"]) == {
        "linformer(rank=64)": "Linformer, k = 64"
    }
    with pytest.raises(OptionError, match=r"--label cannot be 'window'\. Write name=text"):
        report._labels(["window"])
