"""Figures: readable at the width of a phone, the same for page, file and paper."""

from pathlib import Path

import pytest
from drawn import outside, overlaps, shown, texts
from made_records import costs

from efficient_attn.report.drawing import STYLES, WIDTH_INCHES, draw
from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.studies.results import Results, read

RUNS = Path(__file__).parents[2] / "results" / "epyc-2-cores"
LINE = {"color": "#0072b2", "marker": "o", "linestyle": "-"}

# A run of each study is drawn in both styles; the further runs of a study are drawn by the same code.
STUDIES = ("bench-256-4096", "compare", "mse-default", "recall-default", "swap-encoder")
DRAWN = [
    *((path.parent.name, {}) for path in sorted(RUNS.glob("*/records.jsonl"))),
    *((name, {"style": "paper", "width": 3.3}) for name in STUDIES),
]


@pytest.mark.parametrize(
    ("run", "look"),
    [
        pytest.param(run, look, marks=[pytest.mark.slow] * (run not in STUDIES), id=" ".join((run, *look)))
        for run, look in DRAWN
    ],
)
def test_texts_of_committed_runs_are_large_enough_and_none_lies_on_a_second_text(run, look):
    smallest = STYLES[look.get("style", "screen")].small
    assert look or smallest >= 9
    for plot in read(RUNS / run).plots().values():
        figure = draw(plot, **look)[0].figure
        assert figure.get_figwidth() == look.get("width", WIDTH_INCHES) <= 6
        assert min(text.get_fontsize() for text in shown(figure)) >= smallest
        assert overlaps(figure) == []
        assert outside(figure) == []


@pytest.mark.parametrize("run", ["advise", "compare", "compare-encoder-128"])
def test_no_two_entries_of_a_legend_look_the_same(run):
    for plot in read(RUNS / run).plots().values():
        keys = ("color", "marker", "linestyle")
        looks = [tuple(str(series.style.get(key)) for key in keys) for series in plot.entries]
        assert len(looks) == len(set(looks)) and "None" not in {colour for colour, *_ in looks}


def chart_of(*series, **fields):
    return Plot("Title", "conditions", ((Chart(Axis("x", "log2"), Axis("y", "log"), series, **fields),),))


def test_lines_of_a_chart_with_coincident_lines_alternate_in_their_markers():
    lines = [Series(name, (1, 2, 4, 8), (1.0, 1.0, 1.0, 2.0), LINE) for name in "ab"]
    points = Series("c", (2,), (1.0,), {**LINE, "linestyle": "none"})
    for apart, expected in ((True, [(0, 2), (1, 2), None]), (False, [None] * 3)):
        (ax,) = draw(chart_of(*lines, points, apart=apart))
        assert [line.get_markevery() for line in ax.lines] == expected


def test_values_beyond_a_logarithmic_axis_are_left_out():
    line = Series("a", (1, 2, 4), (0.0, 5.0, 1e308), LINE, low=(0.0, 0.0, 1.0), high=(1.0, 6.0, 1.0))
    (ax,) = draw(chart_of(line))
    assert ax.lines[0].get_ydata().tolist() == [5.0]
    assert chart_of(line._replace(x=(1,), y=(0.0,), low=(), high=())).is_empty


def test_a_single_error_bar_on_a_logarithmic_axis_has_room_and_no_warning():
    # Places of which matplotlib's rounding makes one or two; pytest makes errors of warnings.
    for place in (0.023988217000351142, *(1.1**power for power in range(40))):
        bar = Series("a", (place,), (0.5,), LINE, (0.4,), (0.6,), bars=True)
        (ax,) = draw(Plot("", "", ((Chart(Axis(scale="log"), Axis(scale="log"), (bar,)),),)))
        low, high = ax.get_xlim()
        assert low < place < high and high > 2 * low


def test_a_chart_of_a_narrow_figure_has_a_row_to_itself():
    chart = Chart(Axis(), Axis(), (Series("a", (1, 2), (1, 2), LINE),))
    wide, narrow = (draw(Plot("", "", ((chart, chart),)), width=width) for width in (6, 3))
    rows = [[ax.get_subplotspec().rowspan.start for ax in axes] for axes in (wide, narrow)]
    assert rows == [[0, 0], [0, 1]]


def test_the_style_for_papers_has_small_letters_and_no_title():
    screen, paper = (
        draw(chart_of(Series("a", (1, 2), (1, 2), LINE)), style=style)[0].figure for style in STYLES
    )
    assert "Title" in texts(screen) and "conditions" in texts(screen)
    assert "Title" not in texts(paper) and "conditions" not in texts(paper)
    assert max(text.get_fontsize() for text in shown(paper)) == 8


def test_the_look_of_a_plot_is_chosen_in_python_too():
    figure = Results(costs()).plot(labels={"window": "ours"}, width=3.3, style="paper").figure
    assert figure.get_figwidth() == 3.3 and "ours" in texts(figure)
