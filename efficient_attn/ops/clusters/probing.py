"""Softmax over near keys, over the far keys in clusters that a query opens, and over summaries of the others.

Far keys lie in dyadic runs (`runs.py`), and every run is cut into clusters of equal size by a tree of its own
(`trees.py`), a causal one from its keys alone. A query reads every key once: in its slice, in a cluster that
it opens, or in the summary of a cluster.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.attention import by_heads
from efficient_attn.ops.clusters.closed import read_closed, steps
from efficient_attn.ops.clusters.far import clusters_of, summarise
from efficient_attn.ops.clusters.near import MASKED, Slices, in_order, near_slices
from efficient_attn.ops.clusters.opened import open_clusters
from efficient_attn.ops.clusters.placed import after, placed_queries, without
from efficient_attn.ops.clusters.runs import Stage, causal_stages, full_stages, places, reach
from efficient_attn.ops.dtypes import upcast
from efficient_attn.ops.softmax.partial import partial_softmax
from efficient_attn.shapes import KeyMask, Keys, Queries, Values

# Rows of a block at a time: the scores of all rows of long blocks would grow with the square of the tokens.
_ROWS = 128


class Task(NamedTuple):
    """Keys and values, and the options of a call.

    Attributes:
        real: bool [batch tokens].
        counted: Keys that belong to clusters, bool [batch tokens].
        probes: Number of clusters that a query opens, or more than there are.
    """

    k: Tensor
    v: Tensor
    real: Tensor
    counted: Tensor
    probes: int
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
    probes: int,
    causal: bool,
    key_mask: KeyMask | None,
    positions: Sequence[range] | None = None,
) -> Tensor:
    """Softmax attention that reads the far keys of some clusters one by one, and the others as summaries.

    Args:
        block: Number of queries that share a slice, and of keys in a cluster; doubled where there would be
            more than `clusters`.
        first: Number of global tokens at the beginning of the sequence, which every query reads.
        clusters: Largest number of clusters per query; causal: at least 2.
        probes: Number of clusters that a query opens, at least 1; all, if not fewer than `clusters`.
        positions: See `Placed`.
    """
    plan = partial(causal_stages if causal else full_stages, block=block, clusters=clusters, first=first)
    stages = plan(k.shape[2])
    some = partial(
        _some_heads,
        scale=scale,
        stages=stages,
        clusters=clusters,
        probes=probes if probes < clusters else k.shape[2],
        causal=causal,
        key_mask=key_mask,
        positions=positions,
    )
    # Causal stages have queries of their own, and so smaller tensors.
    return by_heads(some, q, k, v, stages=len(stages) if causal else 1)


def _some_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    stages: list[Stage],
    clusters: int,
    probes: int,
    causal: bool,
    key_mask: Tensor | None,
    positions: Sequence[range] | None,
) -> Tensor:
    placed = placed_queries(upcast(q) * scale, k, v, key_mask, positions)
    counted = placed.counted(stages[0].layout.first)
    task = Task(placed.k, placed.v, placed.real, counted, probes, causal)
    # The number of real tokens decides, so that padding changes no cluster.
    extent = (torch.arange(1, k.shape[2] + 1, device=k.device) * placed.real).amax(dim=1)
    extent = extent[:, None, None, None]
    if not (causal or key_mask is not None):
        stages = stages[-1:]
    outs = []
    for rows, own in placed.runs():
        found = [one for one in stages if max(one.begin, own.start) < min(one.end, own.stop)]
        parts = [_rows(task, rows, own, stage) for stage in found]
        if causal:
            outs.append(torch.cat(parts, dim=2))
            continue
        output = parts.pop()
        for stage, out in zip(found[-2::-1], parts[::-1], strict=True):
            output = torch.where(extent <= reach(stage, clusters), out, output)
        outs.append(output)
    return placed.restored(outs, causal=causal).to(q.dtype)


def _rows(task: Task, q: Tensor, own: range, stage: Stage) -> Tensor:
    """Outputs of the queries of a stage, out of consecutive ones at the positions `own`."""
    stage = stage.since(own.start)._replace(end=min(stage.end, own.stop))
    before = max(own.start - stage.begin, 0)
    rows = after(q[:, :, max(stage.begin - own.start, 0) : stage.end - own.start], before)
    return without(_read(task, rows, stage), before)


def _read(task: Task, q: Tensor, stage: Stage) -> Tensor:
    """Outputs of the queries of a stage, [batch heads tokens value_dim]."""
    (_, _, tokens, head_dim), value_dim = task.k.shape, task.v.shape[3]
    layout, size = stage.layout, stage.layout.block
    slices = near_slices(q, task.k, task.v, task.real, layout, past=task.causal, begin=stage.begin // size)
    runs, read = places(stage.runs(tokens, task.causal), -(-tokens // size))
    if not runs:
        out, _ = _softmax(slices, size, causal=task.causal)
        return in_order(out[..., :value_dim], q, layout)
    clusters = clusters_of(task.k, task.v, task.counted, runs, size, shared=not task.causal)
    rows, summaries = slices.rows, summarise(clusters, slices.rows.shape[4])
    none = clusters.k.shape[2]
    plan = list(steps(read, stage.begin // size, rows, none))
    found = [
        (
            *_softmax(some, size, causal=task.causal),
            *read_closed(some.rows, summaries, step, task.probes),
        )
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


def _softmax(slices: Slices, size: int, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Softmax over near keys, and its log-sum-exps [… 1].

    Args:
        size: Number of rows of a head in a block; if causal, a slice is the block before and the block.
    """
    (k, v), rows = slices.near(), slices.rows.unflatten(3, (-1, size))
    outs, log_sums = [], []
    biases: dict[int, Tensor] = {}
    for begin in range(0, size, _ROWS):
        end = min(begin + _ROWS, size)
        q = rows[:, :, :, :, begin:end].flatten(3, 4)
        late_k, late_v, bias, start = k, v, None, 0
        if causal:
            # Keys from `start` on have a bias, which parts share; all rows see the keys before.
            start = 0 if size <= _ROWS else size + begin
            if end - begin not in biases:
                later = q.new_full((end - begin, end - begin), MASKED).triu(1).repeat(rows.shape[3], 1)
                biases[end - begin] = F.pad(later, (size + begin - start, k.shape[3] - 2 * size))
            bias = biases[end - begin]
        if start:
            late_k, late_v = (
                torch.cat([x[:, :, :, start : size + end], x[:, :, :, 2 * size :]], dim=3) for x in (k, v)
            )
        out, log_sum = _over(q, late_k, late_v, bias)
        if start:
            early, early_sum = _over(q, k[:, :, :, :start], v[:, :, :, :start], None)
            late_sum, log_sum = log_sum, torch.logaddexp(log_sum, early_sum)
            out = (late_sum - log_sum).exp() * out + (early_sum - log_sum).exp() * early
        outs.append(out.unflatten(3, (rows.shape[3], -1)))
        log_sums.append(log_sum.unflatten(3, (rows.shape[3], -1)))
    return torch.cat(outs, dim=4).flatten(3, 4), torch.cat(log_sums, dim=4).flatten(3, 4)


def _over(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`partial_softmax` of blocks [batch kv_heads blocks …], with log-sum-exps [… 1]."""
    out, log_sum = partial_softmax(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), bias)
    return out.view(*q.shape[:4], -1), log_sum.view(*q.shape[:4], 1)
