"""Errors as tables: one per input, backends as rows, sizes as columns."""

from collections.abc import Sequence

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION
from efficient_attn.report.table import Table
from efficient_attn.report.text import CONCATENATED, CONCATENATED_NOTE, failure_notes, show_error
from efficient_attn.studies.mse.analysis import NAMES, ErrorPoint, Panel, interval, panels, quantity_in


def error_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each input: medians over draws."""
    quantity = quantity_in(records)
    return [_table(panel, quantity) for panel in panels(records, quantity)]


def show_point(point: ErrorPoint) -> str:
    """The value, with half the width of its interval where there were several samples."""
    shown = show_error(point.value)
    if point.samples == 1 or not point.value:
        return shown
    spread = max(point.high - point.value, point.value - point.low) / point.value
    return f"{shown} ±{spread:.0%}"


def _table(panel: Panel, quantity: str) -> Table:
    sizes = _columns(panel)
    rows = (
        []
        if panel.yardstick is None
        else [(UNIFORM_ATTENTION, show_error(panel.yardstick), *[""] * len(sizes))]
    )
    for curve in panel.curves:
        fixed = next((show_point(point) for point in curve.points if point.size is None), "")
        cells = [show_point(point) if (point := curve.at(size)) else "" for size in sizes]
        rows.append((curve.label, fixed, *cells))
    return Table(
        f"{NAMES[quantity]}: {panel.title}",
        ("backend", "no size", *map(str, sizes)),
        tuple(rows),
        (
            *([CONCATENATED_NOTE] if panel.source == CONCATENATED else []),
            *_interval_note(panel),
            *_odd_note(panel, sizes),
            *failure_notes(panel.failed),
        ),
    )


def _columns(panel: Panel) -> list[int]:
    """All sizes, but an odd one that stands for the even size before it has no column of its own."""
    sizes = {point.size for curve in panel.curves for point in curve.points if point.size is not None}
    return sorted(size for size in sizes if size - 1 not in sizes)


def _odd_note(panel: Panel, sizes: Sequence[int]) -> list[str]:
    odd = {curve.label for curve in panel.curves for point in curve.points if (point.size or 0) - 1 in sizes}
    return [f"{', '.join(sorted(odd))}: sizes are odd, each one more than its column says."] if odd else []


def _interval_note(panel: Panel) -> list[str]:
    found = interval([point for curve in panel.curves for point in curve.points])
    return [f"±: {found}."] if found else []
