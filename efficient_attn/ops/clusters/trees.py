"""Balanced trees of keys: clusters of equal size in runs of keys, each run on its own.

A run is halved at the median of its keys along one direction, each half at its own median, and so on: a k-d
tree (Bentley 1975, "Multidimensional binary search trees used for associative searching") in the principal
directions of the run, each node halved along the one with the largest variance. Stretches of the sorted keys
are nested clusters. Without causality all runs share the principal directions of all keys, found once.
"""

import torch
from torch import Tensor

from efficient_attn.ops.clusters.runs import Run

# Principal directions, and steps of the subspace iteration that finds them.
_DIRECTIONS, _STEPS = 8, 2


def sorting_products(head_dim: int) -> int:
    """Multiply-adds per key of a run: two products for each step, and one for the coordinates."""
    return (2 * _STEPS + 1) * min(_DIRECTIONS, head_dim) * head_dim


@torch.no_grad()
def sort_runs(k: Tensor, counted: Tensor, runs: list[Run], leaf: int, *, shared: bool = False) -> Tensor:
    """Positions of the keys of all runs, one after the other, each in the order of its tree.

    Args:
        k: [batch kv_heads tokens head_dim].
        counted: bool [batch tokens]; other keys come last in their node.
        runs: The longest first.
        leaf: Number of keys in a run of level 0, and in the smallest nodes.
        shared: Principal directions of all keys for every run, in the place of its own.

    Returns:
        [batch kv_heads keys]; positions beyond the tokens are among them.
    """
    tokens, (batch, heads) = k.shape[2], k.shape[:2]
    at = torch.zeros(batch, heads, 0, dtype=torch.long, device=k.device)
    x, alive = k[:, :, :0, :_DIRECTIONS], at.bool()
    of_all = None
    if shared:
        # Keys behind the last counted one are padding, and change nothing.
        last = (torch.arange(tokens, device=k.device) * counted).amax(dim=1)[:, None, None]
        of_all = _coordinates(k, counted[:, None].expand(k.shape[:3]), last)
    for level in range(runs[0][0], -1, -1):
        size = leaf << level
        first = [number * size for one, number in runs if one == level]
        new = torch.tensor(first, dtype=torch.long, device=k.device)[:, None] + torch.arange(
            size, device=k.device
        )
        inside = new.clamp_max(tokens - 1)
        at = torch.cat([at, new.flatten().expand(batch, heads, -1)], dim=2)
        if size == leaf:
            continue
        real = (counted[:, inside] & (new < tokens))[:, None].expand(batch, heads, *new.shape)
        if of_all is None:
            along = _coordinates(k[:, :, inside], real, size - 1)
        else:
            along = of_all[:, :, inside] * real[..., None]
        x = torch.cat([x, along.flatten(2, 3)], dim=2)
        alive = torch.cat([alive, real.flatten(2, 3)], dim=2)
        order = _halved(x.unflatten(2, (-1, size)), alive.unflatten(2, (-1, size)))
        at, alive = (one.unflatten(2, (-1, size)).gather(3, order).flatten(2, 3) for one in (at, alive))
        x = (
            x.unflatten(2, (-1, size))
            .gather(3, order[..., None].expand(*order.shape, x.shape[3]))
            .flatten(2, 3)
        )
    return at


def _halved(x: Tensor, alive: Tensor) -> Tensor:
    """Order of the keys of each node along its widest direction, [… nodes keys]."""
    count = alive.sum(dim=3).clamp_min(1)[..., None, None]
    spread = x - x.sum(dim=3, keepdim=True) / count
    widest = (spread.square() * alive[..., None]).sum(dim=3).argmax(dim=-1)
    along = x.gather(4, widest[..., None, None].expand(*x.shape[:4], 1)).squeeze(4)
    return torch.argsort(along.masked_fill(~alive, torch.inf), dim=3, stable=True)


def _coordinates(keys: Tensor, counted: Tensor, last: int | Tensor) -> Tensor:
    """Counted keys of each run along its principal directions, and zeros, [… runs tokens directions].

    Args:
        last: Position of the last key among the first directions of the iteration, or [batch 1 1].
    """
    alive = counted[..., None]
    x = keys.masked_fill(~alive, 0.0)
    x = (x - x.sum(dim=-2, keepdim=True) / alive.sum(dim=-2, keepdim=True).clamp_min(1)) * alive
    directions = min(_DIRECTIONS, x.shape[-1])
    first = (torch.arange(directions, device=x.device) * last // max(directions - 1, 1))[..., None]
    chosen = x.gather(-2, first.expand(*x.shape[:-2], directions, x.shape[-1]))
    # Directions of unit length, since the products of three keys could overflow.
    basis = torch.nn.functional.normalize(chosen, dim=-1).mT
    for _ in range(_STEPS):
        basis = torch.linalg.qr(x.mT @ (x @ basis)).Q
    return x @ basis
