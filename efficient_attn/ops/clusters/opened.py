"""Softmax of queries over the keys of the clusters that they open, with the log-sum-exp of each pair.

Pairs of a query and a cluster are sorted by cluster and cut into tiles of equally many pairs of one cluster,
so that all tiles are one batched product, whichever clusters are chosen.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.far import Clusters
from efficient_attn.ops.clusters.near import MASKED
from efficient_attn.ops.operators import transformed
from efficient_attn.ops.paths import held, tuned_for_cpu
from efficient_attn.ops.softmax import cpu_flash

# Pairs in a tile, and numbers per step on the CPU, so that the tiles of a step stay in cache.
_TILE, _STEP = 64, 1 << 19


class Opened(NamedTuple):
    """Softmax of queries over each cluster that they open.

    Attributes:
        outputs: In the order of tiles, and last zeros for no cluster, [places value_dim].
        places: Place of each output, [batch kv_heads rows probes].
        log_sums: Log-sum-exps, and the bias of a masked key for no cluster, [batch kv_heads rows probes].
    """

    outputs: Tensor
    places: Tensor
    log_sums: Tensor

    def sum(self, weights: Tensor) -> Tensor:
        """Weighted sum of the outputs of every query, [batch kv_heads rows value_dim]."""
        if tuned_for_cpu(weights) and not weights.requires_grad and not torch.compiler.is_compiling():
            # One pass over the outputs, which are not gathered first.
            places, weights = self.places.flatten(0, 2), weights.flatten(0, 2)
            bags = F.embedding_bag(places, self.outputs, per_sample_weights=weights, mode="sum")
            return bags.view(*self.places.shape[:3], -1)
        found = self.outputs.index_select(0, self.places.flatten()).view(*self.places.shape, -1)
        return (weights.unsqueeze(-2) @ found).squeeze(-2)


class _Tiles(NamedTuple):
    """Attributes.

    pairs: Pair at every place of every tile, and the number of pairs at empty places, [tiles pairs].
    clusters: Cluster of each tile, counted through all heads.
    places: Place of every pair, and the number of places where it has none.
    """

    pairs: Tensor
    clusters: Tensor
    places: Tensor


def open_clusters(q: Tensor, chosen: Tensor, clusters: Clusters) -> Opened:
    """Softmax of every query over each cluster that it has chosen.

    Args:
        q: [batch kv_heads rows head_dim].
        chosen: Clusters of each query, or the number of clusters for none, [batch kv_heads rows probes].
    """
    (batch, heads, number, size, value_dim), probes = clusters.v.shape, chosen.shape[3]
    first = torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1) * number
    every = torch.where(chosen < number, chosen + first, batch * heads * number)
    tiles = _tiles(every.flatten(), batch * heads * number)
    rows, k, v = q.flatten(0, 2), clusters.k.flatten(0, 2), clusters.v.flatten(0, 2)
    bias = torch.zeros_like(clusters.counted, dtype=q.dtype).masked_fill(~clusters.counted, MASKED)
    bias = bias.flatten(0, 2)[:, None, :]
    numbers = (_TILE + size) * (rows.shape[1] + value_dim) + _TILE * size
    step = max(_STEP // numbers, 1) if tuned_for_cpu(q) else held(numbers)
    fused = fusible(rows, k, v)
    attend = _fused if fused else _softmax
    # Pairs of no cluster read the place after the last tile.
    joined = rows.new_zeros(tiles.pairs.numel() + 1, value_dim) if fused else None
    outputs, log_sums = [], []
    for begin, (pairs, of) in enumerate(
        zip(tiles.pairs.split(step), tiles.clusters.split(step), strict=True)
    ):
        members = rows.index_select(0, (pairs // probes).clamp_max(len(rows) - 1).flatten())
        out, log_sum = attend(
            members.unflatten(0, pairs.shape), *(x.index_select(0, of) for x in (k, v, bias))
        )
        log_sums.append(log_sum.flatten())
        if joined is None:
            outputs.append(out.flatten(0, 1))
        else:
            joined[begin * step * _TILE :][: pairs.numel()] = out.flatten(0, 1)
    if joined is None:
        joined = torch.cat([*outputs, rows.new_zeros(1, value_dim)])
    log_sum = torch.cat([*log_sums, rows.new_full((1,), MASKED)])
    return Opened(
        joined, tiles.places.view(chosen.shape), log_sum.index_select(0, tiles.places).view(chosen.shape)
    )


def fusible(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the fused kernel of the CPU serves, which has no gradients of the log-sum-exps."""
    eager = not torch.compiler.is_compiling() and not transformed(q, k, v)
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return eager and not trained and q.shape[-1] == v.shape[-1] and cpu_flash.available(q, k, v)


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """`_softmax` by the fused kernel of the CPU."""
    out, log_sum = cpu_flash.attend(q[:, None], k[:, None], v[:, None], bias[:, None], 1.0)
    return out.squeeze(1), log_sum.squeeze(1)


def _softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of the rows of each tile over the keys of its cluster, and its log-sum-exps [tiles pairs]."""
    scores = torch.baddbmm(bias, q, k.mT)
    log_sum = scores.logsumexp(dim=2, keepdim=True)
    return (scores - log_sum).exp() @ v, log_sum.squeeze(2)


@torch.no_grad()
def _tiles(chosen: Tensor, number: int) -> _Tiles:
    """Tiles of the pairs, from the cluster of each pair, [pairs] in 0 … number; the last means none."""
    pairs = chosen.numel()
    clusters, pair = torch.sort(chosen, stable=True)
    begins = torch.searchsorted(clusters, torch.arange(number + 1, device=chosen.device))
    tiles = (begins.diff() + _TILE - 1) // _TILE
    ends = tiles.cumsum(dim=0)
    # The host asks for the number of tiles where this costs nothing, and bounds it elsewhere.
    most = pairs // _TILE + min(number, pairs)
    if tuned_for_cpu(chosen) and not torch.compiler.is_compiling() and not transformed(chosen):
        most = max(int(ends[-1]), 1)
    rank = torch.arange(pairs, device=chosen.device) - begins[clusters]
    place = (ends - tiles)[clusters.clamp_max(number - 1)] * _TILE + rank
    place = place.masked_fill(clusters == number, most * _TILE)
    at = place.new_full((most * _TILE + 1,), pairs).scatter(0, place, pair)[:-1]
    of = torch.searchsorted(ends, torch.arange(most, device=chosen.device), right=True)
    places = torch.empty_like(place).scatter(0, pair, place)
    return _Tiles(at.view(most, _TILE), of.clamp_max(number - 1), places)
