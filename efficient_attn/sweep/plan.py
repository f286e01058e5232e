"""Which cases to measure, and which not to try because they would not fit into memory."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from efficient_attn.sweep.amounts import show_bytes
from efficient_attn.sweep.records import Case
from efficient_attn.sweep.variants import Variant

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# Score matrices that are alive at once when softmax attention is written out: scores and weights;
# on the way back the weights, their gradient and that of the scores.
_DENSE_SCORES = {False: 2, True: 3}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One case of a plan.

    Attributes:
        predicted_bytes: Inputs, output and, where they are built, score matrices.
        limit_bytes: Memory that it may take; None where nobody says.
        skip: Why it is not tried; None where it is.
    """

    case: Case
    variant: Variant
    predicted_bytes: int
    limit_bytes: int | None = None
    skip: str | None = None


def predict_bytes(case: Case, memory_growth: int) -> int:
    """Bytes of q, k, v, the output, their gradients, and of score matrices where memory grows with n²."""
    per_head = case.batch * case.num_heads * ITEM_BYTES[case.dtype]
    vectors = (8 if case.backward else 4) * per_head * case.tokens * case.head_dim
    scores = _DENSE_SCORES[case.backward] * per_head * case.tokens**2 if memory_growth > 1 else 0
    return vectors + scores


def plan(
    variants: Sequence[Variant],
    lengths: Sequence[int],
    shared: Mapping[str, Any],
    *,
    kinds: Sequence[str] = ("time", "memory"),
    memory_limit: int | None = None,
) -> tuple[Entry, ...]:
    """One entry per length, kind and variant, in this order; `shared` are the fields that all cases have."""
    entries = []
    for tokens, kind, variant in itertools.product(lengths, kinds, variants):
        case = Case(
            kind=kind,
            backend=variant.backend,
            label=variant.label,
            options=variant.options,
            tokens=tokens,
            **shared,
        )
        needed = predict_bytes(case, variant.memory_growth)
        skip = None
        if memory_limit is not None and needed > memory_limit:
            skip = (
                f"needs about {show_bytes(needed)}, the limit is {show_bytes(memory_limit)} "
                "(raise it with --memory-limit)"
            )
        entry = Entry(case=case, variant=variant, predicted_bytes=needed, limit_bytes=memory_limit, skip=skip)
        entries.append(entry)
    return tuple(entries)
