"""Error against time and against memory: the Pareto fronts, and the region of a backend worth its error."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.measure.units import show_bytes, show_seconds
from efficient_attn.measure.variants import MEAN_OF_VALUES
from efficient_attn.report.figures import GRID, MUTED, Axis, Chart, Plot, Series, line_styles
from efficient_attn.report.text import heading, show_error
from efficient_attn.studies.compare.analysis import Comparison, comparisons

# Rounding is drawn this many times below the smallest error of a method: its own distance means nothing.
_BELOW = 2.5
# Larger errors are drawn no higher.
HIGHEST = 3.0
MARKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_POINT = {"linestyle": "none", "markersize": 8, "markeredgewidth": 1.5, "clip_on": False}

_COSTS = {
    "time_s": ("time of one call", "log", show_seconds),
    "peak_bytes": ("peak memory of one call, excluding its inputs", "log2", show_bytes),
}


def comparison_plot(records: Sequence[Record], max_error: float) -> Plot:
    """Two charts for each comparison."""
    found = comparisons(records)
    backends = {row.label: row.backend for one in found for row in one.contenders}
    styles = line_styles([pair for pair in backends.items() if pair[1] != MEAN_OF_VALUES])
    styles = {label: {**style, **_POINT} for label, style in styles.items()}
    styles[MEAN_OF_VALUES] = {"color": MUTED, "marker": (4, 1, 0), **_POINT}
    rows = [[_chart(one, cost, styles, max_error) for cost in _COSTS] for one in found]
    if len(found) > 1:
        rows = [
            [first._replace(notes=(heading(one.case),)), second]
            for (first, second), one in zip(rows, found, strict=True)
        ]
    several = any(row.layers > 1 for one in found for row in one.contenders)
    return Plot(
        "Relative error against cost",
        f"{heading(found[0].case) if len(found) == 1 else ''}\n"
        "filled: on the Pareto front (none has both less error and less cost); shaded: within "
        f"{100 * max_error:g} % of exact, and cheaper"
        f"{'; markers and bars: median and range over the layers' if several else ''}",
        tuple(map(tuple, rows)),
    )


def _chart(one: Comparison, cost: str, styles: dict[str, dict[str, Any]], max_error: float) -> Chart:
    label, scale, show = _COSTS[cost]
    drawn = [(x, row, row.error) for row in one.contenders if row.error and (x := row.cost(cost))]
    real = [error for *_, known in drawn for error in known[:3] if error > one.rounding]
    floor = min([*real, max_error]) / _BELOW

    def height(error: float) -> float:
        return floor if error <= one.rounding else min(error, HIGHEST)

    series, front = [], one.front(cost)
    for x, row, error in drawn:
        style = styles[row.label]
        style = {**style, "markerfacecolor": style["color"] if row in front else "white"}
        low, high = ((height(edge),) if row.layers > 1 else () for edge in (error.low, error.high))
        series.append(Series(row.label, (x,), (height(error.median),), style, low, high, bars=bool(low)))
    marks = {mark: f"{mark:g}" for mark in MARKS if floor * 1.3 < mark}
    marks |= {HIGHEST: "higher"} if any(error > HIGHEST for error in real) else {}
    return Chart(
        Axis(label, scale, show),
        Axis(
            "relative output error",
            "log",
            show_error,
            {floor: "rounding", **marks},
            (floor / 1.3, HIGHEST * 1.05),
        ),
        tuple(series),
        apart=True,
        height=3.4,
        draw=partial(_shade, one.exact.cost(cost) if one.exact is not None else None, floor / 2, max_error),
    )


def _shade(edge: float | None, low: float, high: float, ax: Any) -> None:
    """Shade where a backend would be both nearly exact and cheaper than exact attention."""
    if edge:
        left, right = ax.get_xlim()
        ax.fill_between([left, edge], low, high, color=GRID, alpha=0.6, linewidth=0, zorder=0)
        ax.set_xlim(left, right)
