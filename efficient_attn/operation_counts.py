"""Operation counts of a backend: the matrix products that it declares.

The unit is one multiplication with its addition. Masked entries are not counted even if they are computed,
nor is recomputation in a backward pass: the counts describe the algorithm, not its execution.
"""

from typing import NamedTuple


class MatMul(NamedTuple):
    """A matrix product of one head's forward pass, with the functions applied to its result.

    Attributes:
        multiply_adds: Multiplications of the product.
        exponentials: Number of values of exp, cos and sin.
        gradients: Number of factors with a gradient; each is a product of the same size.
        stored: Numbers stored for a later product: a score matrix, projected keys, a state.
        shared: Whether a group of query heads shares the product.
    """

    multiply_adds: int
    exponentials: int = 0
    gradients: int = 2
    stored: int = 0
    shared: bool = False


class OperationCounts(NamedTuple):
    """Operations of a backend for one head, forward.

    Attributes:
        matmuls: Matrix products.
        learned: Number of parameters read, by all heads together.
        drawn: Number of constants read, without a gradient, by all heads together.
    """

    matmuls: tuple[MatMul, ...]
    learned: int = 0
    drawn: int = 0


def visible_pairs(tokens: int, *, back: int, ahead: int) -> int:
    """Number of pairs of a query i and an existing key in i−back … i+ahead.

    tokens − 1 on a side includes all keys of that side: tokens² pairs for both sides, tokens (tokens + 1) / 2
    for one.
    """
    sides = [min(side, max(tokens - 1, 0)) for side in (back, ahead)]
    # Sum over all tokens: Σ min(i, side) = tokens · side − side (side + 1) / 2.
    return tokens + sum(tokens * side - side * (side + 1) // 2 for side in sides)


def softmax_matmuls(pairs: int, head_dim: int, value_dim: int) -> tuple[MatMul, ...]:
    """Products for the scores and the weighted values of `pairs` pairs, with one exponential per pair."""
    return MatMul(pairs * head_dim, exponentials=pairs), MatMul(pairs * value_dim)
