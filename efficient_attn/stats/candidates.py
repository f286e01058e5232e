"""Candidates of a comparison that were not measured, or that save no operations.

Plans import this file for --help, so it must not import numpy.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import DENSE, OWN, YARDSTICK
from efficient_attn.operation_counts import softmax_matmuls, visible_pairs

# Key of a run's environment that lists the candidate labels.
CANDIDATES = "candidates"

# Share of the operations of exact attention above which a remark is due: a window wider than the sequence
# computes three quarters of all pairs and more.
_SAVES_LITTLE = 0.75


def missing(environment: Mapping[str, Any] | None, measured: Collection[str]) -> str:
    """` Not measured (2 of 5 candidates): window, linformer.`; empty if nothing is missing."""
    listed = (environment or {}).get(CANDIDATES)
    labels = (
        dict.fromkeys(label for label in listed if isinstance(label, str)) if isinstance(listed, list) else {}
    )
    left = [label for label in labels if label not in measured]
    return f" Not measured ({len(left)} of {len(labels)} candidates): {', '.join(left)}." if left else ""


def operations_share(record: Record) -> float | None:
    """Operations over the operations of exact attention, if counted."""
    return None if not record.flops else record.flops / exact_operations(record.case)


def exact_operations(case: Case) -> int:
    """Operations of exact attention, forward, at the sizes of the case."""
    last = case.tokens - 1
    pairs = visible_pairs(case.tokens, back=last, ahead=0 if case.causal else last)
    adds = sum(matmul.multiply_adds for matmul in softmax_matmuls(pairs, case.head_dim, case.head_dim))
    return max(2 * case.batch * case.num_heads * adds, 1)


def operations_sentence(records: Sequence[Record]) -> str | None:
    """Approximations with nearly as many operations as exact attention, or more."""
    shares = {
        record.case.label: share
        for record in records
        if record.case.backend not in (YARDSTICK, DENSE, OWN)
        and (share := operations_share(record)) is not None
        and share > _SAVES_LITTLE
    }
    if not shares:
        return None
    names = ", ".join(
        f"{label} {100 * shares[label]:.0f} %" for label in sorted(shares, key=shares.__getitem__)
    )
    return f"Few or no operations saved at {records[0].case.tokens} tokens (exact: 100 %): {names}."
