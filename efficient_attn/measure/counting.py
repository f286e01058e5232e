"""Operation counts of the measured call."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

from efficient_attn.backends import resolve
from efficient_attn.contained import contained
from efficient_attn.measure.predicted_bytes import ITEM_BYTES
from efficient_attn.measure.records import Case
from efficient_attn.options import resolved
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec
from efficient_attn.theory.complexity import Cost, block_flops, call_cost

# Ratio of the feed-forward dimension to model_dim.
WIDENING = 4


def flops(case: Case, spec: BackendSpec) -> int | None:
    """Operations of the matrix products of one call; None if the backend does not count them."""
    cost = _cost(case, spec)
    if cost is None or case.of == "attention":
        return None if cost is None else cost.flops
    around = block_flops(
        case.tokens,
        model_dim=case.model_dim,
        feed_forward_dim=WIDENING * case.model_dim,
        num_heads=case.num_heads,
        batch=case.batch,
        backward=case.backward,
    )
    return (case.layers or 1) * (cost.flops + around)


def moved_bytes(case: Case, spec: BackendSpec) -> int | None:
    """Bytes of inputs, output, parameters and gradients of attention alone; None if not counted."""
    cost = _cost(case, spec) if case.of == "attention" else None
    return None if cost is None else cost.moved_bytes


def _cost(case: Case, spec: BackendSpec) -> Cost | None:
    """Counted cost of the attention of the case."""
    problem = AttentionProblem(
        head_dim=case.head_dim, num_heads=case.num_heads, max_tokens=case.tokens, causal=case.causal
    )
    options = spec.options_type(**case.options)
    if case.options and resolved(options, causal=case.causal) != options:
        # Cases hold numbers in place of defaults: the record is of defaults that are no longer built.
        return None
    return call_cost(
        spec,
        problem,
        options,
        case.tokens,
        batch=case.batch,
        num_kv_heads=case.num_kv_heads,
        backward=case.backward,
        item_bytes=ITEM_BYTES[case.dtype],
    )


def attention_cost(case: Case, target: Any) -> Cost:
    """Counted cost of attention; of a backend that counts nothing, its growth times the size of q."""
    spec = resolve(target)
    counted: Cost | None = None
    # Counting by code of others may fail; the measurement of the case records the failure.
    with suppress(Exception), contained():
        counted = _cost(case, spec)
    if counted is not None:
        return counted
    numbers = case.batch * case.tokens * case.model_dim
    pairs = numbers * case.tokens ** (spec.capabilities.time_growth - 1)
    return Cost(4 * pairs, 0, 4 * ITEM_BYTES[case.dtype] * numbers, 0)


def attention_flops(case: Case, target: Any) -> int | None:
    """Operations of the attention of one layer of the case; None if the backend does not count them."""
    return flops(replace(case, of="attention"), resolve(target))


def known_flops(case: Case, target: Any) -> int | None:
    """`attention_flops`; None also where counting fails, which the measurement of the case records."""
    try:
        with contained():
            return attention_flops(case, target)
    except Exception:
        return None
