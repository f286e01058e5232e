"""Sorted dyadic runs, which decoding keeps from block to block, with the summaries of their clusters."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.far import clusters_at, summarise
from efficient_attn.ops.clusters.runs import Stage, before
from efficient_attn.ops.clusters.trees import sort_runs
from efficient_attn.ops.dtypes import upcast, upcast_dtype


class SortedRuns(NamedTuple):
    """Sorted positions of some runs, and the summaries of their clusters.

    Attributes:
        order: Positions of the keys, each run in the order of its tree, [batch kv_heads keys].
        k: As of `Summaries`, which the next two are too; no clusters have no empty one either.
    """

    order: Tensor
    k: Tensor
    half_variance: Tensor
    v: Tensor

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return max(self.k.shape[2] - 1, 0)

    def part(self, rows: slice, keys: int, clusters: int) -> "SortedRuns":
        """The runs of some batch entries, without padding."""
        order, *summaries = (x[rows] for x in self)
        return SortedRuns(order[:, :, :keys], *(x[:, :, : clusters + 1] for x in summaries))


def advanced(runs: SortedRuns, k: Tensor, v: Tensor, counted: Tensor, stage: Stage, block: int) -> SortedRuns:
    """Runs before the slice of the first block of a stage, from the runs of an earlier block.

    Args:
        k: [batch kv_heads tokens head_dim], where the first key of every batch entry is real.
        counted: Keys that belong to clusters, bool [batch tokens].
        block: Number of keys in the smallest clusters.
    """
    size, far, held = stage.layout.block, far_keys(stage), runs.order.shape[2]
    if held == far == runs.clusters * size:
        return runs
    # Runs are binary digits of their number of keys, so that equal leading digits are equal runs.
    other = (held // block ^ far // block).bit_length()
    low, order = (far // block >> other << other) * block, runs.order
    if low < far:
        new = sort_runs(upcast(k[:, :, low:far]), counted[:, low:far], before((far - low) // size), size)
        order = torch.cat([order[:, :, :low], new + low], dim=2)
    # Larger clusters are other ones in the same order.
    low = low if held == runs.clusters * size else 0
    keys, values = (upcast(x[:, :, low:far]) for x in (k, v))
    found = clusters_at(keys, values, counted[:, low:far], order[:, :, low:] - low, size)
    parts = zip(runs[1:], summarise(found, _width(k, v)), strict=True)
    return SortedRuns(order, *(torch.cat([old[:, :, : low // size], new], dim=2) for old, new in parts))


def no_runs(k: Tensor, v: Tensor) -> SortedRuns:
    """No runs of keys and values."""
    # A view without elements would keep the memory of the caller's keys alive.
    none = k.new_zeros(*k.shape[:2], 0, k.shape[3], dtype=upcast_dtype(k.dtype))
    wide = none.new_zeros(*none.shape[:3], _width(k, v))
    return SortedRuns(none[..., 0].long(), wide, none, wide)


def joined(parts: list[SortedRuns]) -> SortedRuns:
    """Runs of all batch entries, padded to the longest."""
    if len(parts) == 1:
        return parts[0]
    longest = [max(x.shape[2] for x in of) for of in zip(*parts, strict=True)]
    order, *summaries = (
        [F.pad(x, (0, 0) * (x.ndim - 3) + (0, most - x.shape[2])) for x in of]
        for of, most in zip(zip(*parts, strict=True), longest, strict=True)
    )
    return SortedRuns(torch.cat(order), *map(torch.cat, summaries))


def far_keys(stage: Stage) -> int:
    """Number of keys before the slice of the first block of a stage."""
    return max(stage.begin - stage.layout.block, 0)


def _width(k: Tensor, v: Tensor) -> int:
    """Number of columns of keys with their score bias, and of values."""
    return max(k.shape[3], v.shape[3]) + 1
