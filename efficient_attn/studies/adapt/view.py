"""Adaptations of backends: one table of fidelity before and after, and its cost."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from efficient_attn.report.notes import failure_notes, heading
from efficient_attn.report.table import Table, three_digits
from efficient_attn.runner.records import Record
from efficient_attn.runner.units import show_seconds
from efficient_attn.stats.curves import grouped
from efficient_attn.studies.adapt.plan import ADAPTED
from efficient_attn.studies.swap.analysis import HIDDEN, KL, MEAN_POOL, NAMES, OUTPUT, OUTPUT_COSINE
from efficient_attn.studies.swap.view import show_quantity
from efficient_attn.studies.view import NOT_MEASURED, Environment, Plots

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

    @property
    def rate(self) -> str:
        """Learning rate of an adapted layer."""
        rate = None if self.after is None else self.after.adapt_learning_rate
        return "" if rate is None else f"{rate:g}"


class Variant(NamedTuple):
    """Records of one variant.

    Attributes:
        places: Each layer by its number; None: the whole model.
        training: Record of the adaptation; None: not adapted.
    """

    label: str
    places: Mapping[int | None, Place]
    training: Record | None


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
    labels = dict.fromkeys(one.case.label.removesuffix(ADAPTED) for one in records)
    return [_variant(label, records) for label in labels]


def _variant(label: str, records: Sequence[Record]) -> Variant:
    ok = [one for one in records if one.status == "ok"]
    sides: list[dict[int | None, Record]] = []
    for name in (label, f"{label}{ADAPTED}"):
        own = [one for one in ok if one.case.label == name]
        sides.append({one.case.layer: one for one in own if one.adapt_s is None})
    before, after = sides
    layers = sorted({*before, *after}, key=lambda layer: -1 if layer is None else layer)
    training = next((one for one in ok if one.case.label == name and one.adapt_s is not None), None)
    places = {layer: Place(before.get(layer), after.get(layer)) for layer in layers}
    return Variant(label, places, training)


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
        for layer, place in variant.places.items():
            first = layer is None
            measured = place.shown(HIDDEN if first else OUTPUT)
            cosine = place.shown((KL if causal else MEAN_POOL) if first else OUTPUT_COSINE)
            cost = _cost(variant, place) if first else ("", "", "")
            shown = f"{cosine} nats" if first and causal else cosine
            rows.append(
                (
                    variant.label if first else "",
                    "all" if first else str(layer),
                    measured,
                    shown,
                    place.rate,
                    *cost,
                )
            )
    notes = (
        "Held-out windows, before → after the adaptation. Rows of layers: each layer alone on exact queries, "
        "keys and values. Rows of all layers: last hidden states and "
        f"{'divergence of the next token' if causal else 'mean-pooled embeddings'} of the model with all "
        "layers replaced. Multiply-adds: one layer, mean over layers.",
        *_calibration_note(records),
        *failure_notes(records),
    )
    return Table(f"Adaptation: {heading(records[0].case)}", columns, tuple(rows), notes)


def _calibration_note(records: Sequence[Record]) -> tuple[str, ...]:
    """Backends without a value before, if any."""
    found = {one.case.label.removesuffix(ADAPTED): one.calibrated_on for one in records if one.calibrated_on}
    if not found:
        return ()
    return (f"No output before the calibration on {next(iter(found.values()))}: {', '.join(found)}.",)


def _cost(variant: Variant, place: Place) -> tuple[str, str, str]:
    """Multiply-adds of a layer, adapted parameters and seconds of the adaptation."""
    flops = next((one.flops for one in place if one is not None and one.flops), None)
    products = NOT_MEASURED if flops is None else three_digits(flops / 2e6)
    if variant.training is None:
        return products, "0", NOT_MEASURED
    return (
        products,
        f"{variant.training.adapted_parameters or 0}",
        three_digits(variant.training.adapt_s),
    )


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
    losses = [
        (getattr(record, quantity), record.case.label)
        for one in variants
        for record in one.places.get(None, ())
        if record is not None and getattr(record, quantity) is not None
    ]
    if losses:
        loss, label = min(losses)
        found.append(f"Nearest to the model: {label}, {NAMES[quantity]} {show_quantity(quantity, loss)}.")
    return found
