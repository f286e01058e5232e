"""Baselines for errors: the best approximation of each rank, and the Taylor series of exp.

The first bounds the error at a given rank from below; the second needs no random features. The trivial
baseline, the mean of the values, is in `measure.error`.
"""

import torch
from torch import Generator, Tensor

from efficient_attn.errors import UnsupportedError
from efficient_attn.measure.error import blocks
from efficient_attn.ops.grouped_queries import fold, unfold
from efficient_attn.ops.softmax.definition import apply_weights, softmax_weights
from efficient_attn.shapes import Keys, Output, Queries, Values, Weights

# Number of tokens up to which singular vectors are exact; beyond, subspace iteration finds the leading ones.
_EXACT_TOKENS = 1024
# Measured error at the largest rank, relative to the optimum: 1.03 on Gaussian inputs, 1.000 on others.
_OVERSAMPLING, _ITERATIONS = 16, 2
# Limit on the entries of the weight matrix, which is built as a whole.
_MOST_ENTRIES = 1 << 26


def leading_directions(weights: Weights, rank: int) -> Tensor:
    """Leading right singular vectors of the weights, [batch heads k_tokens rank], the largest first.

    A V_r V_rᵀ is the matrix of rank r nearest to A (Eckart and Young 1936). For long sequences, subspace
    iteration in float32 finds V (Halko, Martinsson and Tropp 2011, algorithm 4.4).
    """
    tokens = weights.shape[-1]
    if tokens <= _EXACT_TOKENS:
        return torch.linalg.eigh(weights.mT @ weights).eigenvectors.flip(-1)[..., :rank]
    narrow = weights.float()
    width = min(rank + _OVERSAMPLING, tokens)
    start = torch.randn(*weights.shape[:-2], tokens, width, generator=Generator().manual_seed(0))
    basis = torch.linalg.qr(start.to(narrow)).Q
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(narrow.mT @ (narrow @ basis)).Q
    seen = narrow @ basis
    rotation = torch.linalg.eigh((seen.mT @ seen).double()).eigenvectors.flip(-1)
    return (basis @ rotation.float())[..., :rank]


def check_size(q: Queries, k: Keys) -> None:
    """Refuse inputs whose weight matrix is too large for the low-rank baseline."""
    entries = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if entries > _MOST_ENTRIES:
        raise UnsupportedError(
            f"The low-rank baseline builds the whole weight matrix; {entries} entries are more than "
            f"{_MOST_ENTRIES}. Use fewer tokens."
        )


def exact_weights(q: Queries, k: Keys, *, scale: float, causal: bool = False) -> Weights:
    """softmax(scale · q kᵀ) in float64."""
    return softmax_weights(q.double(), k.double(), scale=scale, causal=causal, key_mask=None)


def low_rank_output(weights: Weights, directions: Tensor, v: Values) -> Output:
    """A V_r V_rᵀ v, with the exact weights A and their r leading directions V_r."""
    directions = directions.to(weights)
    mixed = directions.mT @ v.to(weights).repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
    return weights @ (directions @ mixed)


def low_rank_weights(weights: Weights, directions: Tensor) -> Weights:
    """A V_r V_rᵀ."""
    directions = directions.to(weights)
    return weights @ directions @ directions.mT


def taylor_weights(q: Queries, k: Keys, *, scale: float, order: int) -> Weights:
    """1 + z or 1 + z + z²/2 in place of exp(z), z = scale · q·k, divided by the sum of the row; in float64.

    Order 2 is positive everywhere, (1 + (1 + z)²)/2; order 1 is not.
    """
    z = unfold(fold(q.double() * scale, k.shape[1]) @ k.double().mT, q.shape[1])
    terms = 1 + z if order == 1 else 1 + z + z.square() / 2
    return terms / terms.sum(dim=-1, keepdim=True)


def taylor_output(q: Queries, k: Keys, v: Values, *, scale: float, order: int) -> Output:
    """Output with `taylor_weights`, in blocks of queries."""
    v = v.double()
    return torch.cat(
        [
            apply_weights(taylor_weights(q[..., rows, :], k, scale=scale, order=order), v, key_mask=None)
            for rows, _ in blocks(q, k, causal=False)
        ],
        dim=-2,
    )


def taylor_features(head_dim: int, order: int) -> int:
    """Number of features of the series as linear attention: 1 + d, and d(d + 1)/2 more for order 2."""
    return 1 + head_dim + (head_dim * (head_dim + 1) // 2 if order == 2 else 0)
