"""Adaptations of backends: one table of fidelity before and after, and its cost."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from efficient_attn.report.notes import failure_notes, heading
from efficient_attn.report.table import Table, three_digits
from efficient_attn.runner.records import Record
from efficient_attn.runner.units import show_seconds
from efficient_attn.stats.curves import grouped
from efficient_attn.studies.adapt.labels import ADAPTED, LORA
from efficient_attn.studies.swap.analysis import HIDDEN, KL, MEAN_POOL, NAMES, OUTPUT, OUTPUT_COSINE
from efficient_attn.studies.swap.view import show_quantity
from efficient_attn.studies.view import NOT_MEASURED, Environment, Plots

# Name of the row of the model with additions to its projections.
_WITH_LORA = "all, with LoRA"

_SHARED = ("inputs", "tokens", "num_heads", "head_dim", "causal", "dtype", "device", "threads", "seed")


class Place(NamedTuple):
    """A layer or the whole model before and after the adaptation; None: not measured."""

    before: Record | None
    after: Record | None

    def shown(self, quantity: str) -> str:
        """`before → after`, or the value before if there is no adaptation."""
        values = [None if one is None else getattr(one, quantity) for one in self]
        cells = [NOT_MEASURED if one is None else show_quantity(quantity, one) for one in values]
        return cells[0] if self.after is None else " → ".join(cells)


class Variant(NamedTuple):
    """Records of one variant.

    Attributes:
        places: Each layer by its number; None: the whole model.
        training: Record of the adaptation; None: not adapted.
        added: The whole model without and with LoRA.
        adding: Record of the training of LoRA; None: no LoRA.
    """

    label: str
    places: Mapping[int | None, Place]
    training: Record | None
    added: Place
    adding: Record | None


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """None: the table says all."""
    return {}


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """One table per model: whole model and layers of each variant, and the cost of the adaptation."""
    return [_table(group) for group in grouped(records, *_SHARED)]


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The change of each adapted variant, and the variant nearest to the model."""
    return [text for group in grouped(records, *_SHARED) for text in _sentences(group)]


def _variants(records: Sequence[Record]) -> list[Variant]:
    return [_variant(label, records) for label in dict.fromkeys(map(_label, records))]


def _label(record: Record) -> str:
    """Label of the variant before any training."""
    return record.case.label.removesuffix(ADAPTED).removesuffix(LORA)


def _variant(label: str, records: Sequence[Record]) -> Variant:
    ok = [one for one in records if one.status == "ok"]
    sides: list[dict[int | None, Record]] = []
    trainings: list[Record | None] = []
    for name in (label, f"{label}{ADAPTED}", f"{label}{LORA}"):
        own = [one for one in ok if one.case.label == name]
        sides.append({one.case.layer: one for one in own if one.adapt_s is None})
        trainings.append(next((one for one in own if one.adapt_s is not None), None))
    before, after, added = sides
    layers = sorted({*before, *after}, key=lambda layer: -1 if layer is None else layer)
    places = {layer: Place(before.get(layer), after.get(layer)) for layer in layers}
    _, training, adding = trainings
    whole = Place(after.get(None, before.get(None)), added.get(None))
    return Variant(label, places, training, whole, adding)


def _table(records: Sequence[Record]) -> Table:
    causal = records[0].case.causal
    columns = (
        "backend",
        "layer",
        "error",
        "cosine",
        "learning rate",
        "multiply-adds, millions",
        "parameters",
        "seconds",
    )
    rows: list[tuple[str, ...]] = []
    for variant in _variants(records):
        places = [("all" if layer is None else str(layer), place) for layer, place in variant.places.items()]
        if variant.adding is not None:
            places.insert(1, (_WITH_LORA, variant.added))
        for name, place in places:
            whole = name in ("all", _WITH_LORA)
            cosine = place.shown((KL if causal else MEAN_POOL) if whole else OUTPUT_COSINE)
            training = variant.adding if name == _WITH_LORA else variant.training
            rows.append(
                (
                    variant.label if name == "all" else "",
                    name,
                    place.shown(HIDDEN if whole else OUTPUT),
                    f"{cosine} nats" if whole and causal else cosine,
                    _rate(training) if name == _WITH_LORA else _rate(place.after),
                    *(_cost(place, training) if whole else ("", "", "")),
                )
            )
    notes = (
        "Held-out windows, before → after the adaptation. Rows of layers: each layer alone on exact queries, "
        "keys and values. Rows of all layers: last hidden states and "
        f"{'divergence of the next token' if causal else 'mean-pooled embeddings'} of the model with all "
        "layers replaced. Multiply-adds: one layer, mean over layers.",
        *_lora_note(records),
        *_calibration_note(records),
        *failure_notes(records),
    )
    return Table(f"Adaptation: {heading(records[0].case)}", columns, tuple(rows), notes)


def _lora_note(records: Sequence[Record]) -> tuple[str, ...]:
    if not any(one.case.label.endswith(LORA) for one in records):
        return ()
    return (
        f"Rows {_WITH_LORA}: the adapted model, before → after the training of low-rank additions to "
        "its projections, which change no multiply-adds once they are merged.",
    )


def _rate(training: Record | None) -> str:
    """Learning rate of an adapted layer, or of LoRA."""
    rate = None if training is None else training.adapt_learning_rate
    return "" if rate is None else f"{rate:g}"


def _calibration_note(records: Sequence[Record]) -> tuple[str, ...]:
    """Backends without a value before, if any."""
    found = {_label(one): one.calibrated_on for one in records if one.calibrated_on}
    if not found:
        return ()
    return (f"No output before the calibration on {next(iter(found.values()))}: {', '.join(found)}.",)


def _cost(place: Place, training: Record | None) -> tuple[str, str, str]:
    """Multiply-adds of a layer, adapted parameters and seconds of the adaptation."""
    flops = next((one.flops for one in place if one is not None and one.flops), None)
    products = NOT_MEASURED if flops is None else three_digits(flops / 2e6)
    if training is None:
        return products, "0", NOT_MEASURED
    return products, f"{training.adapted_parameters or 0}", three_digits(training.adapt_s)


def _sentences(records: Sequence[Record]) -> list[str]:
    quantity = KL if records[0].case.causal else MEAN_POOL
    variants, found = _variants(records), []
    for one in variants:
        if one.training is not None and None in one.places:
            what = "trained" if one.training.adapt_steps else "calibrated"
            found.append(
                f"{one.label}, {what} in {show_seconds(one.training.adapt_s)}: {NAMES[quantity]} "
                f"{one.places[None].shown(quantity)} on held-out windows."
            )
        if one.adding is not None:
            found.append(
                f"{one.label} with LoRA, trained in {show_seconds(one.adding.adapt_s)}: {NAMES[quantity]} "
                f"{one.added.shown(quantity)} on held-out windows."
            )
    losses = [
        (getattr(record, quantity), record.case.label)
        for one in variants
        for record in (*one.places.get(None, ()), one.added.after)
        if record is not None and getattr(record, quantity) is not None
    ]
    if losses:
        loss, label = min(losses)
        found.append(f"Nearest to the model: {label}, {NAMES[quantity]} {show_quantity(quantity, loss)}.")
    return found
