"""Records of models with replaced attention, as one row per backend."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import MODEL, OWN, YARDSTICK
from efficient_attn.stats.estimates import grouped

KL, DISAGREEMENT, PERPLEXITY = "next_token_kl", "next_token_disagreement", "perplexity"
LOSS, RECALL = "loss_difference", "copy_recall"
MEAN_POOL, FIRST_TOKEN, EVERY_TOKEN = "mean_pool_distance", "first_token_distance", "token_distance"
HIDDEN = "hidden_relative_error"
OUTPUT, OUTPUT_COSINE = "output_relative_error", "output_distance"
NAMES = {
    KL: "divergence, nats",
    DISAGREEMENT: "same top token, %",
    PERPLEXITY: "perplexity",
    LOSS: "loss change, nats",
    RECALL: "copy recall, %",
    MEAN_POOL: "cosine, mean pool",
    FIRST_TOKEN: "cosine, first token",
    EVERY_TOKEN: "cosine, all tokens",
    HIDDEN: "error, hidden states",
    OUTPUT_COSINE: "cosine, output",
    OUTPUT: "error, output",
}
# Quantities that decide, in order of preference.
_DECISIVE = (KL, MEAN_POOL, HIDDEN, OUTPUT)

# Rounding of float32 hidden states and outputs; errors of cosines and divergences are of the order of its
# square.
_ROUNDING = 1e-4

# Upper bound on plausible measurements.
_LARGEST = 1e100

# Fields common to the cases of one swap.
_SHARED = ("inputs", "tokens", "num_heads", "head_dim", "causal", "dtype", "device", "threads", "seed")


class Spread(NamedTuple):
    """Mean over texts and draws, and the standard deviation over draws; None for one draw."""

    mean: float
    over_seeds: float | None


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

    def spread(self, quantity: str) -> Spread | None:
        """Statistics of the quantity with all layers swapped."""
        return None if self.whole is None else spread(self.whole, quantity)

    def by_layer(self, quantity: str) -> dict[int, float]:
        """Means of the quantity with one layer swapped, by its number."""
        spreads = {layer: spread(record, quantity) for layer, record in sorted(self.alone.items())}
        return {layer: value.mean for layer, value in spreads.items() if value is not None}


@dataclass(frozen=True, eq=False)
class Swap:
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

    @cached_property
    def rounding(self) -> float:
        """Largest difference that is rounding: twice the difference of exact attention in another kernel."""
        least = _ROUNDING if self.quantity in (HIDDEN, OUTPUT) else _ROUNDING**2
        spreads = [row.spread(self.quantity) for row in self.rows if row.backend == YARDSTICK]
        return max([least, *(2 * value.mean for value in spreads if value is not None)])

    @cached_property
    def changed(self) -> list[tuple[float, SwapRow]]:
        """Rows that differ from the original model by more than rounding, the nearest first."""
        pairs = [(value.mean, row) for row in self.rows if (value := row.spread(self.quantity)) is not None]
        return sorted((pair for pair in pairs if pair[0] > self.rounding), key=lambda pair: pair[0])

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that were swapped alone."""
        return tuple(sorted({layer for row in self.rows for layer in row.alone}))


def swaps(records: Iterable[Record]) -> tuple[Swap, ...]:
    """One per model, set of texts and setting."""
    return tuple(map(_swap, grouped((record for record in records if record.case.of == MODEL), *_SHARED)))


def spread(record: Record, quantity: str) -> Spread | None:
    """Statistics of a quantity; None if not measured or if a draw has no number."""
    draws, texts = getattr(record, f"{quantity}_draws") or (), record.texts or 1
    usable = record.status == "ok" and all(value is not None and value < _LARGEST for value in draws)
    if not usable or not draws or len(draws) % texts:
        return None
    by_seed = np.reshape(draws, (texts, -1)).mean(axis=0).tolist()
    return Spread(fmean(by_seed), stdev(by_seed) if len(by_seed) > 1 else None)


def _swap(records: Sequence[Record]) -> Swap:
    rows = sorted(map(_row, grouped(records, "label")), key=lambda row: row.backend != OWN)
    measured = [
        name for name in _DECISIVE if any(row.whole and getattr(row.whole, name) is not None for row in rows)
    ]
    return Swap(records[0].case, tuple(rows), measured[0] if measured else HIDDEN, tuple(records))


def _row(records: Sequence[Record]) -> SwapRow:
    """The records of one label."""
    case, ok = records[0].case, [record for record in records if record.status == "ok"]
    swapped = {record.case.layer: record for record in records if record.case.kind == "swap"}
    return SwapRow(
        label=case.label,
        backend=case.backend,
        whole=swapped.pop(None, None),
        alone={layer: record for layer, record in swapped.items() if layer is not None},
        timed=next(
            (record for record in ok if record.case.kind == "time" and any(record.times_s or ())), None
        ),
        peak_bytes=next((record.peak_bytes for record in ok if record.case.kind == "memory"), None),
        failed=tuple(record for record in records if record.status != "ok"),
    )
