"""Models with their attention swapped: tables and a sentence."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from efficient_attn.measure.record import Case
from efficient_attn.measure.variants import MODEL, OWN, UNIFORM_ATTENTION, YARDSTICK
from efficient_attn.report import text
from efficient_attn.report.table import NOT_MEASURED, ORIGINAL, Table
from efficient_attn.runs.study import Run, Settled
from efficient_attn.stats.estimates import call_time, grouped, time_ratio
from efficient_attn.studies.swap import names
from efficient_attn.studies.swap.record import SwapRecord

# Quantities that decide, in order of preference.
_DECISIVE = (names.KL, names.MEAN_POOL, names.HIDDEN, names.OUTPUT)

# Columns of a decoder, whose next tokens say more than its hidden states.
_OF_DECODERS = (names.KL, names.PERPLEXITY, names.LOSS, names.RECALL)

# Rounding of float32 hidden states and outputs; cosines and divergences have about its square.
_ROUNDING = 1e-4

# Fields common to the cases of one swap, in which a model may run in two dtypes.
_SHARED = ("inputs", "tokens", "num_heads", "head_dim", "causal", "device", "threads", "seed")


class SwapRow(NamedTuple):
    """One backend: all layers swapped, the deciding quantity with each layer swapped alone, and costs."""

    label: str
    backend: str
    dtype: str
    whole: SwapRecord | None
    alone: Mapping[int, float]
    timed: SwapRecord | None
    peak_bytes: int | None
    failed: tuple[SwapRecord, ...]


class SwappedModel(NamedTuple):
    """All measurements of one model on the same texts, the original first, and the deciding quantity."""

    case: Case
    rows: tuple[SwapRow, ...]
    quantity: str
    records: tuple[SwapRecord, ...]

    @property
    def reference(self) -> SwapRecord | None:
        """The times of the original model."""
        return next((row.timed for row in self.rows if row.label == ORIGINAL), None)


def swaps(records: Iterable[SwapRecord]) -> tuple[SwappedModel, ...]:
    """One per model, set of texts and setting."""
    return tuple(map(_swap, grouped((record for record in records if record.case.of == MODEL), *_SHARED)))


def _swap(records: Sequence[SwapRecord]) -> SwappedModel:
    wholes = [record for record in records if record.case.layer is None]
    measured = (name for name in _DECISIVE if any(getattr(whole, name) is not None for whole in wholes))
    quantity = next(measured, names.HIDDEN)
    rows = [_row(group, quantity) for group in grouped(records, "label")]
    rows.sort(key=lambda row: row.label != ORIGINAL)
    return SwappedModel(records[0].case, tuple(rows), quantity, tuple(records))


def _row(records: Sequence[SwapRecord], quantity: str) -> SwapRow:
    case, ok = records[0].case, [record for record in records if record.status == "ok"]
    swapped = {record.case.layer: record for record in records if record.case.kind == "swap"}
    alone = {layer: getattr(record, quantity) for layer, record in swapped.items() if layer is not None}
    times = [record for record in ok if record.case.kind == "time" and any(record.times_s or ())]
    return SwapRow(
        label=ORIGINAL if case.label == OWN else case.label,
        backend=case.backend,
        dtype=case.dtype,
        whole=swapped.get(None),
        alone={layer: value for layer, value in sorted(alone.items()) if value is not None},
        timed=times[0] if times else None,
        peak_bytes=next((record.peak_bytes for record in ok if record.case.kind == "memory"), None),
        failed=tuple(record for record in records if record.status != "ok"),
    )


def tables(records: Sequence[SwapRecord], run: Run[Settled]) -> list[Table]:
    """Tables of all layers swapped, and of each layer alone."""
    return [table for swap in swaps(records) for table in (_whole(swap), *_alone(swap))]


def sentences(records: Sequence[SwapRecord], run: Run[Settled]) -> list[str]:
    """Backend with the smallest change of each model."""
    return [sentence for swap in swaps(records) if (sentence := _nearest(swap, run.settled))]


def show_quantity(quantity: str, value: float) -> str:
    """A distance as the cosine, others unchanged."""
    if quantity == names.PERPLEXITY:
        return text.three_digits(value)
    if quantity == names.LOSS:
        return f"{value:+.4f}"
    if quantity in (names.MEAN_POOL, names.OUTPUT_COSINE):
        return f"{1 - value:.{4 if value > 1e-4 else 7}f}"
    return text.show_error(value)


def quantity_words(quantity: str, value: float) -> str:
    """`KL divergence 0.71 nats`, `mean pool cosine 0.95`."""
    shown, (name, _, subject) = show_quantity(quantity, value), names.NAMES[quantity].partition(", ")
    return f"KL divergence {shown} nats" if quantity == names.KL else f"{subject} {name} {shown}"


def _whole(swap: SwappedModel) -> Table:
    wholes = [row.whole for row in swap.rows if row.whole is not None]
    shown = _OF_DECODERS if swap.quantity == names.KL else tuple(names.NAMES)
    measured = [name for name in shown if any(getattr(whole, name) is not None for whole in wholes)]
    rows = []
    for row in swap.rows:
        reference = None if row.label == YARDSTICK else swap.reference
        costs = _cost_cells(row, reference)
        lowered = row.dtype != swap.case.dtype and row.dtype not in row.label
        label = f"{row.label} in {row.dtype}" if lowered else row.label
        rows.append((label, *(_cell(row, quantity) for quantity in measured), *costs))
    notes = (
        f"All layers are replaced without training and compared with the {ORIGINAL} model. Values are means "
        "over texts and draws with 95 % intervals; time and memory are for one forward pass on one text.",
        f"{UNIFORM_ATTENTION}: mean of the values. Dimmed or italic: worse than {UNIFORM_ATTENTION}. "
        "Starred or bold: best.",
        *text.mark_notes(rows),
        *text.calibration_note(wholes),
        *text.failure_notes(swap.records),
    )
    time, speed, memory = "time, ms", f"speed, {ORIGINAL} 1×", "memory, MiB"
    columns = ("backend", *(names.NAMES[quantity] for quantity in measured), time, speed, memory)
    lower = (names.KL, names.PERPLEXITY, names.HIDDEN, names.OUTPUT)
    return Table(f"Attention replaced: {text.heading(swap.case)}", columns, tuple(rows), notes).compared(
        errors=[names.NAMES[name] for name in measured if name in lower],
        scores=[names.NAMES[name] for name in measured if name not in (*lower, names.LOSS)],
        costs=(time, memory),
        speeds=(speed,),
    )


def _cost_cells(row: SwapRow, reference: SwapRecord | None) -> tuple[str, str, str]:
    """Cells of time in ms, speed-up over the reference and peak memory in MiB, `–` if not measured."""
    time = speed = peak = NOT_MEASURED
    if row.timed is not None:
        time = text.show_spread(*call_time(row.timed)[:3], unit=1e-3)
    if row.timed is not None and reference is not None:
        speed = "1×" if row.timed is reference else text.show_ratio(time_ratio(row.timed, reference))
    if row.peak_bytes is not None:
        peak = text.three_digits(row.peak_bytes / 2**20)
    return time, speed, peak


def _cell(row: SwapRow, quantity: str) -> str:
    """The mean and its interval, or why there is none."""
    whole, value = row.whole, getattr(row.whole, quantity, None)
    if value is None or whole is None:
        return next((bad.status for bad in row.failed if bad.case.kind == "swap"), NOT_MEASURED)
    if quantity == names.LOSS and whole.loss_difference_error is not None:
        return f"{value:+.4f}\t±{names.WIDTH * whole.loss_difference_error:.4f}"
    if quantity == names.RECALL:
        if not whole.copy_recall_exact:
            return NOT_MEASURED
        share, width = (100 * x / whole.copy_recall_exact for x in (value, whole.copy_recall_error or 0.0))
        return f"{share:.1f}\t±{names.WIDTH * width:.1f}"
    return show_quantity(quantity, value)


def _alone(swap: SwappedModel) -> list[Table]:
    layers = sorted({layer for row in swap.rows for layer in row.alone})
    rows = []
    for row in swap.rows:
        shown = {layer: show_quantity(swap.quantity, value) for layer, value in row.alone.items()}
        if shown:
            rows.append((row.label, *(shown.get(layer, NOT_MEASURED) for layer in layers)))
    columns = ("backend", *(f"layer, {layer}" for layer in layers))
    title = f"One layer replaced, {names.NAMES[swap.quantity]}: {text.heading(swap.case)}"
    return [Table(title, columns, tuple(rows), ("All other layers use exact attention.",))] if rows else []


def _nearest(swap: SwappedModel, settled: Settled) -> str:
    """The backend that changes the model least, with its speed, and candidates that were not measured."""
    measured = {row.label for row in swap.rows if row.whole is not None or row.failed}
    missing = [label for label in settled.candidates if label not in measured]
    counts = f"{len(missing)} of {len(settled.candidates)} candidates"
    left = f" {counts} were not measured: {', '.join(missing)}." if missing else ""
    rounding = _ROUNDING if swap.quantity in (names.HIDDEN, names.OUTPUT) else _ROUNDING**2
    rows = [row for row in swap.rows if row.backend not in (OWN, YARDSTICK, UNIFORM_ATTENTION)]
    values = [(value, row) for row in rows if (value := getattr(row.whole, swap.quantity, None)) is not None]
    changed = [(value, row) for value, row in values if value > rounding]
    if not changed:
        return left.strip()
    value, nearest = min(changed, key=lambda pair: pair[0])
    speed = ""
    if nearest.timed is not None and swap.reference is not None:
        speed = f", {text.compared(time_ratio(nearest.timed, swap.reference))}"
    return (
        f"{nearest.label} changes {swap.case.inputs} least at {swap.case.tokens} tokens"
        f"{' among the candidates measured so far' if left else ''}: "
        f"{quantity_words(swap.quantity, value)}{speed}.{left}"
    )
