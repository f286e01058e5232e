"""The operations of the call that a case measures, and the rate of the machine that it is measured on."""

import functools
from dataclasses import replace
from typing import Any

from efficient_attn.backends import resolve
from efficient_attn.measure.rate import product_rate
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec
from efficient_attn.sweep.records import Case
from efficient_attn.theory.complexity import block_flops, call_cost


def flops(case: Case, spec: BackendSpec, *, feed_forward_dim: int) -> int | None:
    """Operations of the matrix products of one call; None where nobody counted those of the backend.

    Args:
        feed_forward_dim: Of a block, where the case measures one or several.
    """
    problem = AttentionProblem(
        head_dim=case.head_dim, num_heads=case.num_heads, max_tokens=case.tokens, causal=case.causal
    )
    options = spec.options_type(**case.options)
    cost = call_cost(spec, problem, options, case.tokens, batch=case.batch, backward=case.backward)
    if cost is None or case.of == "attention":
        return None if cost is None else cost.flops
    around = block_flops(
        case.tokens,
        model_dim=case.model_dim,
        feed_forward_dim=feed_forward_dim,
        num_heads=case.num_heads,
        batch=case.batch,
        backward=case.backward,
    )
    return (case.layers or 1) * (cost.flops + around)


def attention_flops(case: Case, target: Any) -> int | None:
    """Operations of the attention of one layer, whatever the case is about; None where nobody counted."""
    return flops(replace(case, of="attention"), resolve(target), feed_forward_dim=0)


@functools.cache
def machine_rate(dtype: str, device: str, threads: int) -> float:
    """Operations per second of large matrix products, measured once in a process for each of its settings.

    Args:
        threads: Those that torch has now.
    """
    return product_rate(dtype, device)
