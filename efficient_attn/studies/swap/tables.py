"""Models with their attention swapped, as tables."""

from collections.abc import Sequence

from efficient_attn.report.error_table import show_error
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
    TURNED,
    Spread,
    Swap,
    SwapRow,
    spread,
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


def tables(records: Sequence[Record], environment: Environment | None = None) -> list[Table]:
    """End to end; then each layer alone, and the states after each layer, as far as they were measured."""
    return [table for one in swaps(records) for table in (_whole(one), *_alone(one), *_depth(one))]


def heading(one: Swap) -> str:
    """`encoder on 6 texts (1a2b3c4d); 512 tokens, float32, 2 CPU threads`."""
    case = one.case
    threads = "1 CPU thread" if case.threads == 1 else f"{case.threads} CPU threads"
    where = threads if case.device == "cpu" else case.device
    return f"{case.inputs}; {case.tokens} tokens, {case.dtype}, {where}"


def show_quantity(quantity: str, value: float) -> str:
    """A distance as the cosine, a disagreement as the share of agreement, other quantities unchanged."""
    if quantity == PERPLEXITY:
        return three_digits(value)
    if quantity == DISAGREEMENT:
        return f"{100 * (1 - value):.1f} %"
    return show_cosine(1 - value) if quantity in TURNED else show_error(value)


def show_cosine(cosine: float) -> str:
    """Three decimals, and as many nines as it has."""
    if cosine > 0.9999999:
        return "1"
    digits = next(digits for digits in (3, 4, 5, 6, 7) if digits == 7 or cosine < 1 - 10.0 ** (1 - digits))
    return f"{cosine:.{digits}f}"


def _whole(one: Swap) -> Table:
    quantities = _quantities(one)
    columns = (
        "backend",
        *(name for quantity in quantities for name in _columns(one, quantity)),
        "time, ms",
        "speed, own = 1",
        "peak memory, MiB",
    )
    rows = tuple(
        (
            row.label,
            *(cell for quantity in quantities for cell in _cells(one, row, quantity)),
            show_spread(*row.time_s[:3], unit=_MILLISECOND) if row.time_s else _NONE,
            speed(one, row),
            _NONE if row.peak_bytes is None else three_digits(row.peak_bytes / _MEBIBYTE),
        )
        for row in one.rows
    )
    return Table(f"Attention swapped: {heading(one)}", columns, rows, tuple(_notes(one)))


def _quantities(one: Swap) -> list[str]:
    """Measured quantities, the decisive one first."""
    return [
        name
        for name in (KL, DISAGREEMENT, PERPLEXITY, MEAN_POOL, FIRST_TOKEN, HIDDEN)
        if any(row.whole is not None and getattr(row.whole, name) is not None for row in one.rows)
    ]


def _columns(one: Swap, quantity: str) -> tuple[str, ...]:
    name = NAMES[quantity]
    return (name, "at the worst text") if quantity == one.quantity and _texts(one) > 1 else (name,)


def _cells(one: Swap, row: SwapRow, quantity: str) -> tuple[str, ...]:
    found = row.spread(quantity)
    count = len(_columns(one, quantity))
    if found is None:
        failed = next((bad.status for bad in row.failed if bad.case.kind == "swap"), _NONE)
        return (failed if quantity == one.quantity else _NONE, _NONE)[:count]
    return (_shown(quantity, found), show_quantity(quantity, found.worst))[:count]


def _shown(quantity: str, found: Spread) -> str:
    """The mean, and how far it moves from draw to draw where something was drawn."""
    shown = show_quantity(quantity, found.mean)
    if not found.over_seeds:
        return shown
    moved = 100 * found.over_seeds if quantity == DISAGREEMENT else found.over_seeds
    return f"{shown} ±{moved:.2g}"


def _texts(one: Swap) -> int:
    return max((row.whole.texts or 1 for row in one.rows if row.whole is not None), default=1)


def speed(one: Swap, row: SwapRow) -> str:
    """How many times as fast as the model as it came."""
    found = row.speed(one.own)
    return _NONE if found is None else "1" if row is one.own else show_ratio(found)


def _notes(one: Swap) -> list[str]:
    notes = ["Against the same model with its own attention, all layers swapped, nothing trained afterwards."]
    if _texts(one) > 1:
        notes[0] += f" Means of {_texts(one)} texts."
    if any(row.backend == MEAN_OF_VALUES for row in one.rows):
        notes.append(f"{MEAN_OF_VALUES}: every query gets the same output, without any attention.")
    drawn = [
        row
        for row in one.rows
        if (found := row.spread(one.quantity)) is not None and found.over_seeds is not None
    ]
    if drawn:
        notes.append("±: standard deviation over draws of random features.")
    calibrated = [row.label for row in one.rows if row.whole is not None and row.whole.calibrated_on]
    if calibrated:
        on = next(
            row.whole.calibrated_on for row in one.rows if row.whole is not None and row.whole.calibrated_on
        )
        notes.append(f"Calibrated on {on}, outside the time: {', '.join(calibrated)}.")
    if any(row.time_s for row in one.rows):
        notes.append("Time and memory: one forward pass of the first text.")
    told = (f"{row.label}: {bad.status}: {bad.reason}" for row in one.rows for bad in row.failed)
    return [*notes, *dict.fromkeys(told)]


def _alone(one: Swap) -> list[Table]:
    """The decisive quantity with each layer swapped alone, and with all of them."""
    if not one.layers:
        return []
    rows = []
    for row in one.rows:
        if row.whole is None or not row.alone:
            continue
        parts = [
            spread(row.alone[layer], one.quantity) if layer in row.alone else None for layer in one.layers
        ]
        cells = (
            _NONE if part is None else show_quantity(one.quantity, part.mean)
            for part in (*parts, row.spread(one.quantity))
        )
        rows.append((row.label, *cells))
    columns = ("backend", *(f"layer {layer}" for layer in one.layers), "all")
    title = f"One layer swapped, {NAMES[one.quantity]}: {heading(one)}"
    return [Table(title, columns, tuple(rows), ("The other layers keep the model's own attention.",))]


def _depth(one: Swap) -> list[Table]:
    """How the error of the hidden states grows through the layers with all of them swapped."""
    rows = [
        (
            row.label,
            *(
                _NONE if value is None else show_error(value)
                for value in row.whole.hidden_relative_error_layers
            ),
        )
        for row in one.rows
        if row.whole is not None and row.whole.hidden_relative_error_layers
    ]
    if not rows:
        return []
    columns = ("backend", *(f"after {layer}" for layer in range(max(map(len, rows)) - 1)))
    note = "‖h − exact‖ / ‖exact‖ of the hidden states after each layer, all layers swapped."
    return [Table(f"Error through the layers: {heading(one)}", columns, tuple(rows), (note,))]
