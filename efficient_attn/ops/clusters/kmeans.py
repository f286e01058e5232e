"""Cluster assignment of keys: k-means in key space, or segments of the sequence.

Assignments are discrete, and no gradient flows through them.
"""

import torch
from torch import Tensor


@torch.no_grad()
def kmeans(keys: Tensor, real: Tensor, clusters: int, steps: int) -> Tensor:
    """Cluster index of every key after some steps of k-means, [batch heads tokens] in 0 … clusters − 1.

    The initial centres are keys evenly spaced in the sequence, one cluster per real key if there are enough.

    Args:
        keys: [batch heads tokens dim].
        real: bool [batch tokens]; the indices of other keys have no meaning.
        steps: Number of assignments to the nearest centre; centres become means in between.
    """
    centres = keys.gather(
        2, _spread(real, clusters)[:, None, :, None].expand(*keys.shape[:2], -1, keys.shape[3])
    )
    chosen = _nearest(keys, centres)
    for _ in range(steps - 1):
        centres = _means(keys, real, chosen, centres)
        chosen = _nearest(keys, centres)
    return chosen


@torch.no_grad()
def segments(real: Tensor, clusters: int) -> Tensor:
    """Segment index of every key, [batch tokens]: consecutive segments with equal numbers of real keys."""
    count = real.sum(dim=-1, keepdim=True)
    rank = (real.cumsum(dim=-1) - 1).clamp_min(0)
    return rank * clusters // count.clamp_min(clusters)


def _spread(real: Tensor, clusters: int) -> Tensor:
    """Positions of evenly spaced real keys, first to last, [batch clusters]; repeated if too few."""
    last = (real.sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    rank = torch.arange(clusters, device=real.device) * last // max(clusters - 1, 1)
    return torch.searchsorted(real.cumsum(dim=-1), rank + 1).clamp_max(real.shape[-1] - 1)


def _nearest(keys: Tensor, centres: Tensor) -> Tensor:
    """argmin_c |k − c|² = argmax_c k·c − |c|²/2, [batch heads tokens]."""
    half_squares = centres.square().sum(dim=-1)[:, :, None] / 2
    products = torch.baddbmm(
        half_squares.flatten(0, 1), keys.flatten(0, 1), centres.flatten(0, 1).mT, beta=-1
    )
    return products.argmax(dim=-1).unflatten(0, keys.shape[:2])


def _means(keys: Tensor, real: Tensor, chosen: Tensor, centres: Tensor) -> Tensor:
    """Mean of every cluster's real keys; the centre of an empty cluster stays."""
    rows = torch.cat([keys, torch.ones_like(keys[..., :1])], dim=-1) * real[:, None, :, None]
    sums = rows.new_zeros(*centres.shape[:3], rows.shape[-1])
    sums.scatter_add_(2, chosen[..., None].expand_as(rows), rows)
    counts = sums[..., -1:]
    return torch.where(counts > 0, sums[..., :-1] / counts.clamp_min(1), centres)
