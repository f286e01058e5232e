"""Records of models with replaced attention, as one row per backend."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any, NamedTuple

from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.sizes import OWN
from efficient_attn.stats.curves import YARDSTICK
from efficient_attn.stats.rounds import Typical, call_time, time_ratio
from efficient_attn.studies.swap.plan import MODEL

# Quantities that decide, in order of preference.
KL, DISAGREEMENT, PERPLEXITY = "next_token_kl", "next_token_disagreement", "perplexity"
MEAN_POOL, FIRST_TOKEN, HIDDEN = "mean_pool_distance", "first_token_distance", "hidden_relative_error"
DECISIVE = (KL, MEAN_POOL, HIDDEN)
# Quantities shown as 1 − value: cosines, and the share of equal tokens.
TURNED = (MEAN_POOL, FIRST_TOKEN, DISAGREEMENT)

# Rounding of float32 hidden states; errors of cosines and divergences are of the order of its square.
_ROUNDING = 1e-4

# Upper bound on plausible measurements.
_LARGEST = 1e100

# Fields common to the cases of one swap.
_SHARED = ("inputs", "tokens", "num_heads", "head_dim", "causal", "dtype", "device", "threads", "seed")


class Spread(NamedTuple):
    """Statistics of a quantity over texts and draws.

    Attributes:
        over_seeds: Standard deviation over draws of the mean over texts; None for one draw.
        worst: Mean over draws at the worst text.
    """

    mean: float
    over_seeds: float | None
    worst: float


class SwapRow(NamedTuple):
    """One backend.

    Attributes:
        whole: Record with all layers swapped; None if it failed or was only timed.
        alone: Records with one layer swapped, by its number.
        time_s: Time of one forward pass of the model.
        timed: The record of its times.
    """

    label: str
    backend: str
    whole: Record | None
    alone: Mapping[int, Record]
    time_s: Typical | None
    timed: Record | None
    peak_bytes: int | None
    failed: tuple[Record, ...]

    def speed(self, own: "SwapRow | None") -> Typical | None:
        """Speed-up over the original model; None if either was not timed."""
        if self.timed is None or own is None or own.timed is None:
            return None
        return time_ratio(self.timed, own.timed)

    def spread(self, quantity: str) -> Spread | None:
        """Statistics of the quantity with all layers swapped."""
        return None if self.whole is None else spread(self.whole, quantity)


@dataclass(frozen=True, eq=False)
class Swap:
    """All measurements of one model on the same texts.

    Attributes:
        rows: The original model first, then in the order of the records.
        quantity: The deciding quantity, one of DECISIVE.
    """

    case: Case
    rows: tuple[SwapRow, ...]
    quantity: str
    records: tuple[Record, ...]

    @cached_property
    def own(self) -> SwapRow | None:
        """The original model."""
        return next((row for row in self.rows if row.backend == OWN), None)

    @cached_property
    def rounding(self) -> float:
        """Largest difference that is rounding: twice the difference of exact attention in another kernel."""
        least = _ROUNDING if self.quantity == HIDDEN else _ROUNDING**2
        found = [row.spread(self.quantity) for row in self.rows if row.backend == YARDSTICK]
        return max([least, *(2 * one.mean for one in found if one is not None)])

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers that were swapped alone."""
        return tuple(sorted({layer for row in self.rows for layer in row.alone}))


def swaps(records: Iterable[Record]) -> tuple[Swap, ...]:
    """One per model, set of texts and setting."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in {record.case.key: record for record in records if record.case.of == MODEL}.values():
        groups.setdefault(tuple(getattr(record.case, name) for name in _SHARED), []).append(record)
    return tuple(_swap(group) for group in groups.values())


def by_text(record: Record, quantity: str) -> list[tuple[float, ...]]:
    """The draws of each text; empty if not measured or if a draw has no number."""
    draws, texts = getattr(record, f"{quantity}_draws") or (), record.texts or 1
    seeds = len(draws) // texts
    usable = record.status == "ok" and all(value is not None and value < _LARGEST for value in draws)
    if not usable or not seeds or seeds * texts != len(draws):
        return []
    return [draws[start : start + seeds] for start in range(0, len(draws), seeds)]


def spread(record: Record, quantity: str) -> Spread | None:
    """Statistics of a quantity; None if `by_text` is empty."""
    texts = by_text(record, quantity)
    if not texts:
        return None
    by_seed = [fmean(one) for one in zip(*texts, strict=True)]
    return Spread(fmean(by_seed), stdev(by_seed) if len(by_seed) > 1 else None, max(map(fmean, texts)))


def rows(records: Iterable[Record], environment: Any = None) -> list[dict[str, Any]]:
    """One flat row per backend, and one per layer that was swapped alone."""
    found = []
    for one in swaps(records):
        shared = {name: getattr(one.case, name) for name in _SHARED}
        for row in one.rows:
            cost = {
                "time_s": row.time_s.median if row.time_s else None,
                "time_low_s": row.time_s.low if row.time_s else None,
                "time_high_s": row.time_s.high if row.time_s else None,
                "peak_bytes": row.peak_bytes,
                "reason": "; ".join(f"{bad.status}: {bad.reason}" for bad in row.failed) or None,
            }
            named = {"label": row.label, "backend": row.backend, **shared}
            found.append({**named, "layer": None, **_quantities(row.whole), **cost})
            found += [
                {**named, "layer": layer, **_quantities(record)}
                for layer, record in sorted(row.alone.items())
            ]
    return found


def _quantities(record: Record | None) -> dict[str, Any]:
    names = (HIDDEN, MEAN_POOL, FIRST_TOKEN, KL, DISAGREEMENT, PERPLEXITY)
    return {name: None if record is None else getattr(record, name) for name in names}


def _swap(records: Sequence[Record]) -> Swap:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.case.label, []).append(record)
    rows = sorted(map(_row, groups.values()), key=lambda row: row.backend != OWN)
    known = [
        name for name in DECISIVE if any(row.whole and getattr(row.whole, name) is not None for row in rows)
    ]
    return Swap(records[0].case, tuple(rows), known[0] if known else HIDDEN, tuple(records))


def _row(records: Sequence[Record]) -> SwapRow:
    """The records of one label."""
    case = records[0].case
    swapped = {record.case.layer: record for record in records if record.case.kind == "swap"}
    time = next((r for r in records if r.case.kind == "time" and r.status == "ok"), None)
    memory = next((r for r in records if r.case.kind == "memory" and r.status == "ok"), None)
    timed = time if time is not None and any(time.times_s or ()) else None
    return SwapRow(
        label=case.label,
        backend=case.backend,
        whole=swapped.get(None),
        alone={layer: record for layer, record in swapped.items() if layer is not None},
        time_s=call_time(timed) if timed is not None else None,
        timed=timed,
        peak_bytes=memory.peak_bytes if memory else None,
        failed=tuple(record for record in records if record.status != "ok"),
    )
