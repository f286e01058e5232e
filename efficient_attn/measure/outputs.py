"""Distances between the outputs of a model with and without replaced attention.

All distances are computed in float64, in blocks of rows where rows are as wide as the vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 64


def cosine_distance(x: Tensor, exact: Tensor) -> float:
    """1 − cos(x, exact), mean over rows, as |x/|x| − exact/|exact||² / 2: accurate near 0, never negative."""
    one, other = (F.normalize(rows.double(), dim=-1) for rows in (x, exact))
    return float((one - other).square().sum(dim=-1).mean() / 2)


def relative_error(x: Tensor, exact: Tensor) -> float:
    """‖x − exact‖ / ‖exact‖ over all entries."""
    wide = exact.double()
    return float((x.double() - wide).norm() / wide.norm())


def next_token_kl(logits: Tensor, exact: Tensor) -> float:
    """Mean over positions of Σ p log(p / p'), in nats; logits [tokens vocabulary], p of `exact`."""
    total = 0.0
    for rows, exact_rows in zip(logits.split(_ROWS), exact.split(_ROWS), strict=True):
        p, other = (F.log_softmax(part.double(), dim=-1) for part in (exact_rows, rows))
        total += float(F.kl_div(other, p, reduction="sum", log_target=True))
    # The divergence of equal distributions is zero, up to rounding of either sign.
    return max(total / len(logits), 0.0) if math.isfinite(total) else total


def next_token_disagreement(logits: Tensor, exact: Tensor) -> float:
    """Share of positions with another most likely token."""
    return float((logits.argmax(dim=-1) != exact.argmax(dim=-1)).double().mean())


def perplexity(logits: Tensor, ids: Tensor) -> float:
    """exp of the mean of −log p(next token) over all tokens of a text except the first; ids [tokens]."""
    losses = [
        F.cross_entropy(rows.double(), following, reduction="sum")
        for rows, following in zip(logits[:-1].split(_ROWS), ids[1:].split(_ROWS), strict=True)
    ]
    return float(torch.stack(losses).sum().div(len(ids) - 1).exp())
