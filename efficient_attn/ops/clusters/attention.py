"""Softmax over near keys and over summaries of the clusters of far keys, in one call of the fused kernel.

A block of queries reads one slice of keys, the block and half a block on each side. Keys outside the slice
are summed per cluster, so every key counts once for every query.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from efficient_attn.ops.clusters.kmeans import kmeans, segments
from efficient_attn.ops.clusters.near import Layout, read_slices
from efficient_attn.ops.clusters.placed import after, placed_queries, without
from efficient_attn.ops.clusters.summaries import beyond_slices, members, query_moments, summarise_clusters
from efficient_attn.ops.dtypes import upcast
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
    positions: Sequence[range] | None = None,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Softmax attention with one summary for each cluster of far keys; queries and keys are the same tokens.

    Args:
        steps: Steps of k-means; None: clusters are segments of the sequence.
        positions: See `Placed`.
        total: Sum over the ranks that hold the other queries; None: there are none.
    """
    some = partial(
        _some_clusters,
        scale=scale,
        layout=layout,
        clusters=clusters,
        steps=steps,
        key_mask=key_mask,
        positions=positions,
        total=total,
    )
    return by_heads(some, q, k, v)


def by_heads(some: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *, stages: int = 1) -> Tensor:
    """Outputs, with as many heads per step as fit in cache, or in memory on other devices.

    Args:
        stages: Number of stages of `some`, one after the other.
    """
    numbers = k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]) // stages
    heads = max(1, _HEADS // numbers) if tuned_for_cpu(k) else held(numbers)
    if heads >= k.shape[1]:
        return some(q, k, v)
    rows = heads * (q.shape[1] // k.shape[1])
    parts = zip(q.split(rows, dim=1), k.split(heads, dim=1), v.split(heads, dim=1), strict=True)
    return torch.cat([some(*part) for part in parts], dim=1)


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
    positions: Sequence[range] | None,
    total: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    placed = placed_queries(upcast(q) * scale, k, v, key_mask, positions)
    k, v, real = placed.k, placed.v, placed.real
    clusters = min(clusters, k.shape[2])
    if steps is None:
        chosen = segments(real, clusters)[:, None].expand(k.shape[:3])
    else:
        chosen = kmeans(k.detach(), real, clusters, steps)
    # Summaries are made for the queries of one head, whatever other heads share its keys.
    if q.shape[1] > k.shape[1]:
        k, v, chosen = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v, chosen))
    queries = query_moments(placed.q.unsqueeze(2), None if key_mask is None else placed.real_queries(), total)
    every = members(k, v, placed.counted(layout.first), chosen, queries, clusters)
    outs = []
    for rows, span in placed.runs():
        begin, end = span.start // layout.block, -(-span.stop // layout.block)
        group = _group(every.top.numel() * (k.shape[3] + v.shape[3]), end - begin, k)
        outside = beyond_slices(
            every, block=layout.block, back=layout.back, group=group, begin=begin, end=end
        )
        summaries = (summarise_clusters(sums, every.top, queries, k.shape[3]) for sums in outside)
        before = span.start - begin * layout.block
        out = read_slices(after(rows, before), k, v, real, summaries, layout, group=group, begin=begin)
        outs.append(without(out, before))
    return placed.restored(outs, causal=False).to(q.dtype)


def _group(numbers: int, blocks: int, k: Tensor) -> int:
    """Number of blocks per step, from the size of one block's summaries."""
    if not tuned_for_cpu(k):
        return min(blocks, held(numbers))
    return min(blocks, _MOST, max(_FEWEST, _GROUP // numbers))
