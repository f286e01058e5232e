"""Clusters of far keys, with a summary of each: mass, mean key, spread and mean value."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.near import MASKED
from efficient_attn.ops.clusters.runs import Run
from efficient_attn.ops.clusters.trees import sort_runs


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
    tokens, found = k.shape[2], positions.unflatten(2, (-1, size))
    keys = found.clamp_max(tokens - 1)
    real = counted[:, None, None].expand(*keys.shape[:3], tokens).gather(3, keys)
    heads = torch.arange(k.shape[0] * k.shape[1], device=k.device) * tokens
    at = keys + heads.view(*k.shape[:2], 1, 1)
    rows, values = (x.flatten(0, 2).index_select(0, at.flatten()).unflatten(0, at.shape) for x in (k, v))
    return Clusters(rows, values, real & (found < tokens))


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
