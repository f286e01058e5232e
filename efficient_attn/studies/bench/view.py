"""Views of a benchmark: sentences with their numbers, and plots."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.measure.units import show_bytes, show_seconds
from efficient_attn.measure.variants import UNIFORM_ATTENTION
from efficient_attn.report import figures
from efficient_attn.report.table import UNDECIDED, brief
from efficient_attn.report.text import edges, setting, show_error, show_ratio
from efficient_attn.runs.study import Run, Settled
from efficient_attn.stats.estimates import DEVICE_TIME, FASTER, OPEN, Curve, by_clock, curves
from efficient_attn.stats.noise_warnings import remedy
from efficient_attn.stats.speeds import speed_ups
from efficient_attn.studies.bench.comparison import ROUNDING, Comparison, Row, comparisons
from efficient_attn.studies.bench.tables import calls_by_heading, heading_of, start_cell
from efficient_attn.studies.bench.tables import tables as tables

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
    "time_s": ("time", "Time of one call", figures.Axis(scale="log", show=show_seconds)),
    "peak_bytes": (
        "memory",
        "Peak memory of one call, excluding its inputs",
        figures.Axis(scale="log2", show=show_bytes),
    ),
}
_TOKENS = figures.Axis("sequence length, tokens", "log2", "{:.0f}".format)


def sentences(records: Sequence[Record], run: Run[Settled]) -> list[str]:
    """The conclusion of each setting, speeds by device time, and whether no crossover is decided."""
    settings = comparisons(records)
    pairs = zip(settings, _places(settings, run), strict=True)
    texts = [_verdict(comparison, run.study.max_error, run, place) for comparison, place in pairs]
    for heading, calls in calls_by_heading(settings, run).items():
        if timed := by_clock(calls).get(DEVICE_TIME):
            rows = sorted(speed_ups(curves(timed, "time_s")), key=lambda row: -row.last.median)
            # A file may hold times whose ratio no float can hold.
            told = [f"{x.label} {brief(show_ratio(x.last))}" for x in rows if 0 < x.last.median < math.inf]
            if told:
                texts.append(f"Speed by device time ({heading}), exact 1×: {', '.join(told)}.")
    candidates = [row for comparison in settings for row in comparison.rows if row.is_candidate]
    starts = [brief(start) for start in map(start_cell, candidates) if start]
    if starts and all(start.endswith(UNDECIDED) for start in starts):
        texts.append("No crossover decided yet.")
    return [text for text in texts if text]


def _places(settings: Sequence[Comparison], run: Run[Settled]) -> list[str]:
    """Inputs of each setting, or its whole heading where two settings share their inputs."""
    headings = [heading_of(comparison, run) for comparison in settings]
    inputs = [heading.partition(":")[0] for heading in headings]
    alone = all(comparison.inputs for comparison in settings) and len({*inputs}) == len(inputs)
    return inputs if alone else headings


def _verdict(comparison: Comparison, limit: float, run: Run[Settled], place: str) -> str:
    """Backends within the error limit with their speeds, and the closest beyond it."""
    bound = f"within {100 * limit:g} % output error"
    fast = [row for row in comparison.rows if row.speed is not None and row.is_candidate]
    if comparison.inputs is None:
        rows = sorted(fast, key=lambda row: -row.speed.median if row.speed else 0.0)
        told = ", ".join(map(_in_words, rows))
        return f"{place}: {told}." if told else ""
    near, beyond, unknown = comparison.within(limit, comparison.longest)
    bound += " on every layer" * ("layers" in comparison.inputs)
    faster = [row for row in near if row.outcome == FASTER]
    parts = []
    if faster:
        parts.append(f"{bound} and faster: {', '.join(map(_in_words, faster))}")
    elif near:
        timed = [_in_words(row, f", {row.outcome if row.times else 'not timed'}") for row in near]
        parts.append(f"{bound}: {', '.join(timed)}")
    if unknown:
        names = ", ".join(_unknown_words(row, comparison.longest) for row in unknown)
        parts.append(f"error unknown: {names}")
    if not any(row.is_candidate and (row.speeds or row.largest is not None) for row in comparison.rows):
        return ""
    if not parts:
        parts.append(f"no backend stays {bound}")
    if useful := [row for row in beyond if row.speed is None or row.speed.outcome == FASTER]:
        nearest = min(useful, key=lambda row: row.largest or 0.0)
        floor = _floor_words(nearest, comparison)
        choice = " of the faster" * (nearest.speed is not None)
        parts.append(f"{'next' if near else 'closest'}{choice}: {_in_words(nearest, floor)}")
        # The nearest backend may read keys one by one, without a bound on its rank.
        ranked = [row for row in useful if _floor_words(row, comparison)]
        if ranked and not floor:
            best = min(ranked, key=lambda row: row.largest or 0.0)
            parts.append(f"of limited rank: {_in_words(best, _floor_words(best, comparison))}")
        uniform = comparison.row(UNIFORM_ATTENTION)
        measured = [row.errors.get(comparison.tokens) for row in (nearest, uniform) if row]
        errors = [error.worst for error in measured if error is not None]
        if len(errors) > 1 and errors[0] > errors[1]:
            parts.append("no faster backend is more accurate than uniform attention")
    text = f"{place}: {'. '.join(part[0].upper() + part[1:] for part in parts)}."
    if any(row.speed and row.outcome == OPEN for row in near):
        text += f" {remedy(run.load)}"
    return text


def _unknown_words(row: Row, tokens: int) -> str:
    """`near (not measured at 256)`, or a length at which errors of all keys do not hold."""
    if row.missing:
        return f"{row.label} (not measured at {', '.join(map(str, row.missing))})"
    return f"{row.label} at {tokens} tokens (reads all keys at {max(row.errors)}, where errors are measured)"


def _floor_words(row: Row, comparison: Comparison) -> str:
    """`; weights of rank 256 cannot err less than 0.002`, on the input of the largest error."""
    records = [x for x in comparison.records if x.case.label == row.label and x.output_relative_error]
    worst = max(records, key=lambda record: record.output_relative_error or 0.0, default=None)
    floor = 0.0 if worst is None else worst.weights_floor or 0.0
    if worst is None or floor < ROUNDING:
        return ""
    return f"; weights of rank {worst.weights_rank} cannot err less than {show_error(floor)}"


def _in_words(row: Row, remark: str = "") -> str:
    """`window (error 0.52, 8× at 4096 tokens, faster from 360)`."""
    parts = [] if row.largest is None else [f"error {show_error(row.largest)}"]
    if row.speed is not None:
        mark = "" if row.speed.samples else "~"
        parts.append(f"{mark}{brief(show_ratio(row.speed))} at {max(row.speeds)} tokens")
    if any(error.bland for error in row.errors.values()):
        parts.append("bland")
    if (start := brief(start_cell(row)))[:1].isdigit():
        parts.append(f"faster from {start}")
    return f"{row.label} ({', '.join(parts)}{remark})"


def plots(records: Sequence[Record], run: Run[Settled]) -> dict[str, figures.Plot]:
    """Error against speed beside time against length, or time alone, then memory against length."""
    settings, max_error = comparisons(records), run.study.max_error
    drawn = [x for x in settings if x.tokens and any(row.is_candidate and row.speeds for row in x.rows)]
    pictures = {"bench": comparison_plot(drawn, max_error)} if drawn else {}
    groups = calls_by_heading(settings, Run(Settled()))
    for cost, (name, *_) in _COSTS.items():
        lines = [line for calls in groups.values() for line in curves(calls, cost) if line.measured]
        # A single length is no line, and times stand beside errors already.
        if lines and not (drawn and (name == "time" or all(len(line.measured) < 2 for line in lines))):
            pictures[name] = cost_plot(groups, cost)
    clocks = {heading: by_clock(calls) for heading, calls in groups.items()}
    if queued := {heading: clock[DEVICE_TIME] for heading, clock in clocks.items() if DEVICE_TIME in clock}:
        pictures["device-time"] = cost_plot(queued)._replace(title="Device time of one queued call")
    return pictures


def cost_plot(groups: Mapping[str, Sequence[Record]], y: str = "time_s") -> figures.Plot:
    """One cost of every backend against tokens, a chart for each group of records by its title."""
    drawn = {title: curves(records, y) for title, records in groups.items()}
    labels = {curve.label: curve.backend for group in drawn.values() for curve in group}
    styles = figures.line_styles([*labels.items()])
    _, name, costs = _COSTS[y]
    charts = []
    for title, group in drawn.items():
        lengths = sorted({point.tokens for curve in group for point in curve.points})
        chart = figures.Chart(
            _TOKENS._replace(ticks=lengths),
            costs._replace(limits=_limits(group)),
            tuple(_series(curve, styles[curve.label]) for curve in group),
            notes=(title,) if len(drawn) > 1 else (),
        )
        charts.append(chart)
    shown = [chart for chart in charts if chart.drawable().series] or charts
    cases = [point.record.case for group in drawn.values() for curve in group for point in curve.measured]
    conditions = setting(cases[0]) if cases and len(drawn) == 1 else ""
    if cases and y == "time_s":
        conditions += "; median over rounds, 95 % interval"
    return figures.Plot(name, conditions.removeprefix("; "), tuple((chart,) for chart in shown))


def _limits(group: Sequence[Curve]) -> tuple[float, float] | None:
    """Ends of the axis of costs: around the medians, whatever their intervals are."""
    values = [point.value for curve in group for point in curve.measured if point.value]
    values = [value for value in values if 1 / figures.LARGEST < value < figures.LARGEST]
    return (min(values) / _MARGIN, max(values) * _MARGIN) if values else None


def _series(curve: Curve, style: dict[str, object]) -> figures.Series:
    x, y = (tuple(getattr(point, name) for point in curve.points) for name in ("tokens", "value"))
    low, high = edges(point[1:4] for point in curve.points)
    hints = tuple(
        "measured" if point.value is not None else f"{point.record.status}: {point.record.reason}"
        for point in curve.points
    )
    return figures.Series(curve.label, x, y, style, low, high, hints=hints)


def comparison_plot(drawn: Sequence[Comparison], max_error: float) -> figures.Plot:
    """For each setting error against speed and, of several lengths, time against length."""
    labels = {row.label: row.backend for comparison in drawn for row in comparison.rows}
    styles = figures.line_styles([pair for pair in labels.items() if pair[1] != UNIFORM_ATTENTION])
    errors, times = list[figures.Chart](), list[figures.Chart]()
    headings, shared = _headings([heading_of(comparison, Run(Settled())) for comparison in drawn])
    for comparison, heading in zip(drawn, headings, strict=True):
        timed = [r for r in comparison.records if r.case.kind == "time"]
        (time,) = cost_plot({"": timed}).charts
        series = tuple(line._replace(style=styles.get(line.label, line.style)) for line in time.series)
        times.append(time._replace(series=series))
        errors.append(_error_chart(comparison, styles, max_error)._replace(title=heading))
    conditions = "; ".join(filter(None, (shared, "lower right is better; bands: 95 % interval")))
    if all(len(time.x.ticks) < 2 for time in times):
        return figures.Plot("Output error against speed-up", conditions, figures.in_rows(errors))
    rows = tuple(zip(errors, times, strict=True))
    return figures.Plot("Output error against speed-up, and time of one call", conditions, rows)


def _headings(headings: Sequence[str]) -> tuple[list[str], str]:
    """Headings without the facts that all of several share, and these facts."""
    parts = [heading.split(", ") for heading in headings]
    shared = [part for part in parts[0] if all(part in others for others in parts[1:])]
    if len(parts) < 2 or any(len(shared) == len(others) for others in parts):
        return [*headings], ""
    return [", ".join(x for x in others if x not in shared) for others in parts], ", ".join(shared)


def _error_chart(comparison: Comparison, styles: dict[str, dict[str, Any]], limit: float) -> figures.Chart:
    """One point a backend: error on the worst layer against the speed at the longest length."""
    shown = [
        (row, row.errors[comparison.tokens], row.speeds[comparison.longest].median)
        for row in comparison.rows
        if comparison.tokens in row.errors
        and comparison.longest in row.speeds
        and row.backend != UNIFORM_ATTENTION
        and row.has_error_at(comparison.longest)
    ]
    real = [error.worst for _, error, _ in shown if error.worst > ROUNDING]
    floor = min([*real, limit], default=HIGHEST) / _BELOW
    series = []
    for row, error, speed in shown:
        y = floor if error.worst <= ROUNDING else min(error.worst, HIGHEST)
        series.append(figures.Series(row.label, (speed,), (y,), {**styles[row.label], **_POINT}))
    lines = {f"{100 * limit:g} % error": (limit, figures.LIMIT_STYLE)}
    if (uniform := comparison.row(UNIFORM_ATTENTION)) and comparison.tokens in uniform.errors:
        worst = min(uniform.errors[comparison.tokens].worst, HIGHEST)
        lines[UNIFORM_ATTENTION] = worst, figures.UNIFORM_STYLE
    series += [figures.Series(label, (), (y,), style) for label, (y, style) in lines.items()]
    capped = {HIGHEST: f"> {HIGHEST:g}"} if any(error >= HIGHEST for error in real) else {}
    marks = {floor: "rounding", **{mark: f"{mark:g}" for mark in MARKS if mark > 1.3 * floor}, **capped}
    return figures.Chart(
        figures.Axis(f"speed-up at {comparison.longest} tokens", "log2", "{:g}×".format),
        figures.Axis(
            f"relative output error, {comparison.tokens} tokens",
            "log",
            show_error,
            marks,
            (floor / 1.3, HIGHEST * 1.05),
        ),
        tuple(series),
        height=2.8,
    )
