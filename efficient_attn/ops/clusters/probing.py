"""Softmax over near keys, over the far keys in clusters that a query opens, and over summaries of the others.

Far keys lie in dyadic runs, and every run is cut into clusters of equal size by a tree of its own
(`trees.py`), a causal one from its keys alone. A query reads every key once: in its slice, in a cluster that
it opens, or in the summary of a cluster.

Neighbouring blocks read nearly the same clusters, so that a few blocks share one product with the summaries
of all clusters that one of them reads. Scores are [clusters queries]: a maximum or sum over clusters then
runs over whole rows of numbers.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.opened import open_clusters
from efficient_attn.ops.clusters.slices import (
    MASKED,
    Slices,
    after,
    aligned,
    alignment,
    by_heads,
    in_order,
    near_keys,
    near_slices,
    without,
)
from efficient_attn.ops.clusters.trees import (
    Clusters,
    Stage,
    Summaries,
    causal_stages,
    clusters_of,
    full_stages,
    index_tensor,
    places,
    reach,
    summarise,
)
from efficient_attn.ops.dtypes import upcast
from efficient_attn.ops.paths import step_capacity, tuned_for_cpu
from efficient_attn.ops.softmax.partial import partial_softmax
from efficient_attn.shapes import KeyMask, Keys, Queries, Values

# A query opens the clusters with the largest mean score plus this many standard deviations of the scores of
# the keys: a single key with a high score is far from the mean of its cluster.
_DEVIATIONS = 3.0
# Numbers in the scores of a step on the CPU, so that its few tensors of scores stay in cache.
_STEP = 1 << 17
# Rows of a block at a time: the scores of all rows of long blocks would grow with the square of the tokens.
_ROWS = 128


class Step(NamedTuple):
    """Blocks in groups of equally many that share products.

    Attributes:
        blocks: Number of blocks.
        read: Clusters of each group, [groups clusters].
        hidden: Clusters that a block does not read, bool [groups clusters blocks 1]; None: it reads all.
    """

    blocks: int
    read: Tensor
    hidden: Tensor | None


def steps(read: list[list[int]], first: int, rows: Tensor, none: int) -> Iterator[Step]:
    """Steps over all blocks.

    Args:
        read: Clusters that each block reads.
        first: Number of the first block.
        rows: [batch kv_heads blocks rows width].
        none: Number of the empty cluster.
    """
    most = max(map(len, read))
    numbers = rows.shape[0] * rows.shape[1] * rows.shape[3] * most
    if not tuned_for_cpu(rows):
        # Summaries are gathered for each block, so that all blocks of a step are one batched product.
        numbers = rows.shape[0] * rows.shape[1] * most * (rows.shape[3] + 3 * rows.shape[4])
        padded = tuple((*cells, *[none] * (most - len(cells))) for cells in read)
        table = index_tensor(padded, rows.device)
        yield from (Step(len(part), part, None) for part in table.split(step_capacity(numbers)))
        return
    share = 1 << (max(_STEP // numbers, 1)).bit_length() - 1
    # The past of block 1 + m · share … (m + 1) · share has the same runs, but for the shortest.
    cuts = [0, *(i for i in range(1, len(read)) if (first + i - 1) % share == 0), len(read)]
    for begin, end in pairwise(cuts):
        sets = [set(cells) for cells in read[begin:end]]
        union = sorted(set().union(*sets))
        hidden = None
        if any(len(cells) < len(union) for cells in sets):
            unread = [[[cluster not in cells] for cells in sets] for cluster in union]
            hidden = torch.tensor([unread], device=rows.device)
        yield Step(end - begin, torch.tensor([union or [none]], device=rows.device), hidden)


def read_closed(rows: Tensor, summaries: Summaries, step: Step, probes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax of the queries of a step over closed clusters, and the clusters that they open.

    Args:
        rows: Queries of the step, [batch kv_heads blocks rows width].
        probes: Number of clusters that a query opens, or more than there are.

    Returns:
        Outputs [batch kv_heads blocks rows width], log-sum-exps [… 1], and clusters [… probes]; the number
        of the empty cluster stands for none.
    """
    blocks, far = rows.shape[2] // len(step.read), summaries.of(step.read)
    q = rows.unflatten(2, (-1, blocks)).flatten(3, 4)
    mean = far.k @ q.mT  # [batch kv_heads groups clusters queries]
    half = far.half_variance @ q[..., : far.half_variance.shape[4]].square().mT
    if step.hidden is not None:
        mean = mean.unflatten(4, (blocks, -1)).masked_fill_(step.hidden, MASKED).flatten(4, 5)
    with torch.no_grad():
        bound = torch.add(mean, half.sqrt(), alpha=2**0.5 * _DEVIATIONS)
        columns = bound.topk(min(probes, bound.shape[3]), dim=3, sorted=False).indices
        closed = bound.gather(3, columns) < MASKED / 2
        chosen = step.read[..., None].expand(*bound.shape).gather(3, columns)
        chosen = chosen.masked_fill(closed, summaries.k.shape[2] - 1)
    # An opened cluster is no reference of the exponents, since the other weights could all vanish.
    mean = mean.scatter(3, columns, MASKED)
    top = mean.detach().amax(dim=3, keepdim=True)
    # 1 + a + a²/2 for half the variance a: the mass to second order, for the spread of the scores.
    weights = (mean - top).exp_() * torch.addcmul(half + 1, half, half, value=0.5)
    total = weights.sum(dim=3, keepdim=True)
    out = (weights.mT @ far.v) / total.mT
    log_sum = (top + total.log()).mT
    by_blocks = (x.unflatten(3, (-1, rows.shape[3])).flatten(2, 3) for x in (out, log_sum, chosen.mT))
    out, log_sum, chosen = by_blocks
    return out, log_sum, chosen


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
        positions: See `Alignment`.
    """
    plan = partial(causal_stages if causal else full_stages, block=block, clusters=clusters, first=first)
    stages = plan(k.shape[2])
    if not (causal or key_mask is not None):
        stages = stages[-1:]
    most = probes if probes < clusters else k.shape[2]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = alignment(upcast(q) * scale, k, v, key_mask, positions)
        counted = inputs.counted(stages[0].layout.first)
        task = Task(inputs.k, inputs.v, inputs.real, counted, most, causal)
        # The number of real tokens decides, so that padding changes no cluster.
        extent = (torch.arange(1, k.shape[2] + 1, device=k.device) * inputs.real).amax(dim=1)
        extent = extent[:, None, None, None]
        outs = []
        for rows, span in inputs.runs():
            overlapping = [x for x in stages if max(x.begin, span.start) < min(x.end, span.stop)]
            parts = [_rows(task, rows, span, stage) for stage in overlapping]
            if causal:
                outs.append(torch.cat(parts, dim=2))
                continue
            output = parts.pop()
            for stage, out in zip(overlapping[-2::-1], parts[::-1], strict=True):
                output = torch.where(extent <= reach(stage, clusters), out, output)
            outs.append(output)
        return inputs.restored(outs, causal=causal).to(q.dtype)

    # Causal stages have queries of their own, and so smaller tensors.
    return by_heads(attend, q, k, v, stages=len(stages) if causal else 1)


def _rows(task: Task, q: Tensor, span: range, stage: Stage) -> Tensor:
    """Outputs of the queries of a stage, out of consecutive ones at the positions `span`."""
    stage = stage.since(span.start)._replace(end=min(stage.end, span.stop))
    before = max(span.start - stage.begin, 0)
    rows = after(q[:, :, max(stage.begin - span.start, 0) : stage.end - span.start], before)
    return without(_read(task, rows, stage), before)


def _read(task: Task, q: Tensor, stage: Stage) -> Tensor:
    """Outputs of the queries of a stage, [batch heads tokens value_dim]."""
    head_dim, value_dim = task.k.shape[3], task.v.shape[3]
    layout, size = stage.layout, stage.layout.block
    slices = near_slices(q, task.k, task.v, task.real, layout, past=task.causal, begin=stage.begin // size)
    rows, parts = slices.rows, _parts(task, slices, stage)
    if parts is None:
        out, _ = _softmax(slices, size, causal=task.causal)
        return in_order(out[..., :value_dim], q, layout)
    clusters, (near, near_sum, closed, closed_sum, chosen) = parts
    opened, opened_sum = (
        x.unflatten(2, rows.shape[2:4])
        for x in open_clusters(rows[..., :head_dim].flatten(2, 3), chosen.flatten(2, 3), clusters)
    )
    top = torch.maximum(torch.maximum(near_sum, closed_sum), opened_sum).detach()
    outs = (near[..., :value_dim], closed[..., :value_dim], opened)
    weights = [(x - top).exp() for x in (near_sum, closed_sum, opened_sum)]
    merged = sum(weight * out for weight, out in zip(weights, outs, strict=True)) / sum(weights)
    return in_order(merged, q, layout)


def _parts(task: Task, slices: Slices, stage: Stage) -> tuple[Clusters, list[Tensor]] | None:
    """Clusters of a stage, outputs and log-sum-exps of near keys and of closed clusters, and opened clusters.

    None: all keys are near.
    """
    tokens, size = task.k.shape[2], stage.layout.block
    runs, read = places(stage.runs(tokens, task.causal), -(-tokens // size))
    if not runs:
        return None
    clusters = clusters_of(task.k, task.v, task.counted, runs, size, shared=not task.causal)
    summaries, none = summarise(clusters, slices.rows.shape[4]), clusters.k.shape[2]
    plan = list(steps(read, stage.begin // size, slices.rows, none))
    outputs = [
        (
            *_softmax(part, size, causal=task.causal),
            *read_closed(part.rows, summaries, step, task.probes),
        )
        for part, step in zip(slices.split([step.blocks for step in plan]), plan, strict=True)
    ]
    *parts, choices = zip(*outputs, strict=True)
    most = max(x.shape[4] for x in choices)
    chosen = torch.cat([F.pad(x, (0, most - x.shape[4]), value=none) for x in choices], dim=2)
    return clusters, [*(torch.cat(x, dim=2) for x in parts), chosen]


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


@torch.no_grad()
def keys_read(
    q: Queries,
    k: Keys,
    key_mask: KeyMask | None,
    rows: Tensor,
    *,
    scale: float,
    block: int,
    first: int,
    clusters: int,
    probes: int,
    causal: bool,
) -> Tensor:
    """Near and global keys, and keys of opened clusters, bool [batch heads rows k_tokens]; later keys too.

    Args:
        rows: Index of the queries, [rows].
        block, first, clusters, probes: See `probe_clusters`.
    """
    tokens, missing = k.shape[2], k.shape[2] - q.shape[2]
    stages = (causal_stages if causal else full_stages)(tokens, block=block, clusters=clusters, first=first)
    most = probes if probes < clusters else tokens
    at = aligned(rows + missing, tokens, key_mask)
    # Every query has its position, as in a call with a mask; values are the numbers of their keys from 1 on.
    queries = F.pad(upcast(q) * scale, (0, 0, missing, 0))
    numbers = torch.arange(1, tokens + 1, device=k.device, dtype=queries.dtype)[:, None]

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = alignment(q, k, v, key_mask, None)
        task = Task(inputs.k, inputs.v, inputs.real, inputs.counted(first), most, causal)
        extent = (torch.arange(1, tokens + 1, device=k.device) * inputs.real).amax(dim=1, keepdim=True)
        pattern = torch.zeros((), dtype=torch.bool, device=k.device)
        # A later stage serves longer sequences, or if causal later queries.
        for stage in stages[::-1]:
            near = near_keys(stage.layout, at, tokens, key_mask)[:, None]
            here = at < stage.end if causal else extent <= reach(stage, clusters)
            pattern = torch.where(here[:, None, :, None], near | _opened(task, inputs.q, stage, at), pattern)
        return pattern.expand(*q.shape[:2], -1, -1)

    return by_heads(read, queries, k, numbers.expand(*k.shape[:3], 1))


def _opened(task: Task, q: Tensor, stage: Stage, at: Tensor) -> Tensor:
    """Keys of clusters that queries `at` positions [batch rows] open, bool [batch heads rows tokens]."""
    layout, size, (_, kv_heads, tokens, _) = stage.layout, stage.layout.block, task.k.shape
    q = q[:, :, stage.begin : stage.end]
    slices = near_slices(q, task.k, task.v, task.real, layout, past=task.causal, begin=stage.begin // size)
    parts = _parts(task, slices, stage)
    if parts is None:
        return torch.zeros(1, dtype=torch.bool, device=q.device)
    clusters, (*_, chosen) = parts
    chosen = in_order(chosen, q, layout)
    index = (at - stage.begin).clamp(0, q.shape[2] - 1)[:, None, :, None]
    chosen = chosen.gather(2, index.expand(*chosen.shape[:2], -1, chosen.shape[3]))
    members = F.pad(clusters.v[..., 0] * clusters.counted, (0, 0, 0, 1)).long()
    members = members.repeat_interleave(q.shape[1] // kv_heads, dim=1)
    members = members.gather(2, chosen.flatten(2)[..., None].expand(-1, -1, -1, size))
    members = members.unflatten(2, chosen.shape[2:]).flatten(3)
    pattern = torch.zeros(*members.shape[:3], tokens + 1, dtype=torch.bool, device=q.device)
    return pattern.scatter_(3, members, True)[..., 1:]
