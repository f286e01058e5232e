"""Operation counts of a call of a backend.

Operations are counted for matrix products, two for each multiplication with its addition, as in
`operation_counts`: without masked entries, and without recomputation.
"""

from bisect import bisect_left
from typing import Any

from efficient_attn.errors import OptionError
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec


def call_flops(
    spec: BackendSpec,
    problem: AttentionProblem,
    options: Any,
    tokens: int,
    *,
    batch: int = 1,
    num_kv_heads: int | None = None,
    value_dim: int | None = None,
    backward: bool = False,
) -> int | None:
    """Operations of the matrix products of a call, or None if the backend declares none.

    Args:
        problem: Problem with num_heads.
        num_kv_heads: Number of key and value heads; None: num_heads.
        value_dim: Entries of one value; None: head_dim.
    """
    if spec.operations is None:
        return None
    heads = problem.num_heads
    if heads is None:
        raise OptionError("The cost of a call depends on num_heads: give the problem one.")
    kv_heads, width = num_kv_heads or heads, value_dim or problem.head_dim
    matmuls = spec.operations(problem, options, tokens, width)
    if matmuls is None:
        return None
    adds = (
        (kv_heads if matmul.shared else heads)
        * matmul.multiply_adds
        * (1 + matmul.gradients if backward else 1)
        for matmul in matmuls
    )
    return 2 * batch * sum(adds)


def fewer_products_from(spec: BackendSpec, exact: BackendSpec, *, head_dim: int = 64) -> int | None:
    """Number of tokens from which a backend has fewer products than exact attention, counted.

    Both attend in both directions, with default options. None: nothing is declared, or no length up to 2²⁴.
    """
    problem = AttentionProblem(head_dim=head_dim, num_heads=1)
    if spec.operations is None:
        return None
    options = spec.options_type(), exact.options_type()

    def saves(tokens: int) -> bool:
        pair = zip((spec, exact), options, strict=True)
        ours, theirs = (call_flops(x, problem, chosen, tokens) for x, chosen in pair)
        return ours is not None and theirs is not None and ours < theirs

    lengths = range(1, 2**24)
    number = bisect_left(lengths, True, key=saves)
    return lengths[number] if number < len(lengths) else None
