"""Softmax of queries over the keys of all clusters that they open, with its log-sum-exps.

Pairs of a query and a cluster are sorted by cluster and cut into tiles of equally many pairs of one cluster,
so that all tiles are one batched product, whichever clusters are chosen.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.slices import MASKED
from efficient_attn.ops.clusters.trees import Clusters
from efficient_attn.ops.paths import step_capacity, tuned_for_cpu
from efficient_attn.ops.softmax.partial import eager, gradients, partial_softmax, softmax

# Pairs in a tile, and numbers per step on the CPU, so that the tiles of a step stay in cache.
_TILE, _STEP = 64, 1 << 19


class _Tiles(NamedTuple):
    """Attributes.

    rows: Query at every place of every tile, and the number of queries at empty places, [tiles pairs].
    clusters: Cluster of each tile, counted through all heads.
    places: Place of every pair, and the number of places where it has none, [rows probes].
    """

    rows: Tensor
    clusters: Tensor
    places: Tensor

    def steps(self, size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Places, queries and clusters of this many tiles at a time."""
        for begin in range(0, len(self.rows), size):
            rows, of = self.rows[begin : begin + size], self.clusters[begin : begin + size]
            yield slice(begin * _TILE, (begin + len(rows)) * _TILE), rows, of


def open_clusters(q: Tensor, chosen: Tensor, clusters: Clusters) -> tuple[Tensor, Tensor]:
    """Softmax of every query over the keys of the clusters that it has chosen, and its log-sum-exps.

    Args:
        q: [batch kv_heads rows head_dim].
        chosen: Clusters of each query, or the number of clusters for none, [batch kv_heads rows probes].

    Returns:
        [batch kv_heads rows value_dim] and [batch kv_heads rows 1]; 0 and about the bias of a masked key for
        queries without a cluster.
    """
    batch, heads, number = clusters.k.shape[:3]
    first = torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1) * number
    numbers = torch.where(chosen < number, chosen + first, batch * heads * number)
    tiles = _tiles(numbers.flatten(0, 2), batch * heads * number)
    bias = torch.zeros_like(clusters.counted, dtype=q.dtype).masked_fill(~clusters.counted, MASKED)
    rows, k, v, bias = (x.flatten(0, 2) for x in (q, clusters.k, clusters.v, bias))
    if tuned_for_cpu(q) and eager(q, k, v):
        out, log_sum = _Opened.apply(rows, k, v, bias, tiles)
    else:
        out, log_sum = _opened(rows, k, v, bias, tiles)
    return out.view(*q.shape[:3], -1), log_sum.view(*q.shape[:3], 1)


def _opened(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, tiles: _Tiles) -> tuple[Tensor, Tensor]:
    """Outputs [rows value_dim] and log-sum-exps [rows], by operators that have derivatives."""
    outs, log_sums = [], []
    for _, rows, of in tiles.steps(step_capacity(_numbers(k, v))):
        members = _members(q, rows)
        tile = (x.index_select(0, of) for x in (k, v, bias.unsqueeze(1)))
        out, log_sum = partial_softmax(members, *tile)
        outs.append(out.flatten(0, 1))
        log_sums.append(log_sum.flatten())
    # Pairs of no cluster read the place after the last tile.
    out = torch.cat([*outs, v.new_zeros(1, v.shape[2])]).index_select(0, tiles.places.flatten())
    log_sum = torch.cat([*log_sums, q.new_full((1,), MASKED)]).index_select(0, tiles.places.flatten())
    log_sum = log_sum.view(tiles.places.shape)
    total = log_sum.logsumexp(dim=1, keepdim=True)
    weights = (log_sum - total).exp().unsqueeze(1)
    return (weights @ out.view(*tiles.places.shape, -1)).squeeze(1), total.squeeze(1)


class _Opened(torch.autograd.Function):
    """The same for the caches of a CPU. The backward pass computes the scores again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, tiles: _Tiles
    ) -> tuple[Tensor, Tensor]:
        number = tiles.rows.numel()
        # Pairs of no cluster read the place after the last tile.
        outs, log_sums = v.new_empty(number + 1, v.shape[2]), q.new_empty(number + 1)
        outs[-1], log_sums[-1] = 0.0, MASKED
        for places, rows, of in tiles.steps(max(_STEP // _numbers(k, v), 1)):
            tile = (x.index_select(0, of) for x in (k, v, bias.unsqueeze(1)))
            out, log_sum = softmax(*(x.unsqueeze(1) for x in (_members(q, rows), *tile)))
            outs[places], log_sums[places] = out.flatten(0, 2), log_sum.flatten()
        log_sum = log_sums.index_select(0, tiles.places.flatten()).view(tiles.places.shape)
        total = log_sum.logsumexp(dim=1)
        # One pass over the outputs, which are not gathered first.
        weights = (log_sum - total[:, None]).exp()
        out = F.embedding_bag(tiles.places, outs, per_sample_weights=weights, mode="sum")
        ctx.save_for_backward(q, k, v, bias, *tiles, out, total)
        return out, total

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, *tiles, out, total = ctx.saved_tensors
        tiles = _Tiles(*tiles)
        decrease = (grad_out * out).sum(dim=1) - grad_log_sum
        # No weight at empty places.
        total = F.pad(total, (0, 1), value=torch.inf)
        by_place = q.new_zeros(tiles.rows.numel() + 1, q.shape[1])
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
        # Four tensors of scores are held at a time.
        for places, rows, of in tiles.steps(max(_STEP // _numbers(k, v) // 4, 1)):
            grad_rows, less, members = (_members(x, rows) for x in (grad_out, decrease, q))
            keys, values, masked = (x.index_select(0, of) for x in (k, v, bias.unsqueeze(1)))
            by_q, by_k, by_v = gradients(grad_rows, less, members, keys, values, masked, total[rows])
            by_place[places] = by_q.flatten(0, 1)
            grad_k.index_add_(0, of, by_k)
            grad_v.index_add_(0, of, by_v)
        return F.embedding_bag(tiles.places, by_place, mode="sum"), grad_k, grad_v, None, None


def _members(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of `x` at every place of some tiles, [tiles pairs …]."""
    return x.index_select(0, rows.clamp_max(len(x) - 1).flatten()).unflatten(0, rows.shape)


def _numbers(k: Tensor, v: Tensor) -> int:
    """Numbers in the tensors of a tile."""
    return (_TILE + k.shape[1]) * (k.shape[2] + v.shape[2]) + _TILE * k.shape[1]


@torch.no_grad()
def _tiles(chosen: Tensor, number: int) -> _Tiles:
    """Tiles of all pairs, from the clusters of each query in 0 … number, of which the last means none."""
    (queries, probes), pairs = chosen.shape, chosen.numel()
    clusters, pair = torch.sort(chosen.flatten(), stable=True)
    begins = torch.searchsorted(clusters, torch.arange(number + 1, device=chosen.device))
    tiles = (begins.diff() + _TILE - 1) // _TILE
    ends = tiles.cumsum(dim=0)
    # The host asks for the number of tiles where this costs nothing, and bounds it elsewhere.
    most = pairs // _TILE + min(number, pairs)
    if tuned_for_cpu(chosen) and eager(chosen):
        most = max(int(ends[-1]), 1)
    rank = torch.arange(pairs, device=chosen.device) - begins[clusters]
    place = (ends - tiles)[clusters.clamp_max(number - 1)] * _TILE + rank
    place = place.masked_fill(clusters == number, most * _TILE)
    rows = place.new_full((most * _TILE + 1,), queries).scatter(0, place, pair // probes)[:-1]
    of = torch.searchsorted(ends, torch.arange(most, device=chosen.device), right=True)
    places = torch.empty_like(place).scatter(0, pair, place)
    return _Tiles(rows.view(most, _TILE), of.clamp_max(number - 1), places.view(queries, probes))
