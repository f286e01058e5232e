"""Operation counts of a backend: the matrix products that it declares.

The unit is one multiplication with its addition. Masked entries are not counted even if they are computed,
nor is recomputation in a backward pass: the counts describe the algorithm, not its execution.
"""

from typing import NamedTuple


class MatMul(NamedTuple):
    """A matrix product of one head's forward pass.

    Attributes:
        multiply_adds: Multiplications of the product.
        gradients: Number of factors with a gradient; each is a product of the same size.
        shared: Whether a group of query heads shares the product.
    """

    multiply_adds: int
    gradients: int = 2
    shared: bool = False


# Matrix products of a backend for one head, forward.
MatMuls = tuple[MatMul, ...]


def visible_pairs(tokens: int, *, back: int, ahead: int) -> int:
    """Number of pairs of a query i and an existing key in i−back … i+ahead.

    tokens − 1 on a side includes all keys of that side: tokens² pairs for both sides, tokens (tokens + 1) / 2
    for one.
    """
    sides = [min(side, max(tokens - 1, 0)) for side in (back, ahead)]
    # Sum over all tokens: Σ min(i, side) = tokens · side − side (side + 1) / 2.
    return tokens + sum(tokens * side - side * (side + 1) // 2 for side in sides)


def softmax_matmuls(pairs: int, head_dim: int, value_dim: int) -> MatMuls:
    """Products for the scores and the weighted values of `pairs` pairs."""
    return MatMul(pairs * head_dim), MatMul(pairs * value_dim)
