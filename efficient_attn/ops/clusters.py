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
from functools import reduce
from itertools import cycle, repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.alignment import MASKED, Alignment, aligned, alignment, bias_of, padded_rows
from efficient_attn.ops.dtypes import upcast, upcast_dtype, zero_masked
from efficient_attn.ops.linear.inputs import Scratch
from efficient_attn.ops.paths import step_capacity, tuned_for_cpu
from efficient_attn.ops.softmax.biased import eager
from efficient_attn.shapes import KeyMask, Keys, Queries, Values

# On the CPU numbers per step and thread, in keys and values and in summaries, and most blocks; on all devices
# most parts of a longer stretch of blocks. Larger steps need more than 8 MiB, smaller ones more calls.
_KEYS, _SUMMARIES, MOST_BLOCKS, MOST_PARTS = 3 << 15, 9 << 15, 23, 8


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
    numbers, number = k.shape[3] + v.shape[3], min(clusters, k.shape[2])
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    scratch = Scratch() if tuned_for_cpu(q) and eager(q, k, v) and not trained else None

    def parts(inputs: Alignment) -> Iterator[Tensor]:
        shape = inputs.q.shape[:2]
        step, group = (step_capacity(shape.numel() * numbers * x) for x in (1, number))
        if scratch is not None:
            heads = -(-shape.numel() // torch.get_num_threads())
            step = max(1, _KEYS // (heads * numbers))
            group = min(MOST_BLOCKS, max(2, _SUMMARIES // (heads * numbers * number)))
        real = torch.cat([inputs.real[:, span.start : span.stop] for span in inputs.positions], dim=1)
        queries = query_moments(inputs.q, real, key_mask is not None, scale, step, total)
        members = clustered_keys(inputs, queries, number, step, scratch)
        for rows, span in inputs.runs():
            blocks = range(span.start // block, -(-span.stop // block))
            for stretch, sums in beyond_slices(members, blocks, block, group):
                out = read_slices(rows.flatten(0, 1), span, members, sums, stretch, block, scale)
                yield out.unflatten(0, shape)

    def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, out: Tensor | None) -> Tensor:
        inputs = alignment(q, k, v, key_mask, positions)
        if out is None:
            return inputs.restored(list(parts(inputs))).to(q.dtype)
        rows, begin = out if inputs.shift is None else out.new_empty(*inputs.q.shape[:3], v.shape[3]), 0
        for part in parts(inputs):
            rows[:, :, begin : begin + part.shape[2]] = part
            begin += part.shape[2]
        return out if inputs.shift is None else out.copy_(inputs.restored([rows]))

    out = None if scratch is None else q.new_empty(*q.shape[:3], v.shape[3])
    return by_heads(attend, q, k, v, key_mask, out)


def by_heads(
    attend: Callable, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, out: Tensor | None
) -> Tensor:
    """Outputs, in `out` if there is one, with as many heads per step as fit in cache or memory."""
    (batch, heads), kv_heads, numbers = q.shape[:2], k.shape[1], k.shape[2] * (k.shape[3] + v.shape[3])
    pairs = step_capacity(numbers)
    if tuned_for_cpu(q):
        # Threads share the heads of a step. The compiler cannot ask for their number.
        threads = torch.get_num_threads() if eager(q, k, v) else 1
        pairs = max(1, (_KEYS + numbers // 2) // numbers) * threads
    if pairs >= batch * heads:
        return attend(q, k, v, key_mask, out)
    if batch > 1:
        dim, rows, keys = 0, max(1, pairs // heads), max(1, pairs // heads)
    else:
        dim, keys = 1, max(1, pairs * kv_heads // heads)
        rows = keys * heads // kv_heads if kv_heads > 1 else pairs
    masks = [key_mask] if key_mask is None or dim == 1 else key_mask.split(rows)
    targets = [out] if out is None else out.split(rows, dim)
    repeated = (cycle(x) for x in (k.split(keys, dim), v.split(keys, dim), masks, targets))
    outs = [by_heads(attend, *part) for part in zip(q.split(rows, dim), *repeated, strict=False)]
    return torch.cat(outs, dim=dim) if out is None else out


@torch.no_grad()
def nearest_keys(keys: Tensor, real: Tensor, clusters: int, step: int) -> Tensor:
    """Cluster of every key, the nearest of `clusters` evenly spaced real keys, [batch heads tokens].

    Args:
        keys: [batch heads tokens dim].
        real: bool [batch tokens]. Clusters of masked keys are arbitrary.
    """
    last = (real.sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    # With fewer real keys than clusters, positions are repeated.
    rank = torch.arange(clusters, device=real.device) * last // max(clusters - 1, 1)
    at = torch.searchsorted(real.cumsum(dim=-1), rank + 1).clamp_max(real.shape[-1] - 1)
    centres = keys.gather(2, at[:, None, :, None].expand(*keys.shape[:2], -1, keys.shape[3])).flatten(0, 1)
    # argmin_c |k − c|² = argmax_c k·c − |c|²/2
    half_squares = centres.square().sum(dim=-1)[:, None] / 2
    chosen = torch.empty_like(keys[..., 0].flatten(0, 1), dtype=torch.long)
    for part, indices in zip(keys.flatten(0, 1).split(step, dim=1), chosen.split(step, dim=1), strict=True):
        indices.copy_(torch.baddbmm(half_squares, part, centres.mT, beta=-1).max(dim=-1).indices)
    return chosen.unflatten(0, keys.shape[:2])


class QueryMoments(NamedTuple):
    """Mean and variance of a head's queries, scaled as in the scores.

    Attributes:
        mean: [batch·heads 1 head_dim].
        half_variance: Half the variance of each entry, [batch·heads 1 head_dim].
    """

    mean: Tensor
    half_variance: Tensor


def query_moments(
    q: Tensor, real: Tensor, masked: bool, scale: float, step: int, total: Callable[[Tensor], Tensor] | None
) -> QueryMoments:
    """Mean and variance over the real queries.

    Args:
        q: [batch heads tokens head_dim], not scaled yet.
        masked: Whether `real`, bool [batch tokens], may be False.
        total: Sum over the ranks that hold the other queries, or None.
    """
    total = total or (lambda x: x)
    masks = real.split(step, dim=1) if masked else repeat(None)
    parts = list(zip(q.split(step, dim=2), masks, strict=False))
    count = total(real.sum(dim=1, dtype=upcast_dtype(q.dtype)))[:, None, None, None].clamp_min(1)
    # Masking rather than a product with zero, since a padded query may be NaN.
    sums = (zero_masked(upcast(x), mask).sum(dim=2, keepdim=True) for x, mask in parts)
    mean = total(reduce(torch.add, sums)) / count
    centred = (zero_masked(upcast(x) - mean, mask) for x, mask in parts)
    variance = total(reduce(torch.add, (x.square().sum(dim=2, keepdim=True) for x in centred))) / count
    return QueryMoments((mean * scale).flatten(0, 1), (variance * (scale**2 / 2)).flatten(0, 1))


class Members(NamedTuple):
    """Keys of all clusters, whose weighted rows are computed for a few tokens at a time.

    Attributes:
        k: [batch·heads tokens head_dim].
        v: [batch·heads tokens value_dim].
        real: Keys that enter the sums, bool [batch·heads tokens].
        chosen: Cluster index of each key, among the clusters of all heads, [batch·heads tokens].
        top: Largest exponent of each cluster, to which weights refer, or −inf, [batch·heads·clusters].
        scratch: Memory of the steps; None: each has memory of its own.
    """

    k: Tensor
    v: Tensor
    real: Tensor
    chosen: Tensor
    top: Tensor
    queries: QueryMoments
    step: int
    scratch: Scratch | None

    def rows(self, begin: int, end: int) -> Tensor:
        """w · (k, v, ½ Σ_d s_d k_d², e, 1) with e = m·k below the top, [batch·heads tokens …]."""
        k, v, chosen, real = (x[:, begin:end] for x in (self.k, self.v, self.chosen, self.real))
        exponent = (k @ self.queries.mean.mT).squeeze(-1) - self.top[chosen]
        # Smaller weights change no sum but would be denormal numbers, which are slow.
        floor = -300.0 if k.dtype == torch.float64 else -42.0
        # Exponents of seen keys are at most 0; the bound lies above, since a clamp's derivative at its bound
        # depends on torch's version.
        exponent = exponent.clamp(floor, 1.0)
        weight = (exponent.exp() * real)[..., None]
        bend = k.square() @ self.queries.half_variance.mT
        return torch.cat([k, v, bend, exponent[..., None], torch.ones_like(bend)], dim=-1) * weight

    def sums(self, tokens: range, bounds: Tensor, beyond: Tensor | None) -> Tensor:
        """Sums over tokens of each cluster between bounds, [bounds+1 batch·heads clusters …].

        Args:
            bounds: Positions in ascending order, [bounds].
            beyond: Sums over other tokens, which count as before the first bound.
        """
        number, width = self.top.numel(), self.k.shape[2] + self.v.shape[2] + 3
        shape = (len(bounds) + 1) * number, width
        sums = self.scratch("step", self.k, shape).zero_() if self.scratch else self.k.new_zeros(shape)
        if beyond is not None:
            sums[:number] = beyond
        for low in tokens[:: self.step]:
            high = min(low + self.step, tokens.stop)
            part = torch.bucketize(torch.arange(low, high, device=bounds.device), bounds, right=True)
            place = (part * number + self.chosen[:, low:high]).flatten()
            add = sums.index_add_ if self.scratch else sums.index_add
            sums = add(0, place, self.rows(low, high).flatten(0, 1))
        return sums.view(-1, number, width)


def clustered_keys(
    inputs: Alignment, queries: QueryMoments, clusters: int, step: int, scratch: Scratch | None
) -> Members:
    """The members of all clusters, for each head of the queries."""
    chosen, shape = nearest_keys(inputs.k.detach(), inputs.real, clusters, step), inputs.q.shape[:2]
    # Summaries belong to the queries of one head, even if other heads share its keys.
    group = shape[1] // inputs.k.shape[1]
    k, v, chosen, real = (
        x.unsqueeze(2).expand(-1, shape[1] // group, group, *x.shape[2:]).flatten(0, 2)
        for x in (inputs.k, inputs.v, chosen, inputs.real[:, None])
    )
    chosen = chosen + torch.arange(0, shape.numel() * clusters, clusters, device=k.device)[:, None]
    top = k.new_full((shape.numel() * clusters,), -torch.inf)
    with torch.no_grad():
        for keys, index, seen in zip(*(x.split(step, dim=1) for x in (k, chosen, real)), strict=True):
            exponent = (keys @ queries.mean.mT).squeeze(-1).masked_fill(~seen, -torch.inf)
            top = top.scatter_reduce(0, index.flatten(), exponent.flatten(), "amax")
    return Members(k, v, real, chosen, top, queries, step, scratch)


def beyond_slices(
    members: Members, blocks: range, block: int, group: int, beyond: Tensor | None = None
) -> Iterator[tuple[range, Tensor]]:
    """Blocks, `group` at a time, and sums over all members outside of their slices.

    Cells have as many tokens as a block, the first of them half a block fewer, and the slice of block b is
    the cells b and b + 1. A long stretch of blocks is cut into parts, and the sums outside of all parts come
    first. Partial sums are only added, never subtracted, since differences would cancel small terms.

    Args:
        beyond: Sums outside of the cells of these blocks; None: the tokens there are summed, too.
    """
    count, side, tokens = len(blocks), block // 2, range(members.k.shape[1])
    groups = -(-count // group)
    size = 1 if groups == 1 else -(-count // -(-groups // -(-groups // MOST_PARTS)))
    parts, width = -(-count // size), min(size, 2)
    # A part excludes its cells and the next, so bounds lie on both sides of its first cell.
    cell = torch.arange(blocks.start, blocks.stop + size + 1, size, device=members.k.device)
    if size > 1:
        cell = torch.stack([cell, cell + 1], dim=1).flatten().clamp_max(blocks.stop + 1)
    if beyond is not None:
        tokens = tokens[max(blocks.start * block - side, 0) : (blocks.stop + 1) * block - side]
    sums = members.sums(tokens, cell * block - side, beyond)
    outside = 1 - sums.new_ones(width * parts, len(sums)).triu(1).tril(width + 1)[::width]
    # The sums of parts are read until their last blocks.
    out = members.scratch(f"parts of {size}", sums, (parts, sums[0].numel())) if members.scratch else None
    sums = torch.mm(outside, sums.flatten(1), out=out).view(parts, *sums.shape[1:])
    if size == 1:
        yield blocks, sums
        return
    for part in range(parts):
        yield from beyond_slices(members, blocks[part * size :][:size], block, group, sums[part])


def read_slices(
    q: Tensor, span: range, members: Members, sums: Tensor, blocks: range, block: int, scale: float
) -> Tensor:
    """Softmax of the queries of some blocks over their slices and their cluster summaries.

    The summary of a cluster is a key and a value, its means, with a score bias: the logarithm of the number
    of ordinary keys that it replaces.

    Args:
        q: Queries at the positions of `span`, [batch·heads queries head_dim].
        sums: Sums over members, [blocks batch·heads·clusters …].
    """
    k, v, scratch = members.k, members.v, members.scratch
    dim, value_dim, begin, end = k.shape[2], v.shape[2], blocks.start * block, blocks.stop * block
    q = upcast(_stretch(q, begin - span.start, end - span.start)) * scale
    q = q.unflatten(1, (-1, block)).transpose(0, 1)
    sums = sums.unflatten(1, (len(k), -1))
    empty = sums[..., -1:] == 0
    mass = sums[..., -1:].masked_fill(empty, 1.0)
    means = torch.div(sums, mass, out=None if scratch is None else sums)
    bend = (means[..., :dim].square() * members.queries.half_variance).sum(dim=-1, keepdim=True)
    spread = (means[..., -3:-2] - bend).clamp_min(0)
    bias = mass.log() - means[..., -2:-1] + torch.addcmul(spread, spread, spread, value=0.5).log1p()
    far = means[..., :dim], means[..., dim:-3], bias.masked_fill(empty, MASKED)
    stretches = (_stretch(x, begin - block // 2, end + block // 2) for x in (k, v, members.real[..., None]))
    k, v, real = (x.unfold(1, block + block // 2 * 2, block).permute(1, 0, 3, 2) for x in stretches)
    shape = *k.shape[:2], k.shape[2] + far[0].shape[2]
    # The sums of the step have been read.
    keys = torch.cat([k, far[0]], dim=2, out=scratch("step", k, (*shape, dim)) if scratch else None)
    values = torch.cat([v, far[1]], dim=2, out=scratch("values", v, (*shape, value_dim)) if scratch else None)
    bias = torch.cat([bias_of(real, k), far[2]], dim=2)
    mask = bias.mT.expand(-1, -1, block, -1) if scratch else None
    if scratch is None:
        # Gradients pass through a column of the keys, but not through the mask of a fused kernel.
        q, keys = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1), torch.cat([keys, bias], dim=-1)
    width = max(keys.shape[3], value_dim)
    q, keys, values = (padded_rows(x, width) for x in (q, keys, values))
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=1.0)
    out = out[..., :value_dim].transpose(0, 1).flatten(1, 2)
    return out[:, max(span.start - begin, 0) : min(span.stop, end) - begin]


def near_keys(block: int, at: Tensor, tokens: int, key_mask: Tensor | None) -> Tensor:
    """Keys in the slices of aligned queries `at` positions, bool [batch rows tokens]."""
    keys = aligned(torch.arange(tokens, device=at.device), tokens, key_mask)[:, None]
    offset = keys - (at // block * block)[..., None]
    return (offset >= -(block // 2)) & (offset < block + block // 2)


def _stretch(x: Tensor, low: int, high: int) -> Tensor:
    """Tokens `low` to `high` of `x` [batch·heads tokens dim], with zeros outside the sequence."""
    before, after = max(-low, 0), max(high - x.shape[1], 0)
    x = x[:, max(low, 0) : min(high, x.shape[1])]
    return F.pad(x, (0, 0, before, after)) if before or after else x
