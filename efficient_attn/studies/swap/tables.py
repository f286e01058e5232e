"""Models with their attention swapped, as tables."""

from collections.abc import Sequence

from efficient_attn.report.error_table import show_error
from efficient_attn.report.notes import calibration_note, failure_notes, setting
from efficient_attn.report.table import Table, show_ratio, show_spread, three_digits
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.studies.swap.analysis import (
    DISAGREEMENT,
    FIRST_TOKEN,
    HIDDEN,
    KL,
    MEAN_POOL,
    PERPLEXITY,
    QUANTITIES,
    Swap,
    SwapRow,
    swaps,
)
from efficient_attn.studies.view import Environment

_MILLISECOND, _MEBIBYTE = 1e-3, 2.0**20
_NONE = "–"

NAMES = {
    KL: "divergence of the next token, nats",
    DISAGREEMENT: "same likeliest token",
    PERPLEXITY: "perplexity",
    MEAN_POOL: "cosine, mean pool",
    FIRST_TOKEN: "cosine, first token",
    HIDDEN: "error of hidden states",
}


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """All layers swapped; then each layer alone, where it was measured."""
    return [table for one in swaps(records) for table in (_whole(one), *_alone(one))]


def heading(one: Swap) -> str:
    """`encoder on 6 texts (1a2b3c4d); 512 tokens, 12 heads of 32, float32, 2 CPU threads`."""
    return f"{one.case.inputs}; {one.case.tokens} tokens, {setting(one.case)}"


def show_quantity(quantity: str, value: float) -> str:
    """A distance as the cosine, a disagreement as the share of agreement, other quantities unchanged."""
    if quantity == PERPLEXITY:
        return three_digits(value)
    if quantity == DISAGREEMENT:
        return f"{100 * (1 - value):.1f} %"
    return show_cosine(1 - value) if quantity in (MEAN_POOL, FIRST_TOKEN) else show_error(value)


def show_cosine(cosine: float) -> str:
    """Three decimals, and as many nines as it has."""
    if cosine > 0.9999999:
        return "1"
    digits = next(digits for digits in (3, 4, 5, 6, 7) if digits == 7 or cosine < 1 - 10.0 ** (1 - digits))
    return f"{cosine:.{digits}f}"


def speed(one: Swap, row: SwapRow) -> str:
    """Speed-up over the original model."""
    found = row.speed(one.own)
    return _NONE if found is None else "1" if row is one.own else show_ratio(found)


def _whole(one: Swap) -> Table:
    wholes = [row.whole for row in one.rows if row.whole is not None]
    measured = [name for name in QUANTITIES if any(getattr(whole, name) is not None for whole in wholes)]
    rows = tuple(
        (
            row.label,
            *(_cell(row, quantity) for quantity in measured),
            show_spread(*row.time_s[:3], unit=_MILLISECOND) if row.time_s else _NONE,
            speed(one, row),
            _NONE if row.peak_bytes is None else three_digits(row.peak_bytes / _MEBIBYTE),
        )
        for row in one.rows
    )
    names = (NAMES[quantity] for quantity in measured)
    notes = (
        "Against the same model with its own attention, all layers swapped, nothing trained afterwards. "
        f"Means over {max((whole.texts or 1 for whole in wholes), default=1)} texts; ±: standard deviation "
        "over draws of random features. Time and memory: one forward pass of the first text.",
        f"{MEAN_OF_VALUES}: every query gets the same output, without any attention.",
        *calibration_note(wholes),
        *failure_notes(one.records),
    )
    columns = ("backend", *names, "time, ms", "speed, own = 1", "peak memory, MiB")
    return Table(f"Attention swapped: {heading(one)}", columns, rows, notes)


def _cell(row: SwapRow, quantity: str) -> str:
    """The mean and its standard deviation from draw to draw, or why there is none."""
    found = row.spread(quantity)
    if found is None:
        return next((bad.status for bad in row.failed if bad.case.kind == "swap"), _NONE)
    shown = show_quantity(quantity, found.mean)
    if not found.over_seeds:
        return shown
    return f"{shown} ±{(100 if quantity == DISAGREEMENT else 1) * found.over_seeds:.2g}"


def _alone(one: Swap) -> list[Table]:
    """The decisive quantity with each layer swapped alone."""
    rows = []
    for row in one.rows:
        if alone := row.by_layer(one.quantity):
            cells = (
                show_quantity(one.quantity, alone[layer]) if layer in alone else _NONE for layer in one.layers
            )
            rows.append((row.label, *cells))
    if not rows:
        return []
    columns = ("backend", *(f"layer {layer}" for layer in one.layers))
    title = f"One layer swapped, {NAMES[one.quantity]}: {heading(one)}"
    return [Table(title, columns, tuple(rows), ("The other layers keep the model's own attention.",))]
