"""The error of one kernel entry: measured points over the lines of theory."""

from collections.abc import Sequence
from typing import Any

from efficient_attn.report.figures import Axis, Chart, Plot, Series, in_rows, line_styles
from efficient_attn.report.text import show_error
from efficient_attn.runner.records import Record
from efficient_attn.studies.kernel.analysis import Entry, entries, entry_panels
from efficient_attn.studies.mse.analysis import Panel

TITLE = "Mean squared error of one kernel entry over its square"

# An interval of a mean with 95 %, in standard errors.
WIDE = 1.96


def kernel_plot(records: Sequence[Record]) -> Plot:
    """Points with 95 % intervals over lines of theory, a chart for each norm and angle."""
    panels = entry_panels(records)
    styles = line_styles([(curve.label, curve.backend) for panel in panels for curve in panel.curves])
    draws = max((len(record.kernel_mse_draws or ()) for record in records), default=0)
    conditions = f"lines: theory; points: mean of {draws} draws, 95 % interval, where they suffice"
    legend = tuple(Series(label, (), (), style) for label, style in styles.items())
    return Plot(TITLE, conditions, in_rows([_chart(panel, styles) for panel in panels]), legend)


def _chart(panel: Panel, styles: dict[str, Any]) -> Chart:
    lines = entries(panel)
    return Chart(
        Axis("features", "log2", ticks=sorted({one.size for line in lines.values() for one in line})),
        Axis("relative mean squared error", "log", show_error),
        tuple(one for label, line in lines.items() for one in _series(label, line, styles[label])),
        panel.title,
        apart=True,
    )


def _series(label: str, line: Sequence[Entry], style: dict[str, Any]) -> list[Series]:
    """The line of theory, and points whose interval, where it reaches 0, ends at a hundredth of the mean."""
    known = [(one.size, one.mean, WIDE * (one.error or 0.0)) for one in line if one.mean]
    theory = {**style, "marker": "", "linewidth": 1.3}
    return [
        Series("", [one.size for one in line], [one.expected for one in line], theory),
        Series(
            label,
            [size for size, *_ in known],
            [mean for _, mean, _ in known],
            {**style, "linestyle": "none"},
            [mean - min(wide, 0.99 * mean) for _, mean, wide in known],
            [mean + wide for _, mean, wide in known],
            bars=True,
        ),
    ]
