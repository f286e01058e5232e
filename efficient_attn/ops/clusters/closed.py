"""Softmax over the summaries of closed clusters, and the choice of the clusters that a query opens.

Neighbouring blocks read nearly the same clusters, so that a few blocks share one product with the summaries
of all clusters that one of them reads. Scores are [clusters queries]: a maximum or sum over clusters then
runs over whole rows of numbers.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.clusters.far import Summaries
from efficient_attn.ops.clusters.near import MASKED
from efficient_attn.ops.paths import held, tuned_for_cpu

# A query opens the clusters with the largest mean score plus this many standard deviations of the scores of
# the keys: a single key with a high score is far from the mean of its cluster.
_DEVIATIONS = 3.0
# Numbers in the scores of a step on the CPU, so that its few tensors of scores stay in cache.
_STEP = 1 << 17
# Clusters of which the largest score is found first.
_TOGETHER = 4


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


class Closed(NamedTuple):
    """Scores of the queries of a step with summaries, and the clusters that the queries open.

    Attributes:
        far: Summaries of the clusters of each group, [batch kv_heads groups clusters …].
        mean: Mean scores, and the bias of a masked key where the query reads no summary of the cluster,
            [batch kv_heads groups clusters queries].
        half_variance: Half the variances of the scores of the keys, as `mean`.
        chosen: Opened clusters, at most `probes`; the number of the empty cluster stands for none,
            [batch kv_heads groups probes queries].
    """

    far: Summaries
    mean: Tensor
    half_variance: Tensor
    chosen: Tensor


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
        table = torch.tensor([one + [none] * (most - len(one)) for one in read], device=rows.device)
        yield from (Step(len(part), part, None) for part in table.split(held(numbers)))
        return
    share = 1 << (max(_STEP // numbers, 1)).bit_length() - 1
    # The past of block 1 + m · share … (m + 1) · share has the same runs, but for the shortest.
    cuts = [0, *(i for i in range(1, len(read)) if (first + i - 1) % share == 0), len(read)]
    for begin, end in pairwise(cuts):
        sets = [set(one) for one in read[begin:end]]
        union = sorted(set().union(*sets))
        hidden = None
        if any(len(one) < len(union) for one in sets):
            unread = [[[one not in some] for some in sets] for one in union]
            hidden = torch.tensor([unread], device=rows.device)
        yield Step(end - begin, torch.tensor([union or [none]], device=rows.device), hidden)


def choose(rows: Tensor, summaries: Summaries, step: Step, probes: int) -> Closed:
    """Scores of the queries of a step with closed clusters, and the clusters that they open.

    Args:
        rows: Queries of the step, [batch kv_heads blocks rows width].
        probes: Number of clusters that a query opens, or more than there are.
    """
    blocks, far = rows.shape[2] // len(step.read), summaries.of(step.read)
    q = rows.unflatten(2, (-1, blocks)).flatten(3, 4)
    mean = far.k @ q.mT  # [batch kv_heads groups clusters queries]
    half = far.half_variance @ q[..., : far.half_variance.shape[4]].square().mT
    if step.hidden is not None:
        mean = mean.unflatten(4, (blocks, -1)).masked_fill_(step.hidden, MASKED).flatten(4, 5)
    with torch.no_grad():
        bound = torch.add(mean, half.sqrt(), alpha=2**0.5 * _DEVIATIONS)
        columns = _largest(bound, min(probes, bound.shape[3]))
        closed = bound.gather(3, columns) < MASKED / 2
        chosen = step.read[..., None].expand(*bound.shape).gather(3, columns)
        chosen = chosen.masked_fill(closed, summaries.k.shape[2] - 1)
    # An opened cluster is no reference of the exponents, since the other weights could all vanish.
    return Closed(far, mean.scatter(3, columns, MASKED), half, chosen)


def read_closed(rows: Tensor, summaries: Summaries, step: Step, probes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax of the queries of a step over closed clusters, and the clusters that they open, as `choose`.

    Returns:
        Outputs [batch kv_heads blocks rows width], log-sum-exps [… 1], and clusters [… probes].
    """
    far, mean, half, chosen = choose(rows, summaries, step, probes)
    top = mean.detach().amax(dim=3, keepdim=True)
    # 1 + a + a²/2 for half the variance a: the mass to second order, for the spread of the scores.
    weights = (mean - top).exp_() * torch.addcmul(half + 1, half, half, value=0.5)
    total = weights.sum(dim=3, keepdim=True)
    out = (weights.mT @ far.v) / total.mT
    log_sum = (top + total.log()).mT
    return in_blocks(out, rows), in_blocks(log_sum, rows), in_blocks(chosen.mT, rows)


def in_blocks(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of groups, [… groups queries dim], by the blocks of `rows`, [… blocks rows dim]."""
    return x.unflatten(3, (-1, rows.shape[3])).flatten(2, 3)


def _largest(x: Tensor, count: int) -> Tensor:
    """Columns of the largest entries along dimension 3, in any order."""
    columns = x.shape[3]
    groups = columns // _TOGETHER
    if not tuned_for_cpu(x) or columns % _TOGETHER or groups <= count:
        return x.topk(count, dim=3, sorted=False).indices
    # The largest entries lie in the groups with the largest maxima.
    best = x.unflatten(3, (_TOGETHER, groups)).amax(dim=3).topk(count, dim=3, sorted=False).indices
    found = torch.cat([best + groups * one for one in range(_TOGETHER)], dim=3)
    return found.gather(3, x.gather(3, found).topk(count, dim=3, sorted=False).indices)
