"""Which cluster each key belongs to: neighbours in the space of the keys, or in the sequence.

Everything here is chosen, not computed with: no derivative passes through it.
"""

import torch
from torch import Tensor


@torch.no_grad()
def kmeans(keys: Tensor, real: Tensor, clusters: int, steps: int) -> Tensor:
    """The cluster of every key after some steps of k-means, [batch heads tokens] in 0 … clusters − 1.

    Starts from keys evenly spaced in the sequence, so that as many clusters as real keys have one each.

    Args:
        keys: [batch heads tokens dim].
        real: bool [batch tokens]; other keys belong nowhere, whatever cluster they are given.
        steps: How often every key goes to its nearest centre; in between, centres become means.
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
    """The segment of every key: as many real keys in each as can be, in order, [batch tokens]."""
    count = real.sum(dim=-1, keepdim=True)
    rank = (real.cumsum(dim=-1) - 1).clamp_min(0)
    return rank * clusters // count.clamp_min(clusters)


def _spread(real: Tensor, clusters: int) -> Tensor:
    """Positions of real keys at even steps, first and last among them, [batch clusters]; few ones repeat."""
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
    """The mean of every cluster's real keys; one without any stays where it is."""
    rows = torch.cat([keys, torch.ones_like(keys[..., :1])], dim=-1) * real[:, None, :, None]
    sums = rows.new_zeros(*centres.shape[:3], rows.shape[-1])
    sums.scatter_add_(2, chosen[..., None].expand_as(rows), rows)
    counts = sums[..., -1:]
    return torch.where(counts > 0, sums[..., :-1] / counts.clamp_min(1), centres)
