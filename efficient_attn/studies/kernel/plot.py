"""The error of one kernel entry: measured points over the lines of theory."""

from collections.abc import Sequence
from typing import Any

from efficient_attn.report.error_table import show_error
from efficient_attn.report.figures import Axis, Chart, Plot, Series, in_rows
from efficient_attn.report.palette import line_styles
from efficient_attn.runner.records import Record
from efficient_attn.studies.kernel.analysis import KernelPanel, KernelPoint, kernel_panels

TITLE = "Mean squared error of one kernel entry over its square"

# An interval of a mean with 95 %, in standard errors.
WIDE = 1.96


def kernel_plot(records: Sequence[Record]) -> Plot:
    """Points with 95 % intervals over lines of theory, a chart for each norm and angle."""
    panels = kernel_panels(records)
    points = [point for panel in panels for point in panel.points]
    backends = {point.line: point.record.case.backend for point in points}
    styles = line_styles(list(backends.items()))
    charts = [_chart(panel, styles) for panel in panels]
    draws = max((len(point.record.kernel_mse_draws or ()) for point in points), default=0)
    conditions = f"lines: theory; points: mean of {draws} draws, 95 % interval, where they suffice"
    legend = tuple(Series(label, (), (), style) for label, style in styles.items())
    return Plot(TITLE, conditions, in_rows(charts), legend)


def _chart(panel: KernelPanel, styles: dict[str, Any]) -> Chart:
    lines = [one for label, points in panel.lines.items() for one in _series(points, styles[label])]
    return Chart(
        Axis("features", "log2", ticks=sorted({point.size for point in panel.points})),
        Axis("relative mean squared error", "log", show_error),
        tuple(lines),
        panel.title,
        apart=True,
    )


def _series(points: Sequence[KernelPoint], style: dict[str, Any]) -> list[Series]:
    """The line of theory, and points whose interval, where it reaches 0, ends at a hundredth of the mean."""
    known = [(point.size, point.mean, WIDE * (point.error or 0.0)) for point in points if point.mean]
    theory = {**style, "marker": "", "linewidth": 1.3}
    return [
        Series("", [point.size for point in points], [point.expected for point in points], theory),
        Series(
            points[0].line,
            [size for size, *_ in known],
            [mean for _, mean, _ in known],
            {**style, "linestyle": "none"},
            [mean - min(wide, 0.99 * mean) for _, mean, wide in known],
            [mean + wide for _, mean, wide in known],
            bars=True,
        ),
    ]
