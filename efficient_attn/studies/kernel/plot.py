"""The error of one kernel entry: measured points over the lines of theory."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from efficient_attn.errors import UnknownNameError
from efficient_attn.report.error_table import show_error
from efficient_attn.report.figures import Axis, Chart, Plot, Series, in_rows
from efficient_attn.report.palette import baseline_style, line_styles
from efficient_attn.runner.records import Record
from efficient_attn.studies.kernel.analysis import (
    AXES,
    KernelLine,
    KernelPanel,
    kernel_panels,
    kernel_points,
    plain_guesses,
)
from efficient_attn.studies.kernel.tables import NAME, WIDE, title_of
from efficient_attn.studies.view import Environment, Plots

_LABELS = {"size": "features", "angle": "angle between query and key, degrees", "norm": "norm |x| = |y|"}

# Quantities that are plotted, and the axis that each is drawn over.
OVER = {"kernel_mse": "size", "kernel_mse_by_angle": "angle", "kernel_mse_by_norm": "norm"}

# How far below the least error the axes go, and points of a baseline from one end of an axis to the other.
_FURTHER, _STEPS = 10.0, 240


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The error over every axis with two places."""
    points = kernel_points(records)
    return {
        quantity.replace("_mse", "").replace("_", "-"): partial(kernel_plot, records, axis)
        for quantity, axis in OVER.items()
        if points and (axis == "size" or len({point.at(axis) for point in points}) > 1)
    }


def plot(
    records: Sequence[Record], environment: Environment, y: str | None = None, x: str | None = None
) -> Plot:
    """The error over size, angle or norm."""
    if y not in (None, *OVER):
        raise UnknownNameError("quantity to plot", y or "", list(OVER))
    return kernel_plot(records, x or OVER.get(y or "", "size"))


def kernel_plot(records: Sequence[Record], x: str = "size") -> Plot:
    """Points with 95 % intervals over lines of theory, a chart for each value of the other axes."""
    if x not in AXES:
        raise UnknownNameError("x axis for kernel_mse", x, AXES)
    shown = kernel_panels(records, x)
    styles = line_styles(list({one.label: one.backend for panel in shown for one in panel.lines}.items()))
    limits = _limits(shown)
    charts = [_chart(panel, styles, x, limits) for panel in shown]
    draws = max((len(record.kernel_mse_draws or ()) for record in records), default=0)
    conditions = f"lines: theory; points: mean of {draws} draws, 95 % interval"
    return Plot(NAME, conditions, in_rows(charts), _entries(shown, styles))


def _chart(panel: KernelPanel, styles: dict[str, Any], x: str, limits: tuple[float, float]) -> Chart:
    series: list[Series] = []
    for number, name in enumerate(plain_guesses(1, 90)):
        places = _places(panel, x)
        values = (
            [plain_guesses(**{**dict(panel.fixed), x: place})[name] for place in places]
            if x != "size"
            else ([plain_guesses(**dict(panel.fixed))[name]] * len(places))
        )
        series.append(Series(name, places, values, baseline_style(number + 1)))
    for line in panel.lines:
        series += _series(line, styles[line.label], x)
    lost = "; ".join(filter(None, (_lost(line, x) for line in panel.lines)))
    places = sorted({p.at(x) for line in panel.lines for p in line.points})
    return Chart(
        Axis(_LABELS[x], "log2" if x == "size" else "linear", ticks=places),
        Axis("relative mean squared error", "log", show_error, limits=limits),
        tuple(series),
        title_of(panel),
        (f"not measured, too few draws: {lost}",) if lost else (),
        apart=True,
    )


def _series(line: KernelLine, style: dict[str, Any], x: str) -> list[Series]:
    """The line of theory, and points whose interval, where it reaches 0, ends at a hundredth of the mean."""
    known = [(p.mean, WIDE * (p.error or 0.0)) for p in line.points if p.mean]
    low = [mean - min(wide, 0.99 * mean) for mean, wide in known]
    points = [p.at(x) for p in line.points if p.mean]
    theory = [p.expected for p in line.points]
    return [
        Series("", [p.at(x) for p in line.points], theory, {**style, "marker": "", "linewidth": 1.3}),
        Series(
            line.label,
            points,
            [mean for mean, _ in known],
            {**style, "linestyle": "none"},
            low,
            [mean + wide for mean, wide in known],
            bars=True,
        ),
    ]


def _places(panel: KernelPanel, x: str) -> list[float]:
    """Places of a baseline: close to each other, since it may vanish between two measured ones."""
    known = [p.at(x) for line in panel.lines for p in line.points]
    low, high = min(known), max(known)
    return [low + (high - low) * step / _STEPS for step in range(_STEPS + 1)]


def _limits(shown: Sequence[KernelPanel]) -> tuple[float, float]:
    """Around the errors measured or expected; baselines further below are in the tables."""
    points = [point for panel in shown for line in panel.lines for point in line.points]
    values = [value for point in points for value in (point.mean, point.expected) if value]
    return (min(values) / _FURTHER, max(values) * 2) if values else (1e-3, 1.0)


def _lost(line: KernelLine, x: str) -> str:
    """Where a line has no points."""
    places = [f"{p.at(x):g}" for p in line.points if p.mean is None and p.record.status == "skipped"]
    return f"{line.label} {', '.join(places)}" if places else ""


def _entries(shown: Sequence[KernelPanel], styles: dict[str, Any]) -> tuple[Series, ...]:
    silent = {
        line.label for panel in shown for line in panel.lines if all(p.expected is None for p in line.points)
    }
    entries = [
        Series(label, (), (), {**style, "linestyle": "none"}, entry=f"{label} (no closed form)")
        if label in silent
        else Series(label, (), (), style)
        for label, style in styles.items()
    ]
    guesses = enumerate(plain_guesses(1, 90))
    return (*entries, *(Series(name, (), (), baseline_style(number + 1)) for number, name in guesses))
