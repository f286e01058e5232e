"""The cases of a run, and the cases skipped because they would not fit into memory."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from efficient_attn.sweep.amounts import show_bytes
from efficient_attn.sweep.records import Case
from efficient_attn.sweep.variants import Variant

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# Score matrices alive at once in naive attention: scores and weights; in the backward pass the weights of
# every layer, their gradient and the gradient of the scores.
_DENSE_SCORES = 2

# Vectors of a token alive at once. Attention: q, k, v, the output; in the backward pass their gradients too.
_ATTENTION_VECTORS = {False: 4, True: 8}

# A block: x, the two sums around the feed-forward part, its eight inside (before and after ReLU). The
# backward pass keeps twelve per block: q, k, v, their output, two sums, two norms, four inside.
_BLOCK_VECTORS, _KEPT_VECTORS = 11, 12

# Weights of a block in units of model_dim²: four projections, and two of the feed-forward part, which is
# four times as wide.
_SQUARES = 12


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One case of a plan.

    Attributes:
        predicted_bytes: Bytes of inputs, weights, intermediate vectors and, if materialised, score matrices.
        limit_bytes: Memory limit; None if unknown.
        skip: Reason for skipping the case; None if it is measured.
    """

    case: Case
    variant: Variant
    predicted_bytes: int
    limit_bytes: int | None = None
    skip: str | None = None


def predict_bytes(case: Case, memory_growth: int) -> int:
    """Bytes of vectors and weights, their gradients, and of score matrices if memory grows with n²."""
    item = ITEM_BYTES[case.dtype]
    vector = item * case.batch * case.tokens * case.model_dim
    scores = item * case.batch * case.num_heads * case.tokens**2 if memory_growth > 1 else 0
    layers = case.layers or 1
    dense = _DENSE_SCORES + (layers if case.backward else 0)
    if case.of == "attention":
        return _ATTENTION_VECTORS[case.backward] * vector + dense * scores
    weights = layers * _SQUARES * item * case.model_dim**2
    vectors = _BLOCK_VECTORS + (layers * _KEPT_VECTORS if case.backward else 0)
    return (2 if case.backward else 1) * weights + vectors * vector + dense * scores


def plan(
    variants: Sequence[Variant],
    lengths: Sequence[int],
    shared: Mapping[str, Any],
    *,
    kinds: Sequence[str] = ("time", "memory"),
    memory_limit: int | None = None,
) -> tuple[Entry, ...]:
    """One entry per length, kind and variant, in this order; `shared` are the fields common to all cases."""
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
