"""Incremental decoding with opened clusters: a KV cache, and the sorted runs before the last slice.

A block reads the runs before its slice, which are sorted once for all tokens of the block. Keys and values
stay in the order of the tokens: sorted positions take 8 bytes for each key of a head, a second copy of keys
and values as much as the cache.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.probing import Step, probe_clusters, read_closed
from efficient_attn.ops.clusters.slices import MASKED, alike
from efficient_attn.ops.clusters.trees import (
    Stage,
    Summaries,
    before,
    causal_stages,
    clusters_at,
    sort_runs,
    summarise,
)
from efficient_attn.ops.dtypes import upcast, upcast_dtype
from efficient_attn.ops.paths import tuned_for_cpu
from efficient_attn.ops.softmax.kv_cache import KVCache, append_tokens, mask_of
from efficient_attn.ops.softmax.partial import eager
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values


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


def advanced(runs: SortedRuns, k: Tensor, v: Tensor, counted: Tensor, stage: Stage) -> SortedRuns:
    """Runs before the slice of the first block of a stage: `runs`, if they are, or sorted anew.

    Args:
        k: [batch kv_heads tokens head_dim], where the first key of every batch entry is real.
        counted: Keys that belong to clusters, bool [batch tokens].
    """
    size, far = stage.layout.block, far_keys(stage)
    if runs.order.shape[2] == far == runs.clusters * size:
        return runs
    keys, values, counted = upcast(k[:, :, :far]), upcast(v[:, :, :far]), counted[:, :far]
    order = sort_runs(keys, counted, before(far // size), size)
    return SortedRuns(order, *summarise(clusters_at(keys, values, counted, order, size), _width(k, v)))


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


class ClusterCache(NamedTuple):
    """KV cache, and the runs that the block of the last token reads, counted from the first real token.

    Runs are empty after a call of many tokens; the next call of few tokens sorts them.

    Attributes:
        k: [batch kv_heads tokens head_dim], zero where masked.
        v: [batch kv_heads tokens value_dim], zero where masked.
        key_mask: bool [batch tokens], as of `KVCache`.
        order: Positions of the keys of the runs, each run in the order of its tree, [batch kv_heads keys].
        mean_k: `Summaries.k` of the clusters, [batch kv_heads clusters+1 width].
        half_variance: [batch kv_heads clusters+1 head_dim].
        mean_v: [batch kv_heads clusters+1 width].
    """

    k: Tensor
    v: Tensor
    key_mask: Tensor
    order: Tensor
    mean_k: Tensor
    half_variance: Tensor
    mean_v: Tensor


class _Task(NamedTuple):
    """Options of `probe_clusters`."""

    scale: float
    block: int
    first: int
    clusters: int
    probes: int

    def stages(self, tokens: int) -> list[Stage]:
        return causal_stages(tokens, block=self.block, clusters=self.clusters, first=self.first)

    def far(self, tokens: int) -> tuple[int, int]:
        """Number of keys before the slice of the last of some tokens, and of their clusters."""
        if tokens == 0:
            return 0, 0
        last = self.stages(tokens)[-1].since(tokens - 1)
        keys = far_keys(last)
        return keys, keys // last.layout.block


def extend_clusters(
    q: Queries,
    k: Keys,
    v: Values,
    state: ClusterCache | None,
    key_mask: KeyMask | None,
    *,
    scale: float,
    block: int,
    first: int,
    clusters: int,
    probes: int,
) -> tuple[Output, ClusterCache]:
    """`probe_clusters` of the tokens after a state, and the next state.

    At most as many tokens as a block has read only the clusters that they open; more are one causal pass,
    which sorts all runs. So does every call with a key mask where the host would have to wait for the first
    real token.
    """
    task = _Task(scale, block, first, clusters, probes)
    cache = append_tokens(None if state is None else KVCache(*state[:3]), k, v, key_mask)
    runs = no_runs(k, v) if state is None else SortedRuns(*state[3:])
    new, tokens, mask = q.shape[2], cache.k.shape[2], mask_of(cache)
    if q.shape[0] * new == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]), ClusterCache(*cache, *runs)
    # Elsewhere the host would have to wait for the mask.
    seen = mask is None or (tuned_for_cpu(mask) and eager(mask))
    if new > task.stages(tokens)[-1].layout.block or not seen:
        out = probe_clusters(q, cache.k, cache.v, **task._asdict(), causal=True, key_mask=mask)
        return out, ClusterCache(*cache, *no_runs(k, v))
    groups = [(slice(None), 0)] if mask is None else alike(mask)
    parts = [runs.part(rows, *task.far(max(tokens - new - start, 0))) for rows, start in groups]
    outs, later = [], list(parts)
    for number, (rows, start) in enumerate(groups):
        padding = min(max(start - tokens + new, 0), new)
        if padding == new:
            # Gradients of padding alone are zero, as of a full pass, and not absent.
            zero = sum(x[rows, ..., :0].sum() for x in (q, *cache[:2]))
            outs.append(q.new_zeros(*q[rows].shape[:3], v.shape[3]) + zero)
            continue
        some_k, some_v = (x[rows, :, start:] for x in cache[:2])
        some_mask = None if mask is None else mask[rows, start:]
        out, later[number] = _extended(q[rows, :, padding:], some_k, some_v, some_mask, parts[number], task)
        outs.append(F.pad(out, (0, 0, padding, 0)))
    same = all(old is new for old, new in zip(parts, later, strict=True))
    return torch.cat(outs), ClusterCache(*cache, *(runs if same else joined(later)))


def _extended(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, runs: SortedRuns, task: _Task
) -> tuple[Tensor, SortedRuns]:
    """Outputs, and the runs of the last block, where the first key of every batch entry is real.

    Args:
        k: Keys of all tokens, [batch kv_heads tokens head_dim].
        runs: Runs of an earlier block, or none.
    """
    tokens, done, group = k.shape[2], k.shape[2] - q.shape[2], q.shape[1] // k.shape[1]
    real = torch.ones(k.shape[0], tokens, dtype=torch.bool, device=k.device) if mask is None else mask
    counted = real & (torch.arange(tokens, device=k.device) >= task.first)
    probes = task.probes if task.probes < task.clusters else tokens
    # Queries at a time, which copy together about as many keys as there are.
    few = max(task.clusters // (group * probes), 1)
    outs, begin, scaled = [q.new_zeros(*q.shape[:2], 0, v.shape[3])], done, upcast(q) * task.scale
    while begin < tokens:
        stage = next(stage for stage in task.stages(tokens) if begin < stage.end).since(begin)
        end = min(begin + few, stage.begin + stage.layout.block, tokens)
        stage = stage._replace(end=end)
        runs = advanced(runs, k, v, counted, stage)
        out = _read(scaled[:, :, begin - done : end - done], k, v, real, counted, runs, stage, probes)
        outs.append(out.to(q.dtype))
        begin = end
    return torch.cat(outs, dim=2), runs


def _read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor,
    counted: Tensor,
    runs: SortedRuns,
    stage: Stage,
    probes: int,
) -> Tensor:
    """Outputs of the last queries of a stage that has one block, [batch heads queries value_dim]."""
    (_, heads, new, head_dim), value_dim, clusters = q.shape, v.shape[3], runs.clusters
    low, rows = far_keys(stage), q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    first = min(stage.layout.first, low)
    near_k, near_v, near_real = (
        torch.cat([x[:, :, :first], x[:, :, low : stage.end]], dim=2) for x in (k, v, real[:, None])
    )
    visible = near_real.new_ones(new, near_k.shape[2]).tril(near_k.shape[2] - new)
    visible = near_real[:, :, None] & visible.repeat(heads // k.shape[1], 1)
    scores = (rows @ upcast(near_k).mT).masked_fill(~visible, MASKED)
    if not clusters:
        return (scores.softmax(dim=3) @ upcast(near_v)).unflatten(2, (-1, new)).flatten(1, 2)
    wide = F.pad(F.pad(rows, (0, 1), value=1.0), (0, runs.k.shape[3] - head_dim - 1))
    step = Step(1, torch.arange(clusters, device=q.device)[None], None)
    closed, closed_sum, chosen = (
        x.squeeze(2) for x in read_closed(wide.unsqueeze(2), Summaries(*runs[1:]), step, probes)
    )
    # [batch kv_heads rows keys] positions of the keys of the opened clusters of every row
    of = chosen.clamp_max(clusters - 1).flatten(2)[..., None]
    positions = runs.order.unflatten(2, (clusters, -1))
    at = positions.gather(2, of.expand(*of.shape[:3], positions.shape[3])).flatten(2)
    hidden = ~counted[:, None].expand(-1, k.shape[1], -1).gather(2, at)
    hidden = hidden.view(*chosen.shape, -1) | (chosen == clusters)[..., None]
    far_k, far_v = (upcast(keys_at(x, at)).unflatten(2, (rows.shape[2], -1)) for x in (k, v))
    far = (rows.unsqueeze(3) @ far_k.mT).squeeze(3).masked_fill(hidden.flatten(3), MASKED)
    log_sum = torch.cat([scores, far], dim=3).logsumexp(dim=3, keepdim=True)
    total = torch.logaddexp(log_sum, closed_sum)
    out = (scores - total).exp() @ upcast(near_v) + (closed_sum - total).exp() * closed[..., :value_dim]
    out = out + ((far - total).exp().unsqueeze(3) @ far_v).squeeze(3)
    return out.unflatten(2, (-1, new)).flatten(1, 2)


def keys_at(x: Tensor, at: Tensor) -> Tensor:
    """Rows of `x` [batch heads tokens dim] at the positions of each head [batch heads rows]."""
    if not tuned_for_cpu(x):
        return x.gather(2, at[..., None].expand(*at.shape, x.shape[3]))
    # The CPU copies whole rows only from two dimensions.
    heads = [y.index_select(0, rows) for y, rows in zip(x.flatten(0, 1), at.flatten(0, 1), strict=True)]
    return torch.stack(heads).unflatten(0, x.shape[:2])
