"""Errors as tables: one per input, backends as rows, sizes as columns."""

from collections.abc import Sequence

from efficient_attn.report.error_table import CONCATENATED, CONCATENATED_NOTE, show_error
from efficient_attn.report.table import Table
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.studies.mse.analysis import ErrorPoint, Panel, interval, panels, quantity_in

NAMES = {
    "output_relative_error": "Relative output error",
    "output_mse": "Mean squared output error",
    "weights_relative_error": "Relative error of the attention weights",
    "weights_row_kl": "Divergence of the attention weights, nats per row",
    "unsafe_rows": "Share of rows whose weights' sum is zero or negative",
}


def error_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each input: medians over draws."""
    quantity = quantity_in(records)
    return [_table(panel, quantity) for panel in panels(records, quantity)]


def show_point(point: ErrorPoint) -> str:
    """The value, with half the width of its interval over draws where there were several."""
    shown = show_error(point.value)
    if point.draws == 1 or not point.value:
        return shown
    spread = max(point.high - point.value, point.value - point.low) / point.value
    return f"{shown} ±{spread:.0%}"


def _table(panel: Panel, quantity: str) -> Table:
    sizes = _columns(panel)
    rows = (
        [] if panel.yardstick is None else [(MEAN_OF_VALUES, show_error(panel.yardstick), *[""] * len(sizes))]
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
            *_draws_note(panel),
            *_data_note(panel),
            *_odd_note(panel, sizes),
            *_unsafe_notes(panel),
            *_failures(panel),
        ),
    )


def _columns(panel: Panel) -> list[int]:
    """All sizes, but an odd one that stands for the even size before it has no column of its own."""
    sizes = {point.size for curve in panel.curves for point in curve.points if point.size is not None}
    return sorted(size for size in sizes if size - 1 not in sizes)


def _odd_note(panel: Panel, sizes: Sequence[int]) -> list[str]:
    odd = {curve.label for curve in panel.curves for point in curve.points if (point.size or 0) - 1 in sizes}
    return [f"{', '.join(sorted(odd))}: sizes are odd, each one more than its column says."] if odd else []


def _draws_note(panel: Panel) -> list[str]:
    """`Random features: medians of 8 draws; ± is the 95 % interval over draws on the same inputs.`"""
    counts = sorted({point.draws for curve in panel.curves if curve.random for point in curve.points})
    if not counts:
        return []
    if counts == [1]:
        return ["Random features: one draw, and no measure of the distance of another one."]
    number = ", ".join(map(str, counts))
    return [
        f"Random features: medians of {number} draws; ± is the {interval(counts[0])} over draws on the same "
        "inputs."
    ]


def _data_note(panel: Panel) -> list[str]:
    """How far the medians move from one draw of the inputs to another."""
    moved = [
        (max((point.data_high or 0) - point.value, point.value - (point.data_low or 0)) / point.value, curve)
        for curve in panel.curves
        for point in curve.points
        if point.data_seeds > 1 and point.value
    ]
    if not moved:
        return []
    widest, curve = max(moved, key=lambda one: one[0])
    count = curve.points[0].data_seeds
    return [
        f"Inputs: medians of {count} seeds of the inputs; their {interval(count)} is at most ±{widest:.0%} "
        f"({curve.label}), apart from that over draws."
    ]


def _unsafe_notes(panel: Panel) -> list[str]:
    notes = []
    for curve in panel.curves:
        shares = [point.record.unsafe_rows for point in curve.points if point.record.unsafe_rows is not None]
        if shares and max(shares) > 0:
            notes.append(
                f"{curve.label}: the sum of the weights is zero or negative in "
                f"{min(shares):.2%} to {max(shares):.2%} of the rows."
            )
    return notes


def _failures(panel: Panel) -> list[str]:
    return [f"{record.case.label}: {record.status}: {record.reason}" for record in panel.failed]
