"""Models with their attention swapped: tables, a sentence and the figure."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import stdev
from typing import NamedTuple

import numpy as np

from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import MODEL, OWN, UNIFORM_ATTENTION, YARDSTICK
from efficient_attn.report.figures import UNIFORM_STYLE, Axis, Chart, Plot, Series, line_styles
from efficient_attn.report.table import NOT_MEASURED, ORIGINAL, Table
from efficient_attn.report.text import (
    calibration_note,
    compared,
    failure_notes,
    heading,
    mark_notes,
    show_error,
    three_digits,
)
from efficient_attn.stats.candidates import missing, operations_share
from efficient_attn.stats.estimates import grouped, time_ratio
from efficient_attn.studies.swap.plan import (
    DISAGREEMENT,
    FIRST_TOKEN,
    HIDDEN,
    KL,
    LOSS,
    MEAN_POOL,
    NAMES,
    OUTPUT,
    OUTPUT_COSINE,
    PERPLEXITY,
    RECALL,
)
from efficient_attn.studies.view import Environment, Plots, cost_cells

# More lines are in the tables.
_MOST_LINES = 40

_DISTANCES = {**NAMES, MEAN_POOL: "1 − cosine, mean pool"}

# Quantities that decide, in order of preference.
_DECISIVE = (KL, MEAN_POOL, HIDDEN, OUTPUT)

# Columns of a decoder, whose next tokens say more than its hidden states.
_OF_DECODERS = (KL, DISAGREEMENT, PERPLEXITY, LOSS, RECALL)

# Standard errors from the mean to the ends of an interval of 95 %.
_WIDTH = 1.96

# Rounding of float32 hidden states and outputs; errors of cosines and divergences are of the order of its
# square.
_ROUNDING = 1e-4

# Upper bound on plausible measurements.
_LARGEST = 1e100

# Fields common to the cases of one swap.
_SHARED = ("inputs", "tokens", "num_heads", "head_dim", "causal", "dtype", "device", "threads", "seed")


class SwapRow(NamedTuple):
    """One backend.

    Attributes:
        whole: Record with all layers swapped; None if it failed or was only timed.
        alone: Records with one layer swapped, by its number.
        timed: The record of the times of one forward pass of the model.
    """

    label: str
    backend: str
    whole: Record | None
    alone: Mapping[int, Record]
    timed: Record | None
    peak_bytes: int | None
    failed: tuple[Record, ...]

    def by_layer(self, quantity: str) -> dict[int, float]:
        """Means of the quantity with one layer swapped, by its number."""
        means = {layer: _mean(record, quantity) for layer, record in sorted(self.alone.items())}
        return {layer: value for layer, value in means.items() if value is not None}


class Swap(NamedTuple):
    """All measurements of one model on the same texts.

    Attributes:
        rows: The original model first, then in the order of the records.
        quantity: The deciding quantity.
    """

    case: Case
    rows: tuple[SwapRow, ...]
    quantity: str
    records: tuple[Record, ...]

    @property
    def reference(self) -> Record | None:
        """The times of the original model."""
        return next((row.timed for row in self.rows if row.backend == OWN), None)

    @property
    def changed(self) -> list[tuple[float, SwapRow]]:
        """Replaced attention that changes the model by more than rounding, the nearest first."""
        rounding = _ROUNDING if self.quantity in (HIDDEN, OUTPUT) else _ROUNDING**2
        rows = [row for row in self.rows if row.backend not in (OWN, YARDSTICK)]
        means = [(_mean(row.whole, self.quantity), row) for row in rows]
        pairs = [(value, row) for value, row in means if value is not None and value > rounding]
        return sorted(pairs, key=lambda pair: pair[0])

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for row in self.rows for layer in row.alone}))


def swaps(records: Iterable[Record]) -> tuple[Swap, ...]:
    """One per model, set of texts and setting."""
    return tuple(map(_swap, grouped((record for record in records if record.case.of == MODEL), *_SHARED)))


def _swap(records: Sequence[Record]) -> Swap:
    rows = sorted(map(_row, grouped(records, "label")), key=lambda row: row.backend != OWN)
    measured = [
        name for name in _DECISIVE if any(row.whole and getattr(row.whole, name) is not None for row in rows)
    ]
    return Swap(records[0].case, tuple(rows), measured[0] if measured else HIDDEN, tuple(records))


def _row(records: Sequence[Record]) -> SwapRow:
    case, ok = records[0].case, [record for record in records if record.status == "ok"]
    swapped = {record.case.layer: record for record in records if record.case.kind == "swap"}
    times = [record for record in ok if record.case.kind == "time" and any(record.times_s or ())]
    return SwapRow(
        label=case.label,
        backend=case.backend,
        whole=swapped.pop(None, None),
        alone={layer: record for layer, record in swapped.items() if layer is not None},
        timed=times[0] if times else None,
        peak_bytes=next((record.peak_bytes for record in ok if record.case.kind == "memory"), None),
        failed=tuple(record for record in records if record.status != "ok"),
    )


def _mean(record: Record | None, quantity: str) -> float | None:
    """Mean over texts and draws; None if not measured or not finite."""
    value = None if record is None or record.status != "ok" else getattr(record, quantity)
    return value if value is not None and value < _LARGEST else None


def _scatter(record: Record, quantity: str) -> float | None:
    """Standard deviation from draw to draw; None for one draw."""
    draws, texts = getattr(record, f"{quantity}_draws") or (), record.texts or 1
    if len(draws) == texts or len(draws) % texts or None in draws:
        return None
    by_seed = np.reshape(draws, (texts, -1)).mean(axis=0).tolist()
    return stdev(by_seed) if len(by_seed) > 1 else None


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """All layers swapped; then each layer alone, where it was measured."""
    return [table for swap in swaps(records) for table in (_whole(swap), *_alone(swap))]


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The nearest backend to each model."""
    return [sentence for swap in swaps(records) if (sentence := _nearest(swap, environment))]


def show_quantity(quantity: str, value: float) -> str:
    """A distance as the cosine, a disagreement as the agreement in percent, others unchanged."""
    if quantity == PERPLEXITY:
        return three_digits(value)
    if quantity in (DISAGREEMENT, RECALL):
        return f"{100 * (value if quantity == RECALL else 1 - value):.1f}"
    if quantity == LOSS:
        return f"{value:+.4f}"
    if quantity in (MEAN_POOL, FIRST_TOKEN, OUTPUT_COSINE):
        return f"{1 - value:.{4 if value > 1e-4 else 7}f}"
    return show_error(value)


def quantity_words(quantity: str, value: float) -> str:
    """`divergence 0.71 nats`, `cosine, mean pool 0.95`."""
    name, _, unit = NAMES[quantity].partition(", ")
    shown = show_quantity(quantity, value)
    return f"{name} {shown} {unit}" if unit in ("nats", "%") else f"{NAMES[quantity]} {shown}"


def _name(row: SwapRow) -> str:
    return ORIGINAL if row.backend == OWN else row.label


def _whole(swap: Swap) -> Table:
    wholes = [row.whole for row in swap.rows if row.whole is not None]
    measured = [name for name in NAMES if any(getattr(whole, name) is not None for whole in wholes)]
    if swap.quantity == KL:
        measured = [name for name in measured if name in _OF_DECODERS]
    rows = tuple(
        (
            _name(row),
            *(_cell(row, quantity) for quantity in measured),
            _operations(row.whole),
            *cost_cells(row.timed, None if row.backend == YARDSTICK else swap.reference, row.peak_bytes),
        )
        for row in swap.rows
    )
    texts = max((whole.texts or 0 for whole in wholes), default=0)
    notes = (
        f"Attention replaced in all layers without training, against the {ORIGINAL} model. Mean over "
        f"{f'{texts} text' + 's' * (texts > 1) if texts else 'draws'}. Intervals: standard deviation over "
        "draws of random features; of loss and recall 95 %. Time and memory: one "
        f"{'forward pass of the first text' if texts else 'run'}.",
        f"{UNIFORM_ATTENTION}: mean of the values. Dimmed or italic: worse than {UNIFORM_ATTENTION}.",
        *mark_notes(rows),
        *calibration_note(wholes),
        *failure_notes(swap.records),
    )
    names = [NAMES[quantity] for quantity in measured]
    columns = ("backend", *names, "operations, exact 1×", "time, ms", f"speed, {ORIGINAL} 1×", "memory, MiB")
    lower = (KL, PERPLEXITY, HIDDEN, OUTPUT)
    return Table(f"Attention replaced: {heading(swap.case)}", columns, rows, notes).compared(
        errors=[NAMES[name] for name in measured if name in lower],
        scores=[NAMES[name] for name in measured if name not in (*lower, LOSS)],
        costs=("time, ms", "memory, MiB"),
        speeds=columns[-2:-1],
    )


def _cell(row: SwapRow, quantity: str) -> str:
    """The mean and its interval, or why there is none."""
    value, whole = _mean(row.whole, quantity), row.whole
    if value is None or whole is None:
        return next((bad.status for bad in row.failed if bad.case.kind == "swap"), NOT_MEASURED)
    shown = show_quantity(quantity, value)
    if quantity == LOSS and whole.loss_difference_error is not None:
        return f"{shown}\t±{_WIDTH * whole.loss_difference_error:.4f}"
    if quantity == RECALL and whole.copy_recall_exact and whole.copy_recall_error:
        share, width = (100 * x / whole.copy_recall_exact for x in (value, whole.copy_recall_error))
        return f"{share:.1f}\t±{_WIDTH * width:.1f}"
    scatter = _scatter(whole, quantity)
    return f"{shown}\t±{(100 if quantity == DISAGREEMENT else 1) * scatter:.2g}" if scatter else shown


def _operations(record: Record | None) -> str:
    share = None if record is None else operations_share(record)
    return NOT_MEASURED if share is None else f"{three_digits(share)}×"


def _alone(swap: Swap) -> list[Table]:
    """The decisive quantity with each layer swapped alone."""
    rows = []
    for row in swap.rows:
        if alone := row.by_layer(swap.quantity):
            shown = {layer: show_quantity(swap.quantity, value) for layer, value in alone.items()}
            rows.append((_name(row), *(shown.get(layer, NOT_MEASURED) for layer in swap.layers)))
    if not rows:
        return []
    columns = ("backend", *(f"layer, {layer}" for layer in swap.layers))
    title = f"One layer replaced, {NAMES[swap.quantity]}: {heading(swap.case)}"
    return [Table(title, columns, tuple(rows), ("All other layers are exact.",))]


def _nearest(swap: Swap, environment: Environment) -> str:
    left = missing(environment, {row.label for row in swap.rows if row.whole is not None or row.failed})
    value, row = next((pair for pair in swap.changed if pair[1].backend != UNIFORM_ATTENTION), (0.0, None))
    if row is None:
        return left.strip()
    speed = ""
    if row.timed is not None and swap.reference is not None:
        speed = f", {compared(time_ratio(row.timed, swap.reference))}"
    return (
        f"{swap.case.inputs} at {swap.case.tokens} tokens is changed least by {row.label}"
        f"{' among the candidates measured so far' if left else ''}: "
        f"{quantity_words(swap.quantity, value)}{speed}.{left}"
    )


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """One chart for each model with layers replaced alone, one below the other."""
    models = [swap for swap in swaps(records) if swap.layers]
    if not models:
        return {}
    several = len(models) > 1
    plot = Plot(
        "Output change after replacing the attention of one layer",
        f"{'' if several else heading(models[0].case)}\n"
        "no training; dashed: uniform attention; differences at rounding level are not drawn",
        tuple((_chart(swap, heading(swap.case) if several else ""),) for swap in models),
    )
    return {"swap": plot}


def _chart(swap: Swap, title: str) -> Chart:
    """One line for each backend over the layers."""
    rows = [row for _, row in swap.changed[:_MOST_LINES] if row.by_layer(swap.quantity)]
    styles = line_styles([(row.label, row.backend) for row in rows if row.backend != UNIFORM_ATTENTION])
    styles[UNIFORM_ATTENTION] = UNIFORM_STYLE
    lines = [(row.label, row.by_layer(swap.quantity)) for row in rows]
    series = [Series(label, list(line), list(line.values()), styles[label]) for label, line in lines]
    layers = Axis("replaced layer (all others exact)", show="{:.0f}".format, ticks=swap.layers)
    return Chart(layers, Axis(_DISTANCES[swap.quantity], "log"), tuple(series), title=title)
