"""Views of a benchmark: tables, sentences with their numbers, and plots with Pareto fronts."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.measure.units import show_bytes, show_seconds
from efficient_attn.measure.variants import CEILING, UNIFORM_ATTENTION, single_names
from efficient_attn.report.figures import LARGEST, MUTED, Axis, Chart, Plot, Series, line_styles
from efficient_attn.report.table import brief, full
from efficient_attn.report.text import compared, edges, setting, show_error, show_ratio
from efficient_attn.runs.study import Run, Settled
from efficient_attn.stats.estimates import (
    DEVICE_TIME,
    RUN_SHIFT,
    TIME,
    Curve,
    SpeedUp,
    by_clock,
    by_subject,
    curves,
    speed_ups,
)
from efficient_attn.stats.noise_warnings import remedy
from efficient_attn.studies.bench.comparison import Comparison, by_setting, comparisons
from efficient_attn.studies.bench.tables import error_cell, heading_of, inputs_words, subjects_alone

# Space around the medians; wider intervals leave the picture, which would be flat lines otherwise.
_MARGIN = 1.5

# Rounding is drawn this many times below the smallest error of a method: its own distance means nothing.
_BELOW = 2.5
# Larger errors are drawn no higher.
HIGHEST = 3.0
MARKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_POINT = {"linestyle": "none", "markersize": 8, "markeredgewidth": 1.5, "clip_on": False}

# Costs that are drawn: by quantity, the name of the file, the title, and the axis.
_COSTS = {
    "time_s": ("time", "Time of one call", Axis(scale="log", show=show_seconds)),
    "peak_bytes": (
        "memory",
        "Peak memory of one call, excluding its inputs",
        Axis(scale="log2", show=show_bytes),
    ),
}
_ERRORS = Axis("relative output error", "log", show_error)
_TOKENS = Axis("sequence length, tokens", "log2", "{:.0f}".format)


def sentences(records: Sequence[Record], max_error: float, run: Run[Settled]) -> list[str]:
    """The conclusion at the longest length with errors, then speeds at the longest length."""
    groups = by_setting(comparisons(records))
    texts = [_verdict(group[-1], max_error, run) for group in reversed(groups)]
    for subject, group in subjects_alone(records, groups).items():
        place = "" if subject == "attention" else f" of the {subject}"
        for clock, timed in by_clock(group).items():
            where = place if clock == TIME else f"{place} by {clock}"
            texts += _speed_sentences(where, speed_ups(curves(timed, "time_s")))
    return texts


def _speed_sentences(place: str, compared: Iterable[SpeedUp]) -> list[str]:
    """Speeds against exact attention, the fastest first, one sentence per setting and length."""
    settings: dict[tuple[int, str], list[SpeedUp]] = {}
    for row in sorted(compared, key=lambda row: -row.last.median):
        # A file may hold times whose ratio no float can hold.
        if row.case.backend != CEILING and 0 < row.last.median < math.inf:
            settings.setdefault((row.case.tokens, setting(row.case)), []).append(row)
    return [
        f"Speed{place} at {tokens} tokens ({where}), exact 1×: "
        f"{', '.join(f'{row.label} {brief(show_ratio(row.last))}' for row in rows)}."
        for (tokens, where), rows in settings.items()
    ]


def _verdict(comparison: Comparison, max_error: float, run: Run[Settled]) -> str:
    """The conclusion at the longest length in one sentence, or the nearest alternative."""
    case = comparison.case
    place = f"at {case.tokens} tokens ({inputs_words(comparison)}; {setting(case)})"
    if comparison.exact is None:
        return f"No comparison {place}: no error of exact attention was measured."
    near = comparison.near(max_error)
    if faster := comparison.faster(near):
        best = faster[0]
        text = f"{best.label} is {compared(comparison.speed(best))} than exact {place}"
        text += f", error {full(error_cell(best))}."
    elif alike := comparison.faster(near, side=0):
        names = ", ".join(row.label for row in alike)
        text = f"Undecided {place} whether {names} is faster than exact. {remedy(run.load)}"
    else:
        layers = " on every layer" if len(single_names(comparison.inputs)) > 1 else ""
        text = f"No backend is within {100 * max_error:g} % of exact{layers} and faster {place}."
        if fast := comparison.faster(comparison.candidates):
            nearest = min(fast, key=lambda row: row.worst)
            error, speed = full(error_cell(nearest)), compared(comparison.speed(nearest))
            text += f" Nearest of the faster ones: {nearest.label} (error {error}, {speed})."
    done = {row.label for row in comparison.contenders if row.failed or (row.error and row.timed)}
    return text + run.settled.missing(done)


def plots(records: Sequence[Record]) -> dict[str, Plot]:
    """The plots worth a file: costs and errors against tokens, and errors against costs."""
    measured = {record.case.kind for record in records if record.status == "ok"}
    groups = by_setting(comparisons(records))
    pictures: dict[str, Plot] = {}
    if subjects_alone(records, groups):
        pictures = {
            name: cost_plot(records, quantity) for quantity, (name, *_) in _COSTS.items() if name in measured
        }
        if queued := by_clock(records).get(DEVICE_TIME):
            pictures["device-time"] = cost_plot(queued)._replace(title="Device time of one queued call")
    if drawn := [group for group in groups if len(group) > 1]:
        pictures["error"] = error_plot(drawn)
    if groups:
        pictures["comparison"] = comparison_plot(groups)
    return pictures


def cost_plot(records: Sequence[Record], y: str = "time_s") -> Plot:
    """One cost of every backend against tokens: a chart for attention, curve for the block, …"""
    drawn = {subject: curves(group, y) for subject, group in by_subject(records).items()}
    styles = line_styles([(curve.label, curve.backend) for group in drawn.values() for curve in group])
    _, title, costs = _COSTS[y]
    charts = []
    for subject, group in drawn.items():
        lengths = sorted({point.tokens for curve in group for point in curve.points})
        chart = Chart(
            _TOKENS._replace(ticks=lengths),
            costs._replace(limits=_limits(group)),
            tuple(_series(curve, styles[curve.label]) for curve in group),
            subject.capitalize() if len(drawn) > 1 or subject != "attention" else "",
        )
        charts.append(chart)
    shown = [chart for chart in charts if chart.drawable().series] or charts
    cases = [point.record.case for group in drawn.values() for curve in group for point in curve.measured]
    conditions = setting(cases[0]) if cases else ""
    if cases and y == "time_s":
        conditions += f"; median with its 95 % interval, with a shift of {100 * RUN_SHIFT:.0f} % between runs"
    return Plot(title, conditions, tuple((chart,) for chart in shown))


def _limits(group: Sequence[Curve]) -> tuple[float, float] | None:
    """Ends of the axis of costs: around the medians, whatever their intervals are."""
    values = [point.value for curve in group for point in curve.measured if point.value]
    values = [value for value in values if 1 / LARGEST < value < LARGEST]
    return (min(values) / _MARGIN, max(values) * _MARGIN) if values else None


def _series(curve: Curve, style: dict[str, object]) -> Series:
    x, y = (tuple(getattr(point, name) for point in curve.points) for name in ("tokens", "value"))
    low, high = edges(point[1:4] for point in curve.points)
    hints = tuple(
        "measured" if point.value is not None else f"{point.record.status}: {point.record.reason}"
        for point in curve.points
    )
    return Series(curve.label, x, y, style, low, high, hints=hints)


def comparison_plot(groups: Sequence[Sequence[Comparison]]) -> Plot:
    """Two charts for the longest comparison of each setting."""
    shown = [group[-1] for group in groups]
    styles = {label: {**style, **_POINT} for label, style in _styles(shown).items()}
    headings = [heading_of(comparison) for comparison in shown]
    rows = []
    for comparison, heading in zip(shown, headings, strict=True):
        first, second = (_chart(comparison, cost, styles) for cost in _COSTS)
        rows.append((first._replace(notes=(heading,) if len(shown) > 1 else ()), second))
    return Plot(
        "Relative error against cost",
        f"{headings[0] if len(shown) == 1 else ''}\nfilled: Pareto front; bars: range over the layers",
        tuple(rows),
    )


def error_plot(groups: Sequence[Sequence[Comparison]]) -> Plot:
    """Relative error against tokens, a chart for each setting."""
    styles = _styles([group[-1] for group in groups])
    charts = [_error_chart(group, styles) for group in groups]
    if len(groups) > 1:
        titles = [inputs_words(group[-1]) for group in groups]
        charts = [chart._replace(title=title) for chart, title in zip(charts, titles, strict=True)]
    conditions = f"{inputs_words(groups[0][-1])}; median over the layers; rounding errors are not drawn"
    return Plot("Relative error of the output", conditions, tuple((chart,) for chart in charts))


def _error_chart(group: Sequence[Comparison], styles: dict[str, dict[str, Any]]) -> Chart:
    series = []
    for label, style in styles.items():
        rows = [(comparison, row) for comparison in group if (row := comparison.row(label)) and row.error]
        y = tuple(
            min(row.error.median, HIGHEST) if row.error and row.worst > comparison.rounding else None
            for comparison, row in rows
        )
        if rows:
            series.append(Series(label, tuple(comparison.case.tokens for comparison, _ in rows), y, style))
    drawn = [y for line in series for y in line.y if y is not None]
    lengths = [comparison.case.tokens for comparison in group]
    return Chart(
        _TOKENS._replace(ticks=lengths),
        _ERRORS._replace(ticks=_marks(min(drawn, default=1) / 2, drawn)),
        tuple(series),
    )


def _styles(shown: Sequence[Comparison]) -> dict[str, dict[str, Any]]:
    rows = {row.label: row.backend for comparison in shown for row in comparison.contenders}
    styles = line_styles([pair for pair in rows.items() if pair[1] != UNIFORM_ATTENTION])
    return {**styles, UNIFORM_ATTENTION: {"color": MUTED, "linestyle": "--", "marker": (4, 1, 0)}}


def _marks(low: float, errors: Sequence[float]) -> dict[float, str]:
    """Ticks of an axis of errors, above `low`."""
    capped = {HIGHEST: f"> {HIGHEST:g}"} if any(error >= HIGHEST for error in errors) else {}
    return {**{mark: f"{mark:g}" for mark in MARKS if mark > low}, **capped}


def _chart(comparison: Comparison, cost: str, styles: dict[str, dict[str, Any]]) -> Chart:
    _, title, axis = _COSTS[cost]
    drawn = [(x, row, row.error) for row in comparison.contenders if row.error and (x := row.cost(cost))]
    real = [error for *_, spread in drawn for error in spread[:3] if error > comparison.rounding]
    floor = min(real, default=HIGHEST) / _BELOW

    def height(error: float) -> float:
        return floor if error <= comparison.rounding else min(error, HIGHEST)

    series, front = [], comparison.front(cost)
    for x, row, error in drawn:
        style = styles[row.label]
        style = {**style, "markerfacecolor": style["color"] if row in front else "white"}
        low, high = ((height(edge),) if row.layers > 1 else () for edge in (error.low, error.high))
        series.append(Series(row.label, (x,), (height(error.median),), style, low, high, bars=bool(low)))
    marks, limits = {floor: "rounding", **_marks(1.3 * floor, real)}, (floor / 1.3, HIGHEST * 1.05)
    return Chart(
        axis._replace(label=f"{title[0].lower()}{title[1:]}"),
        _ERRORS._replace(ticks=marks, limits=limits),
        tuple(series),
        height=3.4,
    )
