"""Softmax over near keys and over summaries of the clusters of far keys, in one call of the fused kernel.

A block of queries reads one slice of keys, the block and half a block on each side; if causal, the block
before and its own past. Keys outside the slice are summed per cluster, so every key counts once for every
query.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.history import past_segments
from efficient_attn.ops.clusters.kmeans import kmeans, segments
from efficient_attn.ops.clusters.near import Layout, read_slices
from efficient_attn.ops.clusters.summaries import beyond_slices, members, query_moments, summarise_clusters
from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.paths import held, tuned_for_cpu
from efficient_attn.shapes import KeyMask, Keys, Queries, Values

# Numbers per step on the CPU in the keys and values of the heads, and in the summaries of the blocks, so that
# both stay in cache.
_HEADS, _GROUP = 1 << 20, 1 << 19
_FEWEST, _MOST = 2, 16


def window_clusters(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    layout: Layout,
    clusters: int,
    steps: int | None,
    key_mask: KeyMask | None,
    read: Callable[..., Tensor] = read_slices,
) -> Tensor:
    """Softmax attention with one summary for each cluster of far keys; queries and keys are the same tokens.

    Args:
        steps: Steps of k-means; None: clusters are segments of the sequence.
        read: Function of slices and summaries that returns the rows, with the arguments of `read_slices`.
    """
    some = partial(
        _some_clusters,
        scale=scale,
        layout=layout,
        clusters=clusters,
        steps=steps,
        key_mask=key_mask,
        read=read,
    )
    return by_heads(some, q, k, v)


def by_heads(
    some: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *each: Sequence[int], stages: int = 1
) -> Tensor:
    """Outputs, with as many heads per step as fit in cache, or in memory on other devices.

    Args:
        each: Further arguments of `some`, with one number per query head.
        stages: Number of stages of `some`, one after the other.
    """
    numbers = k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]) // stages
    heads = max(1, _HEADS // numbers) if tuned_for_cpu(k) else held(numbers)
    if heads >= k.shape[1]:
        return some(q, k, v, *each)
    rows = heads * (q.shape[1] // k.shape[1])
    parts = zip(q.split(rows, dim=1), k.split(heads, dim=1), v.split(heads, dim=1), strict=True)
    counts = [[one[i * rows : (i + 1) * rows] for one in each] for i in range(-(-k.shape[1] // heads))]
    return torch.cat([some(*part, *own) for part, own in zip(parts, counts, strict=True)], dim=1)


def _some_clusters(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    layout: Layout,
    clusters: int,
    steps: int | None,
    key_mask: Tensor | None,
    read: Callable[..., Tensor],
) -> Tensor:
    dtype = q.dtype
    q, k, v, real, turned = from_first_real(
        upcast(q) * scale, upcast(zero_masked(k, key_mask)), upcast(zero_masked(v, key_mask)), key_mask
    )
    clusters = min(clusters, k.shape[2])
    if steps is None:
        chosen = segments(real, clusters)[:, None].expand(k.shape[:3])
    else:
        chosen = kmeans(k.detach(), real, clusters, steps)
    # Summaries are made for the queries of one head, whatever other heads share its keys.
    if q.shape[1] > k.shape[1]:
        k, v, chosen = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v, chosen))
    queries = query_moments(q.unsqueeze(2), None if turned is None else real)
    counted = real & (torch.arange(k.shape[2], device=k.device) >= layout.first)
    every = members(k, v, counted, chosen, queries, clusters)
    group = _group(every.top.numel() * (k.shape[3] + v.shape[3]), -(-k.shape[2] // layout.block), k)
    summaries = (
        summarise_clusters(sums, every.top, queries, k.shape[3])
        for sums in beyond_slices(every, block=layout.block, back=layout.back, group=group)
    )
    out = read(q, k, v, real, summaries, layout, group=group)
    return turn_back(out, turned).to(dtype)


def window_segments(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    layout: Layout,
    clusters: int,
    key_mask: KeyMask | None,
    read: Callable[..., Tensor] = read_slices,
) -> Tensor:
    """Causal softmax attention, with one summary for each segment of the past before the slice."""
    some = partial(
        _some_segments, scale=scale, layout=layout, clusters=clusters, key_mask=key_mask, read=read
    )
    return by_heads(some, q, k, v)


def _some_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    layout: Layout,
    clusters: int,
    key_mask: Tensor | None,
    read: Callable[..., Tensor],
) -> Tensor:
    dtype, before = q.dtype, k.shape[2] - q.shape[2]
    # Blocks are aligned with the keys; queries are the last positions, and a mask may put them in any block.
    begin = before // layout.block if key_mask is None else 0
    q = F.pad(upcast(q) * scale, (0, 0, before - begin * layout.block, 0))
    q, k, v, real, turned = from_first_real(
        q, upcast(zero_masked(k, key_mask)), upcast(zero_masked(v, key_mask)), key_mask
    )
    position = torch.arange(k.shape[2], device=k.device)
    starts = [max(start - layout.back, 0) for start in range(0, k.shape[2], layout.block)][begin:]
    group = _group(k.shape[0] * k.shape[1] * clusters * (k.shape[3] + v.shape[3]), len(starts), k)
    summaries = past_segments(
        k,
        v,
        real & (position >= layout.first),
        starts=starts,
        cell=layout.cell,
        segments=clusters,
        group=group,
    )
    row = torch.arange(layout.block, device=q.device)
    own = torch.arange(-layout.back, layout.block, device=q.device)
    visible = own <= row[:, None]
    out = read(q, k, v, real, summaries, layout, group=group, visible=visible, begin=begin)
    out = turn_back(out, turned)
    if turned is not None:
        # Padding before the first real token was rotated to the end.
        out = out.masked_fill((position < turned[:, None])[:, None, :, None], 0.0)
    return out[:, :, before - begin * layout.block :].to(dtype)


def _group(numbers: int, blocks: int, k: Tensor) -> int:
    """Number of blocks per step, from the size of one block's summaries."""
    if not tuned_for_cpu(k):
        return min(blocks, held(numbers))
    return min(blocks, _MOST, max(_FEWEST, _GROUP // numbers))


def from_first_real(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Tensors rotated so that the first real token comes first, and the rotation of each batch entry."""
    if key_mask is None:
        return q, k, v, torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device), None
    turned = key_mask.long().argmax(dim=-1)
    q, k, v = (_turn(x, turned) for x in (q, k, v))
    return q, k, v, _turn(key_mask[:, None, :, None], turned)[:, 0, :, 0], turned


def _turn(x: Tensor, by: Tensor) -> Tensor:
    """`x` rotated along the tokens: token i of the result is token i + by of x."""
    index = (torch.arange(x.shape[2], device=x.device) + by[:, None]) % x.shape[2]
    return x.gather(2, index[:, None, :, None].expand_as(x))


def turn_back(x: Tensor, turned: Tensor | None) -> Tensor:
    return x if turned is None else _turn(x, -turned)
