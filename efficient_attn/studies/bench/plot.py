"""Plots of a benchmark: time and memory against tokens, on logarithmic axes."""

from collections.abc import Sequence

from efficient_attn.measure.record import Record
from efficient_attn.measure.units import show_bytes, show_seconds
from efficient_attn.report.figures import LARGEST, Axis, Chart, Plot, Series, line_styles
from efficient_attn.report.text import setting
from efficient_attn.stats.curves import DEVICE_TIME, Curve, by_clock, by_subject, curves
from efficient_attn.stats.estimates import RUN_SHIFT
from efficient_attn.studies.view import Environment, Plots

_TITLES = {
    "time_s": "Time of one call",
    "peak_bytes": "Peak memory of one call, excluding its inputs",
}

# Plots worth a file, by name.
_FILES = {"time": "time_s", "memory": "peak_bytes"}

# Space around the medians; wider intervals leave the picture, which would be flat lines otherwise.
_MARGIN = 1.5


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The plots worth a file."""
    measured = {record.case.kind for record in records if record.status == "ok"}
    found = {name: cost_plot(records, quantity) for name, quantity in _FILES.items() if name in measured}
    if queued := by_clock(records).get(DEVICE_TIME):
        found["device-time"] = cost_plot(queued)._replace(title="Device time of one queued call")
    return found


def cost_plot(records: Sequence[Record], y: str = "time_s") -> Plot:
    """One cost of every backend against tokens: a chart for attention, one for the block, …"""
    drawn = {subject: curves(group, y) for subject, group in by_subject(records).items()}
    styles = line_styles([(one.label, one.backend) for group in drawn.values() for one in group])
    costs = Axis(scale="log", show=show_seconds) if y == "time_s" else Axis(scale="log2", show=show_bytes)
    charts = []
    for subject, group in drawn.items():
        lengths = sorted({point.tokens for curve in group for point in curve.points})
        chart = Chart(
            Axis("sequence length, tokens", "log2", "{:.0f}".format, lengths),
            costs._replace(limits=_limits(group)),
            tuple(_series(curve, styles[curve.label]) for curve in group),
            subject.capitalize() if len(drawn) > 1 or subject != "attention" else "",
        )
        charts.append(chart)
    shown = [chart for chart in charts if chart.drawable().series] or charts
    cases = [point.record.case for group in drawn.values() for one in group for point in one.measured]
    conditions = setting(cases[0]) if cases else ""
    if cases and y == "time_s":
        conditions += f"; median with its 95 % interval, with a shift of {RUN_SHIFT:.0%} between runs"
    return Plot(_TITLES[y], conditions, tuple((chart,) for chart in shown))


def _limits(group: Sequence[Curve]) -> tuple[float, float] | None:
    """Ends of the axis of costs: around the medians, whatever their intervals are."""
    values = [point.value for curve in group for point in curve.measured if point.value]
    values = [value for value in values if 1 / LARGEST < value < LARGEST]
    return (min(values) / _MARGIN, max(values) * _MARGIN) if values else None


def _series(curve: Curve, style: dict[str, object]) -> Series:
    columns = (
        tuple(getattr(point, name) for point in curve.measured) for name in ("tokens", "value", "low", "high")
    )
    x, y, low, high = columns
    return Series(curve.label, x, y, style, low, high)
