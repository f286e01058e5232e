"""Error against time and against memory: the Pareto fronts, and the region of a backend worth its error."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from efficient_attn.report.error_table import layer_words, show_error
from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import GRID, MUTED, line_styles
from efficient_attn.runner.layers import single_names
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.runner.units import show_bytes, show_seconds
from efficient_attn.studies.compare.analysis import Comparison, Contender
from efficient_attn.studies.compare.grouping import comparisons
from efficient_attn.studies.compare.plan import DEFAULT_MAX_ERROR
from efficient_attn.studies.compare.tables import heading

# A space as wide as a digit, so that numbers stand below each other.
_DIGIT = "\u2007"

# Rounding is drawn this many times below the smallest error of a method: its own distance means nothing.
_BELOW = 2.5
# An error of this many times the baseline's is drawn no higher.
_WORST = 3.0
_MARKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_POINT = {"markersize": 8, "markeredgewidth": 1.5, "clip_on": False}

_COSTS = {
    "time_s": ("time of one call", "log", show_seconds),
    "peak_bytes": ("peak memory of one call, excluding its inputs", "log2", show_bytes),
}


def comparison_plot(records: Sequence[Record], max_error: float = DEFAULT_MAX_ERROR) -> Plot:
    """Two charts for each comparison, and in the legend of a single one the errors."""
    found = comparisons(records)
    styles = _styles([(row.label, row.backend) for one in found for row in one.contenders])
    rows = [tuple(_chart(one, cost, styles, max_error) for cost in _COSTS) for one in found]
    if len(found) > 1:
        rows = [
            (row[0]._replace(notes=(heading(one),)), *row[1:]) for row, one in zip(rows, found, strict=True)
        ]
    legend = [entry for one in found for entry in _entries(one, styles, numbered=len(found) == 1)]
    return Plot(
        "Relative error against cost",
        f"{heading(found[0]) if len(found) == 1 else ''}\n"
        "filled: on the Pareto front (none has both less error and less cost); shaded: within "
        f"{100 * max_error:g} % of exact, and cheaper; dots: places of markers that are moved sideways",
        tuple(rows),
        tuple(legend),
        _legend_title(found[0]) if len(found) == 1 else "",
    )


def _styles(named: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """{label: colour and marker, or stroke}; the baseline is grey."""
    lines = line_styles([pair for pair in dict.fromkeys(named) if pair[1] != MEAN_OF_VALUES])
    found = {label: {**style, "linestyle": "none", **_POINT} for label, style in lines.items()}
    star = {"color": MUTED, "marker": (4, 1, 0), "linestyle": "none", **_POINT}
    return found | {label: star for label, backend in named if backend == MEAN_OF_VALUES}


def _chart(one: Comparison, cost: str, styles: dict[str, dict[str, Any]], max_error: float) -> Chart:
    label, scale, show = _COSTS[cost]
    floor, ceiling = _limits(one, max_error)
    front = one.front(cost)

    def height(error: float) -> float:
        return floor if error <= one.rounding else min(error, ceiling)

    series = []
    for row in one.contenders:
        if row.error is None:
            continue
        y, style = height(row.error.median), styles[row.label]
        if x := row.cost(cost):
            fill = {"markerfacecolor": style["color"] if row in front else "white"}
            low, high = (
                (height(edge),) if row.layers > 1 else () for edge in (row.error.low, row.error.high)
            )
            series.append(Series(row.label, (x,), (y,), {**style, **fill}, low, high, bars=bool(low)))
    steps = [(x, height(row.error.median)) for row in front if (x := row.cost(cost)) and row.error]
    if steps:
        line = {"drawstyle": "steps-post", "color": MUTED, "linewidth": 1.0, "marker": "", "zorder": 1.9}
        places, heights = zip(*steps, strict=True)
        series.append(Series("", places, heights, line, entry=""))
    highest = max((row.worst for row in one.contenders if row.error is not None), default=0.0)
    marks = {mark: f"{mark:g}" for mark in _MARKS if floor * 1.3 < mark < ceiling / 1.2}
    # The highest place is that of all errors from there on; the legend has their numbers.
    marks = {floor: "rounding", **marks, **({ceiling: "higher"} if highest > ceiling else {})}
    edge = one.exact.cost(cost) if one.exact is not None else None
    return Chart(
        Axis(label, scale, show),
        Axis("relative output error", "log", show_error, marks, (floor / 1.3, ceiling * 1.05)),
        tuple(series),
        apart=True,
        height=3.4,
        draw=partial(_shade, edge, floor / 2, max_error),
    )


def _limits(one: Comparison, max_error: float) -> tuple[float, float]:
    """The height of rounding, and that above which nothing is drawn."""
    errors = [error for row in one.contenders if row.error for error in row.error[:3]]
    real = [error for error in errors if error > one.rounding]
    uniform = [row.error.median for row in one.contenders if row.backend == MEAN_OF_VALUES and row.error]
    ceiling = _WORST * max(*uniform, *(error for error in real if error <= 1), max_error, 0.5)
    return min([*real, max_error]) / _BELOW, ceiling


def _shade(edge: float | None, low: float, high: float, ax: Any) -> None:
    """Shade where a backend would be both nearly exact and cheaper than exact attention."""
    if edge:
        left, right = ax.get_xlim()
        ax.fill_between([left, edge], low, high, color=GRID, alpha=0.6, linewidth=0, zorder=0)
        ax.set_xlim(left, right)


def _legend_title(one: Comparison) -> str:
    """The meaning of points and bars for errors of several layers."""
    if len(single_names(one.case.inputs)) == 1:
        return "relative output error"
    return f"relative output error: median (bar: range) over {layer_words(one.case.inputs)}"


def _entries(one: Comparison, styles: dict[str, dict[str, Any]], *, numbered: bool) -> list[Series]:
    """Every name with its error, the smallest last."""
    known: list[tuple[float, Contender]] = [(row.error.median, row) for row in one.contenders if row.error]
    return [
        Series(
            row.label,
            (),
            (),
            styles[row.label],
            entry=f"{show_error(error).rjust(7, _DIGIT)}  {row.label}" if numbered else row.label,
        )
        for error, row in sorted(known, key=lambda pair: -pair[0])
    ]
