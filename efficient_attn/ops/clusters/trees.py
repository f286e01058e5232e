"""Clusters of far keys: balanced trees of the keys of dyadic runs, with a summary of each cluster.

Run (level, number) has the stretches number · 2^level … (number + 1) · 2^level − 1, of as many keys as a
cluster. The keys before a slice are the runs of the binary digits of their number; runs after a slice double
with the distance. The runs before a slice are complete before the first query that reads them, so that no
later key moves a key to another cluster.

A run is halved at the median of its keys along one direction, each half at its own median, and so on: a k-d
tree (Bentley 1975, "Multidimensional binary search trees used for associative searching") in the principal
directions of the run, each node halved along the one with the largest variance. Stretches of the sorted keys
are nested clusters. Without causality all runs share the principal directions of all keys, found once.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.slices import MASKED, Layout

# (level, number)
Run = tuple[int, int]
# Principal directions, and steps of the subspace iteration that finds them.
_DIRECTIONS, _STEPS = 8, 2


class Stage(NamedTuple):
    """Queries begin … end − 1, in blocks of `layout.block`; clusters have as many keys as a block."""

    layout: Layout
    begin: int
    end: int

    def since(self, position: int) -> "Stage":
        """The blocks from that of a position on."""
        begin = max(self.begin, position // self.layout.block * self.layout.block)
        return self._replace(begin=min(begin, self.end))

    def runs(self, tokens: int, causal: bool) -> list[list[Run]]:
        """Runs of the far keys of each block, in order; the last run may reach beyond the tokens."""
        size = self.layout.block
        last = 0 if causal else -(-tokens // size)
        blocks = range(self.begin // size, -(-self.end // size))
        return [[*before(max(block - 1, 0)), *_after(block + 2, last)] for block in blocks]


def before(end: int) -> list[Run]:
    """Runs of the stretches 0 … end − 1, one per binary digit, the longest first."""
    runs, begin = [], 0
    while begin < end:
        level = (end - begin).bit_length() - 1
        runs.append((level, begin >> level))
        begin += 1 << level
    return runs


def _after(begin: int, end: int) -> list[Run]:
    """Runs of the stretches begin … end − 1, each the longest that begins there."""
    runs = []
    while begin < end:
        level = (begin & -begin).bit_length() - 1
        runs.append((level, begin >> level))
        begin += 1 << level
    return runs


def full_stages(tokens: int, *, block: int, clusters: int, first: int) -> list[Stage]:
    """Stages of all queries, for clusters of each size that the first `reach(stage)` tokens need.

    Args:
        block: Number of keys in the smallest clusters.
        clusters: Largest number of clusters per query.
        first: Number of global tokens.
    """
    stages = [Stage(Layout(block, block, block, first), 0, tokens)]
    while tokens > reach(stages[-1], clusters):
        block *= 2
        stages.append(Stage(Layout(block, block, block, first), 0, tokens))
    return stages


def reach(stage: Stage, clusters: int) -> int:
    """Largest number of tokens with few enough clusters; a slice takes the place of two at the ends."""
    return (clusters + 2) * stage.layout.block


def causal_stages(tokens: int, *, block: int, clusters: int, first: int) -> list[Stage]:
    """Stages of the queries one after the other, in which the size of the clusters doubles.

    Args:
        block: Number of keys in the smallest clusters.
        clusters: Largest number of clusters per query, at least 2.
        first: Number of global tokens.
    """
    # An even number of blocks, so that the next stage begins with a whole block.
    blocks = max((clusters + 2) // 2 * 2, 4)
    stages, begin = [], 0
    while begin < tokens:
        end = min(blocks * block, tokens)
        stages.append(Stage(Layout(block, block, 0, first), begin, end))
        begin, block = end, 2 * block
    return stages


class Places(NamedTuple):
    """Clusters of the runs of some blocks, counted from run to run.

    Attributes:
        runs: All runs, the longest first.
        read: Clusters that each block reads.
    """

    runs: list[Run]
    read: list[list[int]]


def places(blocks: list[list[Run]], stretches: int) -> Places:
    """Clusters that some blocks read; clusters beyond the last stretch have no keys and are left out."""
    runs = sorted({run for block in blocks for run in block}, reverse=True)
    of_run, begin = {}, 0
    for level, number in runs:
        filled = min(1 << level, stretches - (number << level))
        of_run[level, number] = range(begin, begin + filled)
        begin += 1 << level
    return Places(runs, [[cluster for run in block for cluster in of_run[run]] for block in blocks])


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
        first = tuple(number * size for height, number in runs if height == level)
        new = index_tensor(first, k.device)[:, None] + torch.arange(size, device=k.device)
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
        at, alive = (y.unflatten(2, (-1, size)).gather(3, order).flatten(2, 3) for y in (at, alive))
        x = (
            x.unflatten(2, (-1, size))
            .gather(3, order[..., None].expand(*order.shape, x.shape[3]))
            .flatten(2, 3)
        )
    return at


@lru_cache(maxsize=256)
def _on_gpu(indices: tuple, device: torch.device) -> Tensor:
    return torch.tensor(indices, dtype=torch.long, device=device)


def index_tensor(indices: tuple, device: torch.device) -> Tensor:
    """Indices, or tuples of them, as a tensor, which a GPU copies once: it waits for a copy from Python."""
    make = _on_gpu if device.type == "cuda" and not torch.compiler.is_compiling() else _on_gpu.__wrapped__
    return make(indices, device)


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


class Clusters(NamedTuple):
    """Keys of all clusters.

    Attributes:
        k: [batch kv_heads clusters size head_dim].
        v: [batch kv_heads clusters size value_dim].
        counted: Whether the cluster has a key there, bool [batch kv_heads clusters size].
    """

    k: Tensor
    v: Tensor
    counted: Tensor


class Summaries(NamedTuple):
    """Summaries of all clusters, and last of an empty one.

    Attributes:
        k: Mean keys and the column of the score bias, [batch kv_heads clusters+1 width].
        half_variance: Half the variance of each entry of the keys, [batch kv_heads clusters+1 head_dim].
        v: Mean values, [batch kv_heads clusters+1 width].
    """

    k: Tensor
    half_variance: Tensor
    v: Tensor

    def of(self, read: Tensor) -> "Summaries":
        """The summaries of some clusters for each block [blocks most], [batch kv_heads blocks most …]."""
        return Summaries(*(x[:, :, read] for x in self))


def clusters_of(
    k: Tensor, v: Tensor, counted: Tensor, runs: list[Run], size: int, *, shared: bool
) -> Clusters:
    """Clusters of all runs.

    Args:
        counted: Keys that belong to clusters, bool [batch tokens].
        size: Number of keys in a cluster.
        shared: See `sort_runs`.
    """
    return clusters_at(k, v, counted, sort_runs(k, counted, runs, size, shared=shared), size)


def clusters_at(k: Tensor, v: Tensor, counted: Tensor, positions: Tensor, size: int) -> Clusters:
    """Clusters of `size` keys of the positions one after the other, [batch kv_heads keys]."""
    tokens, members = k.shape[2], positions.unflatten(2, (-1, size))
    keys = members.clamp_max(tokens - 1)
    real = counted[:, None, None].expand(*keys.shape[:3], tokens).gather(3, keys)
    heads = torch.arange(k.shape[0] * k.shape[1], device=k.device) * tokens
    at = keys + heads.view(*k.shape[:2], 1, 1)
    rows, values = (x.flatten(0, 2).index_select(0, at.flatten()).unflatten(0, at.shape) for x in (k, v))
    return Clusters(rows, values, real & (members < tokens))


def summarise(clusters: Clusters, width: int) -> Summaries:
    """Summaries of all clusters, with columns up to `width`."""
    count = clusters.counted.sum(dim=3, keepdim=True).to(clusters.k.dtype)
    share = (clusters.counted / count.clamp_min(1)).unsqueeze(3)
    mean = share @ clusters.k
    half_variance = (share / 2 @ (clusters.k - mean).square()).squeeze(3)
    bias = count.clamp_min(1).log().masked_fill(count == 0, MASKED)
    mean_k, mean_v = mean.squeeze(3), (share @ clusters.v).squeeze(3)
    biased = torch.cat([F.pad(mean_k, (0, 0, 0, 1)), F.pad(bias, (0, 0, 0, 1), value=MASKED)], dim=3)
    return Summaries(
        F.pad(biased, (0, width - biased.shape[3])),
        F.pad(half_variance, (0, 0, 0, 1)),
        F.pad(mean_v, (0, width - mean_v.shape[3], 0, 1)),
    )
