"""Plots of a benchmark: time and memory against tokens, on logarithmic axes."""

from collections.abc import Sequence
from functools import partial

from efficient_attn.errors import UnknownNameError
from efficient_attn.report.escape import short
from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import line_styles
from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.units import show_bytes, show_seconds
from efficient_attn.stats.curves import QUANTITIES, Curve, by_subject, curves
from efficient_attn.studies.view import Environment, Plots

_TITLES = {
    "time_s": "Time of one call",
    "peak_bytes": "Peak memory of one call, excluding its inputs",
    "parameter_bytes": "Parameters and buffers",
    "state_bytes": "State carried on after all tokens",
}
_LONGEST_NAME = 36

# Plots worth a file, by name.
_FILES = {"time": "time_s", "memory": "peak_bytes"}


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The plots worth a file."""
    measured = {record.case.kind for record in records if record.status == "ok"}
    return {
        name: partial(cost_plot, records, quantity) for name, quantity in _FILES.items() if name in measured
    }


def plot(
    records: Sequence[Record], environment: Environment, y: str | None = None, x: str | None = None
) -> Plot:
    """One cost of every backend against tokens."""
    if y not in (None, *QUANTITIES):
        raise UnknownNameError("quantity to plot", str(y), QUANTITIES)
    if x not in (None, "tokens"):
        raise UnknownNameError(f"x axis for {y}", str(x), ["tokens"])
    return cost_plot(records, y or "time_s")


def cost_plot(records: Sequence[Record], y: str = "time_s") -> Plot:
    """One cost of every backend against tokens: a chart for attention, one for the block, …"""
    drawn = {subject: curves(group, y) for subject, group in by_subject(records).items()}
    styles = line_styles([(one.label, one.backend) for group in drawn.values() for one in group])
    charts = []
    for subject, group in drawn.items():
        chart = Chart(
            Axis(
                "sequence length, tokens",
                "log2",
                "{:.0f}".format,
                sorted({p.tokens for c in group for p in c.points}),
            ),
            Axis(scale="log", show=show_seconds) if y == "time_s" else Axis(scale="log2", show=show_bytes),
            tuple(_series(curve, styles[curve.label]) for curve in group),
        )
        title = subject if len(drawn) > 1 or subject not in ("", "attention") else ""
        charts.append(chart._replace(title=title[:1].upper() + title[1:]))
    shown = [chart for chart in charts if chart.drawable().series]
    cases = [point.record.case for group in drawn.values() for one in group for point in one.measured]
    conditions = _conditions(cases[0], timed=y == "time_s") if cases else ""
    return Plot(_TITLES[y], conditions, tuple((chart,) for chart in shown or charts))


def line_name(curve: Curve) -> str:
    """The label, shortened if it would take the plot's place, and where it could not be measured."""
    label = short(curve.label, _LONGEST_NAME)
    missing = [point for point in curve.points if point.value is None]
    return f"{label} ({missing[0].record.status} at {missing[0].tokens})" if missing else label


def _series(curve: Curve, style: dict[str, object]) -> Series:
    points = curve.measured
    x, y, low, high = (
        tuple(getattr(point, name) for point in points) for name in ("tokens", "value", "low", "high")
    )
    return Series(curve.label, x, y, style, low, high, entry=line_name(curve))


def _conditions(case: Case, *, timed: bool) -> str:
    """The setting that all lines have in common."""
    passes = "forward and backward" if case.backward else "forward"
    where = f"{case.threads} CPU threads" if case.device == "cpu" else case.device
    causal = ", causal" if case.causal else ""
    heads = f"batch {case.batch}, {case.num_heads} heads of {case.head_dim}"
    setting = f"{passes}{causal}; {heads}, {case.dtype}, {where}"
    return f"{setting}; median with its 95 % interval within the run" if timed else setting
