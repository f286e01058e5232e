"""Operation counts of a call of a backend and of a transformer block.

Operations are counted for matrix products, two for each multiplication with its addition, as in
`operation_counts`: without masked entries, and without recomputation.
"""

from typing import Any, NamedTuple

from efficient_attn.errors import OptionError
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec


class Cost(NamedTuple):
    """Least cost of one call.

    Attributes:
        flops: Operations of the matrix products.
        exponentials: Values of exp, cos and sin in the forward pass.
        moved_bytes: Bytes of inputs, output, parameters and, backward, all their gradients, each once.
        kept_bytes: Bytes of intermediate results of the forward pass.
    """

    flops: int
    exponentials: int
    moved_bytes: int
    kept_bytes: int


def call_cost(
    spec: BackendSpec,
    problem: AttentionProblem,
    options: Any,
    tokens: int,
    *,
    batch: int = 1,
    num_kv_heads: int | None = None,
    value_dim: int | None = None,
    backward: bool = False,
    item_bytes: int = 4,
) -> Cost | None:
    """Cost of a call of a backend, or None if it declares no operations.

    Args:
        problem: Problem with num_heads.
        num_kv_heads: Number of key and value heads; None: num_heads.
        value_dim: Entries of one value; None: head_dim.
        item_bytes: Bytes of one number.
    """
    if spec.operations is None:
        return None
    heads = problem.num_heads
    if heads is None:
        raise OptionError("The cost of a call depends on num_heads: give the problem one.")
    kv_heads, width = num_kv_heads or heads, value_dim or problem.head_dim
    operations = spec.operations(problem, options, tokens, width)
    if operations is None:
        return None
    times = [batch * (kv_heads if matmul.shared else heads) for matmul in operations.matmuls]
    matmuls = list(zip(times, operations.matmuls, strict=True))
    adds = (
        count * matmul.multiply_adds * (1 + matmul.gradients if backward else 1) for count, matmul in matmuls
    )
    tensors = batch * tokens * (heads + kv_heads) * (problem.head_dim + width)
    moved = tensors + operations.learned
    return Cost(
        flops=2 * sum(adds),
        exponentials=sum(count * matmul.exponentials for count, matmul in matmuls),
        moved_bytes=item_bytes * (moved * (2 if backward else 1) + operations.drawn),
        kept_bytes=item_bytes * sum(count * matmul.stored for count, matmul in matmuls),
    )
