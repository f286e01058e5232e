"""Table 3 of Wang et al. 2020 (Linformer) as data, and the same ratios of records."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from efficient_attn.analysis.verdicts import cost
from efficient_attn.sweep.records import Case, Record

RANKS = (128, 256, 512, 1024, 2048)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)

DENSE, FUSED, LINFORMER = "exact-dense", "exact", "linformer"

_TIME_SAVED = (
    (1.5, 1.3),
    (1.7, 1.6, 1.3),
    (2.6, 2.4, 2.1, 1.3),
    (3.4, 3.2, 2.8, 2.2, 1.3),
    (5.5, 5.0, 4.4, 3.5, 2.1),
    (8.6, 7.8, 7.0, 5.6, 3.3),
    (13, 12, 11, 8.8, 5.0),
    (20, 18, 16, 14, 7.9),
)
_MEMORY_SAVED = (
    (1.7, 1.5),
    (3.0, 2.9, 1.8),
    (6.1, 5.6, 3.6, 2.0),
    (14, 13, 8.3, 4.3, 2.3),
    (28, 26, 17, 8.5, 4.5),
    (56, 48, 32, 16, 8),
    (56, 48, 36, 18, 16),
    (60, 52, 40, 20, 18),
)

# (tokens, rank) to how many times less is taken.
Ratios = Mapping[tuple[int, int], float]


def _as_ratios(rows: Sequence[Sequence[float]]) -> Ratios:
    return {
        (tokens, rank): ratio
        for tokens, row in zip(LENGTHS, rows, strict=True)
        for rank, ratio in zip(RANKS, row, strict=False)
    }


class Saved(NamedTuple):
    """One half of the table.

    Attributes:
        kind: Kind of its records.
        unit: Saved resource, in words.
        paper: Value printed in the paper.
    """

    kind: str
    unit: str
    paper: Ratios


TIME = Saved("time", "time", _as_ratios(_TIME_SAVED))
MEMORY = Saved("memory", "memory", _as_ratios(_MEMORY_SAVED))


def pairs(
    records: Sequence[Record], saved: Saved, baseline: str
) -> dict[tuple[int, int], tuple[Record, Record]]:
    """Linformer's record and the baseline's at every length and rank that both were measured at."""
    found = {
        (record.case.backend, record.case.tokens, rank(record.case)): record
        for record in records
        if record.status == "ok" and record.case.kind == saved.kind
    }
    return {
        (tokens, size): (found[LINFORMER, tokens, size], found[baseline, tokens, 0])
        for backend, tokens, size in sorted(found)
        if backend == LINFORMER and (baseline, tokens, 0) in found
    }


def measured(records: Sequence[Record], saved: Saved, baseline: str) -> Ratios:
    """Cost of the baseline divided by the cost of Linformer."""
    return {place: cost(its) / cost(own) for place, (own, its) in pairs(records, saved, baseline).items()}


def rank(case: Case) -> int:
    """The rank of a Linformer; 0 for softmax attention."""
    return int(case.options.get("rank", 0))
