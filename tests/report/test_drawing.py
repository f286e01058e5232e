"""Figures: readable at the width of a phone."""

from pathlib import Path

import pytest
from figure_texts import outside, overlaps, shown

from efficient_attn.report.drawing import SMALL, WIDTH_INCHES, draw
from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.runs.results import read

RUNS = Path(__file__).parents[2] / "results" / "epyc-2-cores"
LINE = {"color": "#0072b2", "marker": "o", "linestyle": "-"}

# The quickest runs; the slow tests have a run of every study.
STUDIES = ("compare", "recall-default")
DRAWN = [path.parent.name for path in sorted(RUNS.glob("*/records.jsonl"))]
PARAMS = [pytest.param(run, marks=[pytest.mark.slow] * (run not in STUDIES)) for run in DRAWN]


@pytest.mark.parametrize("run", PARAMS)
def test_texts_of_committed_runs_are_large_enough_and_none_lies_on_a_second_text(run):
    for plot in read(RUNS / run).plots().values():
        figure = draw(plot)[0].figure
        assert figure.get_figwidth() == WIDTH_INCHES <= 6
        assert min(text.get_fontsize() for text in shown(figure)) >= SMALL >= 9
        assert overlaps(figure) == []
        assert outside(figure) == []


@pytest.mark.parametrize("run", ["bench-512-8192", "compare", "compare-encoder-128"])
def test_no_two_entries_of_a_legend_look_the_same(run):
    for plot in read(RUNS / run).plots().values():
        keys = ("color", "marker", "fillstyle", "linestyle")
        lines = [line for chart in plot.drawable().charts for line in chart.series]
        styles = {line.label: line.style for line in lines if line.label}.values()
        looks = [tuple(str(style.get(key)) for key in keys) for style in styles]
        assert len(looks) == len(set(looks)) and "None" not in {colour for colour, *_ in looks}


def chart_of(*series, **fields):
    return Plot("Title", "conditions", ((Chart(Axis("x", "log2"), Axis("y", "log"), series, **fields),),))


def test_values_beyond_a_logarithmic_axis_are_left_out():
    line = Series("a", (1, 2, 4), (0.0, 5.0, 1e308), LINE, low=(0.0, 0.0, 1.0), high=(1.0, 6.0, 1.0))
    (ax,) = draw(chart_of(line))
    assert ax.lines[0].get_ydata().tolist() == [5.0]
    assert chart_of(line._replace(x=(1,), y=(0.0,), low=(), high=())).is_empty


def test_a_single_error_bar_on_a_logarithmic_axis_has_room_and_no_warning():
    # Places of which matplotlib's rounding makes one or two; pytest makes errors of warnings.
    for place in (0.023988217000351142, 1.0, 1.1**7):
        bar = Series("a", (place,), (0.5,), LINE, (0.4,), (0.6,), bars=True)
        (ax,) = draw(Plot("", "", ((Chart(Axis(scale="log"), Axis(scale="log"), (bar,)),),)))
        low, high = ax.get_xlim()
        assert low < place < high and high > 2 * low


def test_named_ticks_of_a_short_logarithmic_axis_stand_alone():
    named = Axis("y", "log", ticks={0.4: "rounding", 0.9: "large"}, limits=(0.3, 1.0))
    (ax,) = draw(Plot("", "", ((Chart(Axis("x"), named, (Series("a", (1, 2), (0.4, 0.9), LINE),)),),)))
    ax.figure.draw_without_rendering()
    labels = [label.get_text() for label in ax.get_yticklabels(which="both")]
    assert [text for text in labels if text] == ["rounding", "large"]
