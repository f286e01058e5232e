"""Errors against size, one chart per input, with uniform attention in each."""

from collections.abc import Mapping, Sequence
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION
from efficient_attn.report.figures import UNIFORM_STYLE, Axis, Chart, Plot, Series, in_rows, line_styles
from efficient_attn.report.text import show_error
from efficient_attn.studies.mse.analysis import (
    NAMES,
    RELATIVE,
    ErrorCurve,
    Panel,
    interval,
    panels,
    quantity_in,
)

# An error of this many times the baseline is off the scale: a hundred or a million, both are no attention.
_WORST = 12.0
# Errors below this share of the baseline are rounding.
_ROUNDING = 1e-4

Styles = Mapping[str, Mapping[str, Any]]


def error_plot(records: Sequence[Record], y: str = RELATIVE) -> Plot:
    """The error of every backend against its size, a chart for each input."""
    quantity = quantity_in(records, y)
    shown = panels(records, quantity)
    styles = line_styles(
        list({curve.label: curve.backend for panel in shown for curve in panel.curves}.items())
    )
    # Inputs of one source share a scale, so that they can be compared.
    scales = {
        source: _limits([panel for panel in shown if panel.source == source])
        for source in {panel.source for panel in shown}
    }
    charts = [_chart(panel, styles, scales[panel.source], quantity) for panel in shown]
    found = interval([point for panel in shown for curve in panel.curves for point in curve.points])
    bands = f"; lines and bands: {found}" if found else ""
    conditions = f"reference in float64{bands}; errors at rounding are left out"
    title = f"{NAMES[quantity]} against exact softmax attention"
    return Plot(title, conditions, in_rows(charts, 1 if len(shown) == 1 else 2))


def _chart(panel: Panel, styles: Styles, scale: tuple[float, float], quantity: str) -> Chart:
    low, high = scale
    above = [curve for curve in panel.curves if min(point.value for point in curve.points) > high]
    series = []
    if panel.yardstick is not None:
        series.append(Series(UNIFORM_ATTENTION, (), (panel.yardstick,), UNIFORM_STYLE))
    for curve in panel.curves:
        if curve not in above and max(point.value for point in curve.points) >= low:
            series.append(_series(curve, styles[curve.label]))
    sizes = {point.size for curve in panel.curves for point in curve.points if point.size is not None}
    return Chart(
        Axis(
            "features, rank or window",
            "log2",
            "{:.0f}".format,
            [size for size in sizes if size - 1 not in sizes],
        ),
        Axis(NAMES[quantity].lower(), "log", show_error, limits=scale),
        tuple(series),
        panel.title,
        tuple(f"▲ {_range(curve)}" for curve in above),
        apart=True,
    )


def _series(curve: ErrorCurve, style: Mapping[str, Any]) -> Series:
    points = [point for point in curve.points if point.size is not None]
    if not points:
        return Series(curve.label, (), (curve.points[0].value,), {**style, "marker": ""})
    x, y, low, high = (tuple(getattr(p, name) for p in points) for name in ("size", "value", "low", "high"))
    return Series(curve.label, x, y, {**style, "markersize": 4, "linewidth": 1.5}, low, high)


def _range(curve: ErrorCurve) -> str:
    values = [point.value for point in curve.points]
    ends = dict.fromkeys((show_error(min(values)), show_error(max(values))))
    return f"{curve.label}: {' to '.join(ends)}"


def _limits(shown: Sequence[Panel]) -> tuple[float, float]:
    """From below the smallest error that is no rounding to above the largest that is no nonsense."""
    yardsticks = [panel.yardstick for panel in shown if panel.yardstick]
    floor, worst = _ROUNDING * min(yardsticks, default=1.0), _WORST * max(yardsticks, default=1.0)
    lines = [curve.points for panel in shown for curve in panel.curves]
    points = [point for line in lines if min(one.value for one in line) <= worst for point in line]
    real = [edge for point in points for edge in (point.value, point.low) if edge > floor] + yardsticks
    return min(real, default=1.0) / 1.4, min(max(real, default=1.0), worst) * 1.8
