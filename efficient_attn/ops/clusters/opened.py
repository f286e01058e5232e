"""Softmax of queries over the keys of the clusters that they open, with the log-sum-exp of each pair.

Pairs of a query and a cluster are sorted by cluster and cut into tiles of equally many pairs of one cluster,
so that all tiles are one batched product, whichever clusters are chosen.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.clusters.far import Clusters
from efficient_attn.ops.clusters.near import MASKED
from efficient_attn.ops.operators import transformed
from efficient_attn.ops.paths import held, tuned_for_cpu

# Pairs in a tile, and numbers per step on the CPU, so that the tiles of a step stay in cache.
_TILE, _STEP = 32, 1 << 19


class _Tiles(NamedTuple):
    """Attributes.

    pairs: Pair at every place of every tile, and the number of pairs at empty places, [tiles pairs].
    clusters: Cluster of each tile, counted through all heads.
    places: Place of every pair, and the number of places where it has none.
    """

    pairs: Tensor
    clusters: Tensor
    places: Tensor


def open_clusters(
    q: Tensor, chosen: Tensor, clusters: Clusters, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of every query over each cluster that it has chosen.

    Args:
        q: [batch kv_heads rows head_dim].
        chosen: Clusters of each query, or the number of clusters for none, [batch kv_heads rows probes].
        k: [batch kv_heads tokens head_dim]; v: [batch kv_heads tokens value_dim].

    Returns:
        [batch kv_heads rows probes value_dim] and [batch kv_heads rows probes]; 0 and the bias of a masked
        key for no cluster.
    """
    number, probes, value_dim = clusters.keys.shape[2], chosen.shape[3], v.shape[3]
    heads = torch.arange(k.shape[0] * k.shape[1], device=q.device).view(*k.shape[:2], 1, 1)
    every = torch.where(chosen < number, chosen + heads * number, heads.numel() * number)
    tiles = _tiles(every.flatten(), heads.numel() * number)
    rows, keys = q.flatten(0, 2), (clusters.keys + heads * k.shape[2]).flatten(0, 2)
    bias = (
        torch.zeros_like(clusters.counted, dtype=q.dtype).masked_fill(~clusters.counted, MASKED).flatten(0, 2)
    )
    k, v = k.flatten(0, 2), v.flatten(0, 2)
    numbers = (_TILE + keys.shape[1]) * (rows.shape[1] + value_dim) + _TILE * keys.shape[1]
    step = max(_STEP // numbers, 1) if tuned_for_cpu(q) else held(numbers)
    outputs, log_sums = [], []
    for pairs, of in zip(tiles.pairs.split(step), tiles.clusters.split(step), strict=True):
        members = keys[of]
        scores = torch.baddbmm(
            bias[of][:, None, :], rows[(pairs // probes).clamp_max(len(rows) - 1)], k[members].mT
        )
        log_sum = scores.logsumexp(dim=2, keepdim=True)
        outputs.append((scores - log_sum).exp() @ v[members])
        log_sums.append(log_sum)
    places = tiles.places.clamp_max(tiles.pairs.numel() - 1)
    none = (tiles.places == tiles.pairs.numel()).view(chosen.shape)
    out = torch.cat(outputs).flatten(0, 1)[places].view(*chosen.shape, value_dim)
    log_sum = torch.cat(log_sums).flatten()[places].view(chosen.shape)
    return out.masked_fill(none[..., None], 0.0), log_sum.masked_fill(none, MASKED)


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
