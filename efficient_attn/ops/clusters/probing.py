"""Softmax over near keys, over the far keys in clusters that a query opens, and over summaries of the others.

Far keys lie in dyadic runs (`runs.py`), and every run is cut into clusters of equal size by a tree of its own
(`trees.py`), so that clusters depend on their keys alone. A query reads every key once: in its slice, in a
cluster that it opens, or in the summary of a cluster.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.attention import by_heads, from_first_real, turn_back
from efficient_attn.ops.clusters.far import Summaries, clusters_of, summarise
from efficient_attn.ops.clusters.near import MASKED, Slices, in_order, near_slices
from efficient_attn.ops.clusters.opened import open_clusters
from efficient_attn.ops.clusters.runs import Stage, causal_stages, full_stages, places, reach
from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.paths import held, tuned_for_cpu
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values

# A query opens the clusters with the largest mean score plus this many standard deviations of the scores of
# the keys: a single key with a high score is far from the mean of its cluster.
_DEVIATIONS = 3.0
# Numbers per step on the CPU in the scores and summaries of some blocks, so that they stay in cache.
_STEP = 1 << 19


class _Task(NamedTuple):
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
) -> Output:
    """Softmax attention that reads the far keys of some clusters one by one, and the others as summaries.

    Args:
        block: Number of queries that share a slice, and of keys in a cluster; doubled where there would be
            more than `clusters`.
        first: Number of global tokens at the beginning of the sequence, which every query reads.
        clusters: Largest number of clusters per query; causal: at least 2.
        probes: Number of clusters that the queries of each head open; all, if not fewer than `clusters`.
    """
    plan = partial(causal_stages if causal else full_stages, block=block, clusters=clusters, first=first)
    some = partial(
        _some_heads,
        scale=scale,
        stages=plan(k.shape[2]),
        clusters=clusters,
        causal=causal,
        key_mask=key_mask,
    )
    return by_heads(some, q, k, v, [one if one < clusters else k.shape[2] for one in probes])


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
    most, limits = max(max(probes), 1), None
    if min(probes) < most:
        limits = torch.tensor(probes, device=k.device).view(k.shape[1], -1)
    task = _Task(k, v, real, real & (position >= stages[0].layout.first), most, limits, causal)
    if causal:
        output = torch.cat(
            [_read(task, q[:, :, one.begin - start : one.end - start], one) for one in stages], dim=2
        )
    elif turned is None:
        output = _read(task, q, stages[-1])
    else:
        # The number of real tokens decides, so that padding changes no cluster.
        extent = ((position + 1) * real).amax(dim=1)[:, None, None, None]
        output = _read(task, q, stages[-1])
        for stage in reversed(stages[:-1]):
            output = torch.where(extent <= reach(stage, clusters), _read(task, q, stage), output)
    output = turn_back(output, turned)
    if turned is not None and causal:
        # Padding before the first real token was rotated to the end.
        output = output.masked_fill((position < turned[:, None])[:, None, :, None], 0.0)
    return output[:, :, before - start :].to(dtype)


def _read(task: _Task, q: Tensor, stage: Stage) -> Tensor:
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
    clusters = clusters_of(task.k, task.v, task.counted, runs, size)
    rows, summaries = slices.rows, summarise(clusters, slices.rows.shape[4])
    # The summary after the last cluster is of none.
    none, most = clusters.k.shape[2], max(map(len, read))
    table = torch.tensor([one + [none] * (most - len(one)) for one in read], device=q.device)
    group = _group(rows, most)
    # The rows of the heads of a group follow one another.
    limits = None if task.limits is None else task.limits.repeat_interleave(size, dim=1)[:, None, :, None]
    parts = zip(slices.split(group), table.split(group), strict=True)
    found = [_choose(some, visible, summaries, one, task.probes, limits) for some, one in parts]
    out, log_sum, chosen = (torch.cat(x, dim=2) for x in zip(*found, strict=True))
    opened, log_sums = open_clusters(rows[..., :head_dim].flatten(2, 3), chosen.flatten(2, 3), clusters)
    opened, log_sums = (x.unflatten(2, rows.shape[2:4]) for x in (opened, log_sums))
    top = torch.maximum(log_sum, log_sums.amax(dim=-1, keepdim=True)).detach()
    weight, weights = (log_sum - top).exp(), (log_sums - top).exp()
    merged = weight * out[..., :value_dim] + (weights.unsqueeze(-2) @ opened).squeeze(-2)
    return in_order(merged / (weight + weights.sum(dim=-1, keepdim=True)), q, layout)


def _group(rows: Tensor, clusters: int) -> int:
    """Number of blocks per step, from the size of the scores and summaries of one block."""
    near = 3 * rows.shape[3]
    numbers = rows.shape[0] * rows.shape[1] * (clusters + near) * (rows.shape[3] + 3 * rows.shape[4])
    return max(1, _STEP // numbers) if tuned_for_cpu(rows) else held(numbers)


def _choose(
    slices: Slices,
    visible: Tensor | None,
    summaries: Summaries,
    read: Tensor,
    probes: int,
    limits: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over near keys and closed clusters, its log-sum-exps, and the clusters that are opened.

    Args:
        limits: Number of clusters that each row opens, [kv_heads 1 rows 1]; None: `probes`.
    """
    rows, far = slices.rows, summaries.of(read)
    mean = rows @ far.k.mT
    variance = rows[..., : far.variance.shape[4]].square() @ far.variance.mT
    with torch.no_grad():
        bound = torch.add(mean, variance.sqrt(), alpha=_DEVIATIONS)
        best, columns = bound.topk(min(probes, bound.shape[4]), dim=-1, sorted=limits is not None)
        closed = best < MASKED / 2
        if limits is not None:
            closed |= torch.arange(closed.shape[4], device=closed.device) >= limits
        chosen = read[:, None].expand(*bound.shape).gather(4, columns)
        chosen = chosen.masked_fill(closed, summaries.k.shape[2] - 1)
    if limits is None:
        mean = mean.scatter(4, columns, MASKED)
    else:
        mean = mean.scatter(4, columns, mean.gather(4, columns).masked_fill(~closed, MASKED))
    # 1 + a + a²/2 for half the variance a: the mass to second order, for the spread of the scores.
    mass = torch.add(1, variance, alpha=0.5).square() / 2 + 0.5
    # An opened cluster is no reference of the exponents, since the other weights could all vanish.
    return *_softmax(slices, visible, mean, mass, far.v), chosen


def _softmax(
    slices: Slices,
    visible: Tensor | None,
    mean: Tensor | None = None,
    mass: Tensor | None = None,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax over near keys, and clusters of some mean scores and masses, and its log-sum-exps [… 1]."""
    k, v = slices.near()
    near = slices.rows @ k.mT
    if visible is not None:
        visible = F.pad(visible, (0, k.shape[3] - visible.shape[1]), value=True)
        near = near.masked_fill(~visible.repeat(near.shape[3] // len(visible), 1), MASKED)
    top = near.detach().amax(dim=4, keepdim=True)
    if mean is None or mass is None or values is None:
        weights = (near - top).exp()
        total = weights.sum(dim=4, keepdim=True)
        return weights @ v / total, top + total.log()
    top = torch.maximum(top, mean.detach().amax(dim=4, keepdim=True))
    weights, far = (near - top).exp(), (mean - top).exp() * mass
    total = weights.sum(dim=4, keepdim=True) + far.sum(dim=4, keepdim=True)
    return (weights @ v + far @ values) / total, top + total.log()
