"""Errors as tables: one per input, backends as rows, sizes as columns."""

from collections.abc import Sequence

from efficient_attn.report.error_table import CONCATENATED, CONCATENATED_NOTE, show_error
from efficient_attn.report.table import Table
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES, SEED, sized
from efficient_attn.stats.median import FEWEST_FOR_95
from efficient_attn.studies.mse.analysis import ErrorPoint, Panel, panels, quantity_in

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
    if point.record.matched is not None:
        shown = f"{shown} [{sized(point.record.case).size}]"
    if point.draws == 1 or not point.value:
        return shown
    spread = max(point.high - point.value, point.value - point.low) / point.value
    return f"{shown} ±{spread:.0%}"


def _table(panel: Panel, quantity: str) -> Table:
    sizes = _columns(panel)
    rows = (
        [] if panel.yardstick is None else [(MEAN_OF_VALUES, show_error(panel.yardstick), *[""] * len(sizes))]
    )
    for curve in (*panel.others, *panel.curves):
        fixed = next((show_point(point) for point in curve.points if point.size is None), "")
        cells = [show_point(point) if (point := curve.at(size)) else "" for size in sizes]
        rows.append((curve.label, fixed, *cells))
    return Table(
        f"{NAMES[quantity]}: {panel.title}",
        ("backend", "no size", *map(str, sizes)),
        tuple(rows),
        (
            *([CONCATENATED_NOTE] if panel.source == CONCATENATED else []),
            *_match_note(panel),
            *_draws_note(panel),
            *_data_note(panel),
            *_odd_note(panel, sizes),
            *_unsafe_notes(panel),
            *_failures(panel),
        ),
    )


def _columns(panel: Panel) -> list[int]:
    """All sizes, but an odd one that stands for the even size before it has no column of its own."""
    curves = (*panel.others, *panel.curves)
    sizes = {point.size for curve in curves for point in curve.points if point.size is not None}
    return sorted(size for size in sizes if size - 1 not in sizes)


def _odd_note(panel: Panel, sizes: Sequence[int]) -> list[str]:
    odd = {curve.label for curve in panel.curves for point in curve.points if (point.size or 0) - 1 in sizes}
    return [f"{', '.join(sorted(odd))}: sizes are odd, each one more than its column says."] if odd else []


def _match_note(panel: Panel) -> list[str]:
    records = [point.record for curve in panel.curves for point in curve.points]
    quantity = next((record.matched for record in records if record.matched is not None), None)
    if quantity is None:
        return []
    return [
        f"Equal budgets of {quantity}: a column is what performer-positive takes with so many features; in "
        "brackets the size of each backend that takes no more. Ranks of the SVD are not matched."
    ]


def _draws_note(panel: Panel) -> list[str]:
    drawn = [point for curve in panel.curves if curve.random for point in curve.points]
    return [f"Random features: {over_draws(drawn)}."] if drawn else []


def over_draws(points: Sequence[ErrorPoint]) -> str:
    """`medians of 8 draws (seeds 0 to 7); ± is the 95 % interval over draws on the same inputs`."""
    counts = sorted({point.draws for point in points})
    case = points[0].record.case
    own = case.options.get(SEED)
    first = case.seed + (own if isinstance(own, int) else 0)
    if counts == [1]:
        return f"one draw (seed {first}), so nothing tells how far another one would be"
    what = "the 95 % interval" if counts[0] >= FEWEST_FOR_95 else "the range"
    return (
        f"medians of {', '.join(map(str, counts))} draws (seeds {first} to {first + counts[-1] - 1}); "
        f"± is {what} over draws on the same inputs"
    )


def _data_note(panel: Panel) -> list[str]:
    """How far the medians move from one draw of the inputs to another."""
    moved = [
        (max((point.data_high or 0) - point.value, point.value - (point.data_low or 0)) / point.value, curve)
        for curve in (*panel.others, *panel.curves)
        for point in curve.points
        if point.data_seeds > 1 and point.value
    ]
    if not moved:
        return []
    widest, curve = max(moved, key=lambda one: one[0])
    count = curve.points[0].data_seeds
    what = "95 % interval" if count >= FEWEST_FOR_95 else "range"
    return [
        f"Inputs: medians of {count} seeds of the inputs; their {what} is at most ±{widest:.0%} "
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
