"""Softmax over near keys and over summaries of clusters of far keys, in one call of the fused kernel.

A block of queries reads one slice of keys, the block and half a block on each side. Keys outside the slice
are summed per cluster, so every key counts once for every query. Assignments are discrete, and no gradient
flows through them.

The softmax of a query q over the keys of a cluster needs Σ_j e^{q·k_j} and Σ_j e^{q·k_j} v_j. Around the mean
query m, with weights w_j = e^{m·k_j}, W = Σ w_j and means under these weights, they are to first order
W e^{(q−m)·k̄} and the same times v̄. The second-order term of the mass, ½ (q−m)ᵀΣ(q−m), is averaged over the
queries, whose entries count as uncorrelated: ½ Σ_d s_d Σ_dd.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.alignment import MASKED, after, aligned, alignment, bias_of, biased_rows, padded_rows
from efficient_attn.ops.dtypes import upcast
from efficient_attn.ops.paths import step_capacity, tuned_for_cpu
from efficient_attn.shapes import KeyMask, Keys, Queries, Values

# Numbers per step on the CPU, so that they stay in cache: in the keys and values of the heads, and in the
# summaries of the blocks, with bounds of the number of blocks.
_HEADS, _GROUP, _FEWEST, MOST_BLOCKS = 1 << 20, 1 << 19, 2, 16


def window_clusters(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    block: int,
    clusters: int,
    key_mask: KeyMask | None,
    positions: Sequence[range] | None = None,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Self-attention by softmax, with one summary for each cluster of far keys.

    Args:
        block: Number of queries that share a slice of keys, the block and half a block on each side.
        positions: See `Alignment`.
        total: Sum over the ranks that hold the other queries, or None.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = alignment(upcast(q) * scale, k, v, key_mask, positions)
        k, v, real = inputs.k, inputs.v, inputs.real
        number = min(clusters, k.shape[2])
        chosen = nearest_keys(k.detach(), real, number)
        # Summaries belong to the queries of one head, even if other heads share its keys.
        if q.shape[1] > k.shape[1]:
            k, v, chosen = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v, chosen))
        real_queries = None
        if key_mask is not None:
            real_queries = torch.cat([real[:, span.start : span.stop] for span in inputs.positions], dim=1)
        queries = query_moments(inputs.q, real_queries, total)
        members = weighted_keys(k, v, real, chosen, queries, number)
        outs = []
        for rows, span in inputs.runs():
            begin, end = span.start // block, -(-span.stop // block)
            group = _group(members.top.numel() * (k.shape[3] + v.shape[3]), end - begin, k)
            outside = beyond_slices(members, block, group=group, begin=begin, end=end)
            summaries = (summarise_clusters(sums, members.top, queries, k.shape[3]) for sums in outside)
            before = span.start - begin * block
            out = read_slices(after(rows, before), k, v, real, summaries, block, group=group, begin=begin)
            # A slice of all rows would be an operator of its own in the backward pass.
            outs.append(out[:, :, before:] if before else out)
        return inputs.restored(outs).to(q.dtype)

    return by_heads(attend, q, k, v)


def by_heads(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Outputs, with as many heads per step as fit in cache, or in memory on other devices."""
    numbers = k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3])
    heads = max(1, _HEADS // numbers) if tuned_for_cpu(k) else step_capacity(numbers)
    if heads >= k.shape[1]:
        return attend(q, k, v)
    rows = heads * (q.shape[1] // k.shape[1])
    parts = zip(q.split(rows, dim=1), k.split(heads, dim=1), v.split(heads, dim=1), strict=True)
    return torch.cat([attend(*part) for part in parts], dim=1)


def _group(numbers: int, blocks: int, k: Tensor) -> int:
    """Number of blocks per step, from the size of one block's summaries."""
    if not tuned_for_cpu(k):
        return min(blocks, step_capacity(numbers))
    return min(blocks, MOST_BLOCKS, max(_FEWEST, _GROUP // numbers))


@torch.no_grad()
def nearest_keys(keys: Tensor, real: Tensor, clusters: int) -> Tensor:
    """Cluster of every key, the nearest of `clusters` evenly spaced real keys, [batch heads tokens].

    Args:
        keys: [batch heads tokens dim].
        real: bool [batch tokens]. Clusters of masked keys are arbitrary.
    """
    last = (real.sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    # With fewer real keys than clusters, positions are repeated.
    rank = torch.arange(clusters, device=real.device) * last // max(clusters - 1, 1)
    at = torch.searchsorted(real.cumsum(dim=-1), rank + 1).clamp_max(real.shape[-1] - 1)
    centres = keys.gather(2, at[:, None, :, None].expand(*keys.shape[:2], -1, keys.shape[3]))
    # argmin_c |k − c|² = argmax_c k·c − |c|²/2
    half_squares = centres.square().sum(dim=-1)[:, :, None] / 2
    products = torch.baddbmm(
        half_squares.flatten(0, 1), keys.flatten(0, 1), centres.flatten(0, 1).mT, beta=-1
    )
    return products.argmax(dim=-1).unflatten(0, keys.shape[:2])


class QueryMoments(NamedTuple):
    """Mean and variance of a head's queries, scaled as in the scores.

    Attributes:
        mean: [batch heads 1 head_dim].
        variance: Variance of each entry, [batch heads 1 head_dim].
    """

    mean: Tensor
    variance: Tensor


def query_moments(
    q: Tensor, real: Tensor | None, total: Callable[[Tensor], Tensor] | None = None
) -> QueryMoments:
    """Mean and variance over the real queries.

    Args:
        q: [batch heads tokens head_dim].
        real: bool [batch tokens]; None: all are real.
        total: Sum over the ranks that hold the other queries; None: there are none.
    """
    if real is None and total is None:
        variance, mean = torch.var_mean(q, dim=2, correction=0, keepdim=True)
        return QueryMoments(mean, variance)
    if real is None:
        real = q.new_ones(q.shape[0], q.shape[2], dtype=torch.bool)
    total = total or (lambda x: x)
    # Masking rather than a product with zero, since a padded query may be NaN.
    padding = ~real[:, None, :, None]
    count = total(real.sum(dim=-1).to(q.dtype)[:, None, None, None]).clamp_min(1)
    q = q.masked_fill(padding, 0.0)
    mean = total(q.sum(dim=2, keepdim=True)) / count
    squares = (q - mean).square().masked_fill(padding, 0.0)
    return QueryMoments(mean, total(squares.sum(dim=2, keepdim=True)) / count)


class Members(NamedTuple):
    """Weighted keys, to be summed per cluster and per cell, a stretch of the sequence.

    Attributes:
        rows: w · (k, v, ½ Σ_d s_d k_d², 1), [batch heads tokens head_dim + value_dim + 2].
        chosen: Cluster index of each key, [batch heads tokens].
        top: Largest exponent of each cluster, the reference of its weights, [batch heads clusters].
    """

    rows: Tensor
    chosen: Tensor
    top: Tensor

    def sums(self, cell: Tensor, cells: int) -> Tensor:
        """Sums over the members of each cluster in each cell, [batch heads cells clusters …].

        Args:
            cell: Cell index of each token, [tokens].
        """
        clusters, heads = self.top.shape[-1], self.rows.shape[:2]
        # One `index_add_` over all rows replaces a product.
        head = torch.arange(heads.numel(), device=cell.device).view(*heads, 1)
        place = (head * cells + cell) * clusters + self.chosen
        sums = self.rows.new_zeros(heads.numel() * cells * clusters, self.rows.shape[-1])
        sums.index_add_(0, place.flatten(), self.rows.flatten(0, 2))
        return sums.view(*heads, cells, clusters, -1)


def weighted_keys(
    k: Tensor, v: Tensor, real: Tensor, chosen: Tensor, queries: QueryMoments, clusters: int
) -> Members:
    """The keys of all clusters, weighted.

    Args:
        k: [batch heads tokens head_dim]; v: [batch heads tokens value_dim].
        real: Keys that enter the sums, bool [batch tokens].
        chosen: Cluster index of each key, [batch heads tokens].
    """
    # Smaller weights change no sum but would be denormal numbers, which are slow.
    floor = -300.0 if k.dtype == torch.float64 else -42.0
    exponent = (k @ queries.mean.mT).squeeze(-1)
    seen = real[:, None, :].expand_as(exponent)
    top = exponent.new_full((*exponent.shape[:2], clusters), -torch.inf)
    top = top.scatter_reduce(2, chosen, exponent.detach().masked_fill(~seen, -torch.inf), "amax")
    top = top.masked_fill(top.isinf(), 0.0)
    # Exponents of seen keys are at most 0; the bound lies above, since a clamp's derivative at its bound
    # depends on torch's version.
    weight = (exponent - top.gather(2, chosen)).clamp(floor, 1.0).exp() * seen
    bend = k.square() @ queries.variance.mT / 2
    rows = torch.cat([k, v, bend, torch.ones_like(bend)], dim=-1) * weight[..., None]
    return Members(rows, chosen, top)


def beyond_slices(members: Members, block: int, *, group: int, begin: int, end: int) -> Iterator[Tensor]:
    """Sums over all members outside the slices of the blocks begin … end − 1, `group` blocks at a time.

    Cells have as many tokens as a block, the first of them half a block fewer, and the slice of block b is
    the cells b and b + 1. Partial sums are only added, never subtracted, since differences would cancel small
    terms.

    Yields:
        [batch heads group clusters …].
    """
    tokens, side = members.rows.shape[2], block // 2
    groups = -(-(end - begin) // group)
    first = side - begin * block
    cell = torch.arange(first, first + tokens, device=members.rows.device) // block
    block_number = torch.arange(group, device=cell.device)[:, None]
    cell_number = torch.arange(group + 2, device=cell.device)
    # A block excludes two cells of the group, whose last cell is the next group's first.
    outside = ((cell_number - block_number) // 2 != 0).to(members.rows.dtype)
    if groups == 1:
        # All cells outside the group's blocks are summed as one cell.
        parts = members.sums(cell.clamp(-1, group + 1) % (group + 2), group + 2)
        yield (outside @ parts.flatten(3)).unflatten(3, parts.shape[3:])
        return
    # Sums of the first cell of each group, of its other cells, and of all cells beyond.
    beyond = (cell < 0) | (cell > groups * group)
    place = (2 * (cell // group) + (cell % group > 0)).masked_fill(beyond, 2 * groups + 2)
    coarse = members.sums(place, 2 * groups + 3)
    firsts, rests = coarse[:, :, :-1:2].unbind(2), coarse[:, :, 1::2].unbind(2)
    both = [left + right for left, right in zip(firsts, rests, strict=True)]
    before = list(accumulate(both, initial=coarse[:, :, -1]))
    after = list(accumulate(reversed(both), initial=torch.zeros_like(both[0])))[::-1]
    for number in range(groups):
        low, high = (max((begin + index * group) * block - side, 0) for index in (number, number + 1))
        # The sums of the last two cells already exist.
        part = Members(members.rows[:, :, low:high], members.chosen[:, :, low:high], members.top)
        parts = part.sums(cell[low:high] - number * group, group + 2)
        parts[:, :, group] = firsts[number + 1]
        parts[:, :, group + 1] = before[number] + rests[number + 1] + after[number + 2]
        blocks = min(group, end - begin - number * group)
        yield (outside[:blocks] @ parts.flatten(3)).unflatten(3, parts.shape[3:])


class Summary(NamedTuple):
    """One key and one value for each cluster, as entries of a softmax.

    Attributes:
        k: Mean keys, [… clusters head_dim].
        v: Mean values, [… clusters value_dim + 1]: an unused padding column matches the keys' bias column and
            avoids a copy.
        bias: Score bias, [… clusters 1]: logarithm of the number of ordinary keys that the cluster replaces.
    """

    k: Tensor
    v: Tensor
    bias: Tensor


def summarise_clusters(sums: Tensor, top: Tensor, queries: QueryMoments, head_dim: int) -> Summary:
    """Summaries of the clusters, from sums over members [batch heads blocks clusters …]."""
    mass = sums[..., -1:]
    alive = mass > 0
    mass = torch.where(alive, mass, 1.0)
    means = sums[..., :-1] / mass
    k = means[..., :head_dim]
    mean, variance = (x.unsqueeze(2).mT for x in queries)
    spread = (means[..., -1:] - k.square() @ variance / 2).clamp_min(0)
    bias = mass.log() + top[:, :, None, :, None] - k @ mean + (spread + spread.square() / 2).log1p()
    return Summary(k, means[..., head_dim:], torch.where(alive, bias, MASKED))


def read_slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor,
    summaries: Iterator[Summary],
    block: int,
    *,
    group: int,
    begin: int,
) -> Tensor:
    """Softmax of every block over its slice and its cluster summaries.

    Rows have one width: a column of the keys holds their score bias, and the queries hold 1 there.

    Args:
        q: Queries from block `begin` on, [batch heads tokens head_dim].
        summaries: [batch heads blocks clusters …], `group` blocks at a time.
    """
    (_, heads, tokens, _), value_dim = q.shape, v.shape[3]
    blocks, width = -(-tokens // block), max(k.shape[3], value_dim) + 1
    rows = biased_rows(F.pad(q, (0, 0, 0, blocks * block - tokens)), q.new_ones(()), width)
    near_real = _stretch(real[:, None, :, None], begin, blocks, block)
    near_k = biased_rows(_stretch(k, begin, blocks, block), bias_of(near_real, k), width)
    near_v = padded_rows(_stretch(v, begin, blocks, block), width)
    # [batch heads blocks tokens width]
    near = (x.unfold(2, block + block // 2 * 2, block).mT for x in (near_k, near_v))
    parts = zip(*(x.split(group, dim=2) for x in (rows.unflatten(2, (blocks, block)), *near)), strict=True)
    outs = []
    for (queries, keys, values), clusters in zip(parts, summaries, strict=True):
        keys = torch.cat([keys, biased_rows(clusters.k, clusters.bias, width)], dim=3)
        values = torch.cat([values, padded_rows(clusters.v, width)], dim=3)
        queries, keys, values = (x.flatten(0, 1) for x in (queries, keys, values))
        out = F.scaled_dot_product_attention(queries, keys, values, scale=1.0)
        outs.append(out.unflatten(0, (-1, heads))[..., :value_dim])
    return torch.cat(outs, dim=2).flatten(2, 3)[:, :, :tokens]


def near_keys(block: int, at: Tensor, tokens: int, key_mask: Tensor | None) -> Tensor:
    """Keys in the slices of aligned queries `at` positions, bool [batch rows tokens]."""
    keys = aligned(torch.arange(tokens, device=at.device), tokens, key_mask)[:, None]
    offset = keys - (at // block * block)[..., None]
    return (offset >= -(block // 2)) & (offset < block + block // 2)


def _stretch(x: Tensor, begin: int, blocks: int, block: int) -> Tensor:
    """Tokens from the first to the last slice of some blocks, with zeros outside the sequence."""
    low, high = begin * block - block // 2, (begin + blocks) * block + block // 2
    return F.pad(x[:, :, max(low, 0) : high], (0, 0, max(-low, 0), max(high - x.shape[2], 0)))
