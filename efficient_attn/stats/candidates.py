"""Candidates of a comparison that were not measured, and operations against exact attention.

Plans import this file for --help, so it must not import numpy.
"""

from collections.abc import Collection, Mapping
from typing import Any

from efficient_attn.measure.record import Case, Record
from efficient_attn.operation_counts import softmax_matmuls, visible_pairs

# Key of a run's environment that lists the candidate labels.
CANDIDATES = "candidates"


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
