"""Kernel entries: measured errors next to theory, as tables, sentences and a plot."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import sized
from efficient_attn.report.figures import Axis, Chart, Plot, Series, in_rows, line_styles
from efficient_attn.report.table import Table
from efficient_attn.report.text import show_error
from efficient_attn.studies.mse.analysis import Panel, panels
from efficient_attn.studies.view import Plots

# Squared errors of estimates that are exact are rounding below this.
ROUNDING = 1e-20


class Entry(NamedTuple):
    """Mean squared error of one kernel entry over its square.

    Attributes:
        mean: Mean over draws; None if not measurable.
        error: Standard error of the mean over draws; None for a single draw.
        expected: Theoretical error; None without a closed form.
    """

    size: int
    mean: float | None
    error: float | None
    expected: float | None

    @property
    def deviation(self) -> float | None:
        """Measured minus theoretical error, in standard errors."""
        if self.mean is None or self.expected is None or not self.error or self.expected < ROUNDING:
            return None
        return (self.mean - self.expected) / self.error


def entry_panels(records: Iterable[Record]) -> tuple[Panel, ...]:
    """One panel for each norm and angle, without records that have no size or no exact entry."""
    sized_records = [
        record for record in records if record.kernel_value and sized(record.case).size is not None
    ]
    return panels(sized_records, "kernel_value")


def entries(panel: Panel) -> dict[str, list[Entry]]:
    """Entries by label, in rising order of size."""
    return {curve.label: [_entry(point.record) for point in curve.points] for curve in panel.curves}


def _entry(record: Record) -> Entry:
    square = (record.kernel_value or math.nan) ** 2
    draws = [draw / square for draw in record.kernel_mse_draws or () if draw is not None]
    expected = record.expected_kernel_mse
    return Entry(
        size=sized(record.case).size or 0,
        mean=float(np.mean(draws)) if draws else None,
        error=float(np.std(draws, ddof=1) / math.sqrt(len(draws))) if len(draws) > 1 else None,
        expected=None if expected is None else expected / square,
    )


TITLE = "Mean squared error of one kernel entry over its square"

# An interval of a mean with 95 %, in standard errors.
WIDE = 1.96


def plots(records: Sequence[Record]) -> Plots:
    """Points with 95 % intervals over lines of theory, a chart for each norm and angle."""
    panels = entry_panels(records)
    if not panels:
        return {}
    styles = line_styles([(curve.label, curve.backend) for panel in panels for curve in panel.curves])
    draws = max((len(record.kernel_mse_draws or ()) for record in records), default=0)
    conditions = f"lines: theory; points: mean of {draws} draws, 95 % interval, where they suffice"
    charts = in_rows([_chart(panel, styles) for panel in panels])
    return {"kernel_mse": Plot(TITLE, conditions, charts)}


def _chart(panel: Panel, styles: dict[str, Any]) -> Chart:
    lines = entries(panel)
    return Chart(
        Axis("features", "log2", ticks=sorted({entry.size for line in lines.values() for entry in line})),
        Axis("relative mean squared error", "log", show_error),
        tuple(entry for label, line in lines.items() for entry in _series(label, line, styles[label])),
        panel.title,
        apart=True,
    )


def _series(label: str, line: Sequence[Entry], style: dict[str, Any]) -> list[Series]:
    """The line of theory, and points whose interval, where it reaches 0, ends at a hundredth of the mean."""
    measured = [(entry.size, entry.mean, WIDE * (entry.error or 0.0)) for entry in line if entry.mean]
    theory = {**style, "marker": "", "linewidth": 1.3}
    return [
        Series(
            "" if measured else label,
            [entry.size for entry in line],
            [entry.expected for entry in line],
            theory,
            hints=["theory"] * len(line),
        ),
        Series(
            label,
            [size for size, *_ in measured],
            [mean for _, mean, _ in measured],
            {**style, "linestyle": "none"},
            [mean - min(wide, 0.99 * mean) for _, mean, wide in measured],
            [mean + wide for _, mean, wide in measured],
            bars=True,
        ),
    ]


# Further from theory than this is no chance.
_SURE = 4.0


def tables(records: Sequence[Record]) -> list[Table]:
    """One table for each norm and angle: the error, its interval, and the ratio to theory."""
    draws = sorted({len(record.kernel_mse_draws or ()) for record in records} - {0})
    notes = (
        f"Mean of {', '.join(map(str, draws)) or 'no'} draws and its 95 % interval. ×: measured over theory. "
        "In brackets: theory (too few draws).",
        *dict.fromkeys(f"{r.case.backend}: {r.reason}" for r in records if r.status == "unsupported"),
    )
    return [_table(panel, notes) for panel in entry_panels(records)]


def sentences(records: Sequence[Record]) -> list[str]:
    """Agreement of measurement and theory."""
    measured = [
        entry for panel in entry_panels(records) for line in entries(panel).values() for entry in line
    ]
    deviations = [entry.deviation for entry in measured if entry.deviation is not None]
    ratios = [entry.mean / entry.expected for entry in measured if entry.mean and entry.expected]
    if not deviations or not ratios:
        return []
    close = sum(abs(deviation) <= _SURE for deviation in deviations)
    return [
        f"Measured errors of a kernel entry are within {_SURE:.0f} standard errors of theory at {close} of "
        f"{len(deviations)} points (measured over theory {min(ratios):.2f} to {max(ratios):.2f})."
    ]


def _table(panel: Panel, notes: tuple[str, ...]) -> Table:
    lines = entries(panel)
    sizes = sorted({entry.size for line in lines.values() for entry in line})
    cells = {label: {entry.size: _cell(entry) for entry in line} for label, line in lines.items()}
    rows = tuple((label, *(line.get(size, "") for size in sizes)) for label, line in cells.items())
    return Table(f"{TITLE}: {panel.title}", ("backend", *map(str, sizes)), rows, notes)


def _cell(entry: Entry) -> str:
    if entry.mean is None:
        return "" if entry.expected is None else f"({show_error(entry.expected)})"
    wide = f"\t±{100 * WIDE * entry.error / entry.mean:.0f} %" if entry.error and entry.mean else ""
    ratio = f" ×{entry.mean / entry.expected:.2f}" if entry.expected else ""
    return f"{show_error(entry.mean)}{ratio}{wide}"
