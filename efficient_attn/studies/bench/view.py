"""Views of a benchmark: tables, sentences with their numbers, and plots with Pareto fronts."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.measure.units import show_bytes, show_seconds
from efficient_attn.measure.variants import CEILING, UNIFORM_ATTENTION, single_names
from efficient_attn.report.figures import GRID, LARGEST, MUTED, Axis, Chart, Plot, Series, line_styles
from efficient_attn.report.table import full
from efficient_attn.report.text import (
    compared,
    edges,
    interval_words,
    inverse,
    is_wide,
    rounded,
    setting,
    show_error,
    show_ratio,
)
from efficient_attn.stats.candidates import missing, operations_sentence
from efficient_attn.stats.estimates import (
    DEVICE_TIME,
    FEWEST_ROUNDS,
    RUN_SHIFT,
    TIME,
    Curve,
    Point,
    SpeedUp,
    Typical,
    by_clock,
    by_subject,
    curves,
    speed_ups,
    time_ratio,
)
from efficient_attn.stats.noise_warnings import remedy
from efficient_attn.studies.bench.comparison import (
    Comparison,
    Contender,
    by_setting,
    comparisons,
    error_limit,
)
from efficient_attn.studies.bench.tables import (
    error_cell,
    heading_of,
    inputs_words,
    many_lengths,
)
from efficient_attn.studies.bench.tables import tables as tables
from efficient_attn.studies.view import Environment, Plots

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
# Sides of a speed-up; without an interval it has none.
_SIDES = {1: "faster than exact", -1: "slower", 0: "undecided", 2: f"fewer than {FEWEST_ROUNDS} rounds"}
_TOKENS = Axis("sequence length, tokens", "log2", "{:.0f}".format)


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The conclusion at the longest length with errors, then speeds by length."""
    groups = by_setting(comparisons(records))
    longest = [group[-1] for group in reversed(groups)]
    texts = [_verdict(comparison, environment) for comparison in longest]
    texts += filter(None, (operations_sentence(comparison.records) for comparison in longest))
    subjects = by_subject(records) if many_lengths(records) or not groups else {}
    for subject, group in subjects.items():
        place = "" if subject == "attention" else f" of the {subject}"
        for clock, timed in by_clock(group).items():
            where = place if clock == TIME else f"{place} by {clock}"
            texts += _speed_sentences(where, curves(timed, "time_s"), "" if longest else remedy(environment))
    return texts


def _speed_sentences(place: str, times: Sequence[Curve], settled: str) -> list[str]:
    """Backends that are faster, slower and undecided, one sentence per setting and length."""
    sides: dict[tuple[int, str], dict[int, list[SpeedUp]]] = {}
    for row in speed_ups(times):
        # A file may hold times whose ratio no float can hold.
        if row.case.backend != CEILING and 0 < row.last.median < math.inf:
            side = 2 if row.last.low is None else row.last.side_of_one
            sides.setdefault((row.case.tokens, setting(row.case)), {}).setdefault(side, []).append(row)
    sentences = []
    for (tokens, where), rows in sides.items():
        parts = []
        for side, words in _SIDES.items():
            ordered = sorted(rows.get(side, []), key=lambda row: -row.last.median)
            ratios = [inverse(row.last) if side == -1 else row.last for row in ordered]
            names = (f"{row.label} {_times(ratio)}" for row, ratio in zip(ordered, ratios, strict=True))
            parts += [f"{words}: {', '.join(names)}"] if ordered else []
        sentence = f"Speed{place} at {tokens} tokens ({where}): {'; '.join(parts)}."
        sentences.append(f"{sentence} {settled}" if settled and 0 in rows else sentence)
    return sentences


def _times(ratio: Typical) -> str:
    return show_ratio(ratio) if ratio.low is None else f"{rounded(*ratio[:3])}×"


def _verdict(comparison: Comparison, environment: Environment) -> str:
    """The conclusion at the longest length in one sentence, then the nearest alternatives."""
    case, max_error = comparison.case, error_limit(environment)
    place = f"at {case.tokens} tokens ({inputs_words(comparison)}; {setting(case)})"
    exact, share = comparison.exact, f"{100 * max_error:g} %"
    if exact is None:
        return f"No comparison {place}: no error of exact attention was measured."
    everywhere = " on every layer" if len(single_names(comparison.inputs)) > 1 else ""
    near = comparison.near(max_error)
    finished = {row.label for row in comparison.contenders if row.failed or (row.error and row.timed)}
    left = missing(environment, finished)
    nothing = "No backend measured so far" if left else "No backend"
    both = f"within {share} of exact{everywhere} and faster"
    untimed = [row for row in comparison.candidates if not row.timed and row.worst <= max_error]
    if not near and untimed:
        text = f"Undecided {place}: not timed, but within {share} of exact{everywhere}: {_names(untimed)}"
    elif not near:
        text = f"{nothing} is within {share} of exact{everywhere} {place}"
        text += f". Nearest: {_names(_nearest(comparison.candidates))}" if comparison.candidates else ""
    elif faster := comparison.faster(near):
        best, *others = faster
        assert best.timed is not None and exact.timed is not None
        text = f"{best.label} is {compared(time_ratio(best.timed, exact.timed))} than exact {place}"
        text += f", error {full(error_cell(best))}"
        text += f". Also {both}: {_names(others, exact)}" if others else ""
    elif alike := comparison.faster(near, side=0):
        names = ", ".join(row.label for row in alike)
        text = f"Undecided {place} whether {names} is faster than exact. {remedy(environment)[:-1]}"
    else:
        text = f"{nothing} is {both} {place}. "
        if fast := comparison.faster(comparison.candidates):
            text += f"Nearest of the faster ones: {_names(_nearest(fast), exact)}. "
        text += f"Fastest within {share}: {_names(near[:1], exact)}"
    return f"{text}.{left}"


def _nearest(rows: Iterable[Contender]) -> list[Contender]:
    return sorted(rows, key=lambda row: row.error.median if row.error else math.inf)[:1]


def _names(rows: Iterable[Contender], exact: Contender | None = None) -> str:
    """`window (error 0.3, 2.5 ± 0.3 times faster)`; without exact attention the error alone."""
    texts = []
    for row in rows:
        speed = ""
        if row.timed is not None and exact is not None and exact.timed is not None:
            speed = f", {compared(time_ratio(row.timed, exact.timed))}"
        texts.append(f"{row.label} (error {full(error_cell(row))}{speed})")
    return ", ".join(texts) or "none"


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The plots worth a file: costs and errors against tokens, and errors against costs."""
    measured = {record.case.kind for record in records if record.status == "ok"}
    groups = by_setting(comparisons(records))
    pictures: Plots = {}
    if many_lengths(records) or not groups:
        pictures = {
            name: cost_plot(records, quantity) for quantity, (name, *_) in _COSTS.items() if name in measured
        }
        if queued := by_clock(records).get(DEVICE_TIME):
            pictures["device-time"] = cost_plot(queued)._replace(title="Device time of one queued call")
    if drawn := [group for group in groups if len(group) > 1]:
        pictures["error"] = error_plot(drawn)
    if groups:
        pictures["comparison"] = comparison_plot(groups, error_limit(environment))
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
    return Series(curve.label, x, y, style, low, high, hints=tuple(map(_status, curve.points)))


def _status(point: Point) -> str:
    """Status of a point, with what its drawing leaves out."""
    if point.value is None:
        return f"{point.record.status}: {point.record.reason}"
    wide = is_wide(point.value, point.low, point.high)
    return f"measured, {interval_words(point.value, point.low, point.high)}" if wide else "measured"


def comparison_plot(groups: Sequence[Sequence[Comparison]], max_error: float) -> Plot:
    """Two charts for the longest comparison of each setting."""
    shown = [group[-1] for group in groups]
    backends = {row.label: row.backend for comparison in shown for row in comparison.contenders}
    styles = line_styles([pair for pair in backends.items() if pair[1] != UNIFORM_ATTENTION])
    styles = {label: {**style, **_POINT} for label, style in styles.items()}
    styles[UNIFORM_ATTENTION] = {"color": MUTED, "marker": (4, 1, 0), **_POINT}
    rows = [[_chart(comparison, cost, styles, max_error) for cost in _COSTS] for comparison in shown]
    headings = [heading_of(comparison) for comparison in shown]
    if len(shown) > 1:
        rows = [
            [first._replace(notes=(heading,)), second]
            for (first, second), heading in zip(rows, headings, strict=True)
        ]
    several = any(row.layers > 1 for comparison in shown for row in comparison.contenders)
    return Plot(
        "Relative error against cost",
        f"{headings[0] if len(shown) == 1 else ''}\n"
        f"filled: Pareto front; shaded: within {100 * max_error:g} % of exact and cheaper"
        f"{'; markers and bars: median and range over the layers' if several else ''}",
        tuple(map(tuple, rows)),
    )


def error_plot(groups: Sequence[Sequence[Comparison]]) -> Plot:
    """Relative error against tokens, a chart for each setting."""
    last = [group[-1] for group in groups]
    rows = [row for comparison in last for row in comparison.contenders if row.backend != UNIFORM_ATTENTION]
    styles = line_styles([(row.label, row.backend) for row in rows])
    styles[UNIFORM_ATTENTION] = {"color": MUTED, "linestyle": "--"}
    charts = []
    for group in groups:
        lengths = [comparison.case.tokens for comparison in group]
        series = []
        for label, style in styles.items():
            points = [
                (comparison.case.tokens, row.error.median, row.worst > comparison.rounding)
                for comparison in group
                if (row := comparison.row(label)) is not None and row.error
            ]
            if points:
                x = tuple(tokens for tokens, *_ in points)
                y = tuple(min(error, HIGHEST) if far else None for _, error, far in points)
                hints = tuple(
                    f"{'measured' if far else 'rounding'}: {show_error(error)}" for _, error, far in points
                )
                series.append(Series(label, x, y, style, hints=hints))
        drawn = [y for line in series for y in line.y if y is not None]
        marks = {mark: f"{mark:g}" for mark in MARKS if mark > min(drawn, default=1) / 2}
        marks |= {HIGHEST: f"> {HIGHEST:g}"} if HIGHEST in drawn else {}
        charts.append(
            Chart(
                _TOKENS._replace(ticks=lengths),
                Axis("relative output error", "log", show_error, marks),
                tuple(series),
                inputs_words(group[-1]) if len(groups) > 1 else "",
            )
        )
    conditions = f"{inputs_words(last[0])}; median over the layers; rounding errors are not drawn"
    return Plot("Relative error of the output", conditions, tuple((chart,) for chart in charts))


def _chart(comparison: Comparison, cost: str, styles: dict[str, dict[str, Any]], max_error: float) -> Chart:
    _, title, axis = _COSTS[cost]
    drawn = [(x, row, row.error) for row in comparison.contenders if row.error and (x := row.cost(cost))]
    real = [error for *_, spread in drawn for error in spread[:3] if error > comparison.rounding]
    floor = min([*real, max_error]) / _BELOW

    def height(error: float) -> float:
        return floor if error <= comparison.rounding else min(error, HIGHEST)

    series, front = [], comparison.front(cost)
    for x, row, error in drawn:
        style = styles[row.label]
        style = {**style, "markerfacecolor": style["color"] if row in front else "white"}
        low, high = ((height(edge),) if row.layers > 1 else () for edge in (error.low, error.high))
        series.append(Series(row.label, (x,), (height(error.median),), style, low, high, bars=bool(low)))
    marks = {mark: f"{mark:g}" for mark in MARKS if floor * 1.3 < mark}
    marks |= {HIGHEST: f"> {HIGHEST:g}"} if any(error > HIGHEST for error in real) else {}
    return Chart(
        axis._replace(label=f"{title[0].lower()}{title[1:]}"),
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
        draw=partial(
            _shade,
            comparison.exact.cost(cost) if comparison.exact is not None else None,
            floor / 2,
            max_error,
        ),
    )


def _shade(edge: float | None, low: float, high: float, ax: Any) -> None:
    if edge:
        left, right = ax.get_xlim()
        ax.fill_between([left, edge], low, high, color=GRID, alpha=0.6, linewidth=0, zorder=0)
        ax.set_xlim(left, right)
