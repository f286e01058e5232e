"""What an attention has to do, counted and not measured: the steps that a backend names for it.

A matrix product is counted by its multiplications, each with an addition. What a mask throws away is not
counted even where it is computed, nor what a backward pass computes again to save memory: the numbers say
what the algorithm needs, whatever becomes of it on a machine.
"""

from typing import NamedTuple


class MatMul(NamedTuple):
    """A matrix product of one head's forward pass, and the functions taken of its result.

    Attributes:
        multiply_adds: Of the product.
        exponentials: Values of exp, cos and sin.
        gradients: Sides of the product that get a gradient; each is a product of the same size.
        kept: Numbers of it that stand until a later step: a score matrix, mixtures, a state.
        shared: Done once for all heads of queries that read the same keys.
    """

    multiply_adds: int
    exponentials: int = 0
    gradients: int = 2
    kept: int = 0
    shared: bool = False


class OperationCounts(NamedTuple):
    """What a backend does for one head, forward.

    Attributes:
        steps: Its matrix products.
        learned: Learned numbers that are read, by all heads together.
        drawn: Numbers that are read and get no gradient, by all heads together.
    """

    matmuls: tuple[MatMul, ...]
    learned: int = 0
    drawn: int = 0


def visible_pairs(tokens: int, *, back: int, ahead: int) -> int:
    """Σ_i of the keys i−back … i+ahead that exist: pairs of a query and a key that it reads.

    tokens − 1 on a side reaches all there are: tokens² pairs for both sides, tokens (tokens + 1) / 2 for one.
    """
    sides = [min(side, max(tokens - 1, 0)) for side in (back, ahead)]
    # Over all tokens Σ min(i, side) = tokens · side − side (side + 1) / 2.
    return tokens + sum(tokens * side - side * (side + 1) // 2 for side in sides)


def softmax_matmuls(pairs: int, head_dim: int, value_dim: int) -> tuple[MatMul, ...]:
    """A score, its exponential and a value to add for every pair of a query and a key that it reads."""
    return MatMul(pairs * head_dim, exponentials=pairs), MatMul(pairs * value_dim)
