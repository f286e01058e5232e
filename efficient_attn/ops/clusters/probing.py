"""Softmax over near keys, over the far keys in clusters that a query opens, and over summaries of the others.

Far keys lie in dyadic runs (`runs.py`), and every run is cut into clusters of equal size by a tree of its own
(`trees.py`), a causal one from its keys alone. A query reads every key once: in its slice, in a cluster that
it opens, or in the summary of a cluster.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.attention import by_heads, from_first_real, turn_back
from efficient_attn.ops.clusters.closed import limits_of, read_closed, steps
from efficient_attn.ops.clusters.far import clusters_of, summarise
from efficient_attn.ops.clusters.near import MASKED, Slices, in_order, near_slices
from efficient_attn.ops.clusters.opened import open_clusters
from efficient_attn.ops.clusters.runs import Stage, causal_stages, full_stages, places, reach
from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.softmax.partial import partial_softmax
from efficient_attn.shapes import KeyMask, Keys, Queries, Values


class Task(NamedTuple):
    """Keys and values, and the options of a call.

    Attributes:
        real: bool [batch tokens].
        counted: Keys that belong to clusters, bool [batch tokens].
        probes: Largest number of clusters that a query opens, or more than there are.
        limits: Number of clusters that the queries of each head open, [kv_heads group]; None: `probes`.
    """

    k: Tensor
    v: Tensor
    real: Tensor
    counted: Tensor
    probes: int
    limits: Tensor | None
    causal: bool


def probe_clusters(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    block: int,
    first: int,
    clusters: int,
    probes: Sequence[int],
    causal: bool,
    key_mask: KeyMask | None,
    read: Callable[[Task, Tensor, Stage], Tensor] | None = None,
) -> Tensor:
    """Softmax attention that reads the far keys of some clusters one by one, and the others as summaries.

    Args:
        block: Number of queries that share a slice, and of keys in a cluster; doubled where there would be
            more than `clusters`.
        first: Number of global tokens at the beginning of the sequence, which every query reads.
        clusters: Largest number of clusters per query; causal: at least 2.
        probes: Number of clusters that the queries of each head open; all, if not fewer than `clusters`.
        read: Function that returns the rows of a stage; None: `_read`.
    """
    plan = partial(causal_stages if causal else full_stages, block=block, clusters=clusters, first=first)
    stages = plan(k.shape[2])
    some = partial(
        _some_heads,
        scale=scale,
        stages=stages,
        clusters=clusters,
        causal=causal,
        key_mask=key_mask,
        read=read or _read,
    )
    opened = [one if one < clusters else k.shape[2] for one in probes]
    # Causal stages have queries of their own, and so smaller tensors.
    return by_heads(some, q, k, v, opened, stages=len(stages) if causal else 1)


def _some_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    probes: Sequence[int],
    *,
    scale: float,
    stages: list[Stage],
    clusters: int,
    causal: bool,
    key_mask: Tensor | None,
    read: Callable[[Task, Tensor, Stage], Tensor],
) -> Tensor:
    dtype, tokens, before = q.dtype, k.shape[2], k.shape[2] - q.shape[2]
    # Queries are the last positions of the keys, and a mask may move them to any position.
    stages = [
        one for one in (stage.since(before * (key_mask is None)) for stage in stages) if one.begin < one.end
    ]
    start = min(stage.begin for stage in stages)
    q = F.pad(upcast(q) * scale, (0, 0, before - start, 0))
    q, k, v, real, turned = from_first_real(
        q, upcast(zero_masked(k, key_mask)), upcast(zero_masked(v, key_mask)), key_mask
    )
    position = torch.arange(tokens, device=k.device)
    most, limits = limits_of(probes, k)
    task = Task(k, v, real, real & (position >= stages[0].layout.first), most, limits, causal)
    if causal:
        output = torch.cat(
            [read(task, q[:, :, one.begin - start : one.end - start], one) for one in stages], dim=2
        )
    elif turned is None:
        output = read(task, q, stages[-1])
    else:
        # The number of real tokens decides, so that padding changes no cluster.
        extent = ((position + 1) * real).amax(dim=1)[:, None, None, None]
        output = read(task, q, stages[-1])
        for stage in reversed(stages[:-1]):
            output = torch.where(extent <= reach(stage, clusters), read(task, q, stage), output)
    output = turn_back(output, turned)
    if turned is not None and causal:
        # Padding before the first real token was rotated to the end.
        output = output.masked_fill((position < turned[:, None])[:, None, :, None], 0.0)
    return output[:, :, before - start :].to(dtype)


def _read(task: Task, q: Tensor, stage: Stage) -> Tensor:
    """Outputs of the queries of a stage, [batch heads tokens value_dim]."""
    (_, _, tokens, head_dim), value_dim = task.k.shape, task.v.shape[3]
    layout, size = stage.layout, stage.layout.block
    slices = near_slices(q, task.k, task.v, task.real, layout, past=task.causal, begin=stage.begin // size)
    visible = None
    if task.causal:
        visible = torch.ones(size, 2 * size, dtype=torch.bool, device=q.device).tril(size)
        visible = F.pad(visible, (0, min(layout.first, tokens)), value=True)
    runs, read = places(stage.runs(tokens, task.causal), -(-tokens // size))
    if not runs:
        out, _ = _softmax(slices, visible)
        return in_order(out[..., :value_dim], q, layout)
    clusters = clusters_of(task.k, task.v, task.counted, runs, size, shared=not task.causal)
    rows, summaries = slices.rows, summarise(clusters, slices.rows.shape[4])
    none = clusters.k.shape[2]
    # The rows of the heads of a group follow one another.
    limits = None if task.limits is None else task.limits.repeat_interleave(size, dim=1)
    plan = list(steps(read, stage.begin // size, rows, none))
    found = [
        (*_softmax(some, visible), *read_closed(some.rows, summaries, step, task.probes, limits))
        for some, step in zip(slices.split([step.blocks for step in plan]), plan, strict=True)
    ]
    *parts, choices = zip(*found, strict=True)
    near, near_sum, closed, closed_sum = (torch.cat(x, dim=2) for x in parts)
    most = max(x.shape[4] for x in choices)
    chosen = torch.cat([F.pad(x, (0, most - x.shape[4]), value=none) for x in choices], dim=2)
    opened, opened_sum = (
        x.unflatten(2, rows.shape[2:4])
        for x in open_clusters(rows[..., :head_dim].flatten(2, 3), chosen.flatten(2, 3), clusters)
    )
    top = torch.maximum(torch.maximum(near_sum, closed_sum), opened_sum).detach()
    outs = (near[..., :value_dim], closed[..., :value_dim], opened)
    weights = [(x - top).exp() for x in (near_sum, closed_sum, opened_sum)]
    merged = sum(weight * out for weight, out in zip(weights, outs, strict=True)) / sum(weights)
    return in_order(merged, q, layout)


def _softmax(slices: Slices, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over near keys, and its log-sum-exps [… 1]."""
    (k, v), bias = slices.near(), None
    if visible is not None:
        visible = F.pad(visible, (0, k.shape[3] - visible.shape[1]), value=True)
        visible = visible.repeat(slices.rows.shape[3] // len(visible), 1)
        bias = torch.zeros_like(visible, dtype=k.dtype).masked_fill(~visible, MASKED)
    q, k, v = (x.flatten(0, 1) for x in (slices.rows, k, v))
    out, log_sum = partial_softmax(q, k, v, bias)
    return out.view(*slices.rows.shape), log_sum.view(*slices.rows.shape[:4], 1)
