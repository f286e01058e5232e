"""Softmax over near keys one by one and over far keys by cluster, in one call of the fused kernel.

A block of queries reads one slice of keys, half a block more on each side; causal, the block before and its
own past. What lies outside the slice is summed per cluster, so every key counts once for every query.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters import kmeans, segments
from efficient_attn.ops.far import Far, beyond_slices, members, query_moments, summarise_clusters
from efficient_attn.ops.past import past_segments
from efficient_attn.ops.precision import hide, wide
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values

# Hides a key by what is added to its score. Finite: a gradient multiplies it by zero.
_HIDDEN = -1e30
# Numbers in the sums of the heads, and in the summaries of the blocks, that are worked on at once: little
# enough to stay in cache.
_HEADS, _GROUP = 1 << 20, 1 << 20
_FEWEST, _MOST = 2, 16


class Layout(NamedTuple):
    """Where the near keys of a query lie.

    Attributes:
        block: Queries that share a slice of keys.
        back: Keys of the slice before the block.
        ahead: And after it.
        first: Tokens at the beginning of the sequence that every query reads.
    """

    block: int
    back: int
    ahead: int
    first: int

    @property
    def width(self) -> int:
        """Keys of a slice."""
        return self.block + self.back + self.ahead

    @property
    def cell(self) -> int:
        """Tokens of the smallest segment of a past: half a block, of which slices are made."""
        return max(self.block // 2, 1)


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
) -> Output:
    """Softmax attention in which a cluster of far keys is read as one, for queries of the same tokens.

    Args:
        steps: Of k-means; None takes segments of the sequence for clusters.
    """
    heads = max(1, _HEADS // (k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3])))
    group = q.shape[1] // k.shape[1]
    parts = zip(q.split(heads * group, dim=1), k.split(heads, dim=1), v.split(heads, dim=1), strict=True)
    out = [_some_heads(*part, scale, layout, clusters, steps, key_mask) for part in parts]
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def _some_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    layout: Layout,
    clusters: int,
    steps: int | None,
    key_mask: Tensor | None,
) -> Tensor:
    """The same for a few heads, whose sums are at hand together."""
    dtype = q.dtype
    q, k, v, real, turned = _from_first_real(
        wide(q) * scale, wide(hide(k, key_mask)), wide(hide(v, key_mask)), key_mask
    )
    queries = query_moments(q.unflatten(1, (k.shape[1], -1)), None if turned is None else real)
    clusters = min(clusters, k.shape[2])
    if steps is None:
        chosen = segments(real, clusters)[:, None].expand(k.shape[:3])
    else:
        chosen = kmeans(k.detach(), real, clusters, steps)
    counted = real & (torch.arange(k.shape[2], device=k.device) >= layout.first)
    every = members(k, v, counted, chosen, queries, clusters)
    group = _group(every.top.numel() * every.rows.shape[3], -(-k.shape[2] // layout.block))
    far = (
        summarise_clusters(sums, every.top, queries, k.shape[3])
        for sums in beyond_slices(every, block=layout.block, back=layout.back, group=group)
    )
    out = _read(q, k, v, real, far, layout, group=group)
    return _turn_back(out, turned).to(dtype)


def window_segments(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    layout: Layout,
    clusters: int,
    key_mask: KeyMask | None,
) -> Output:
    """The same with a past only, whose segments are those that lie wholly before the slice."""
    dtype, before = q.dtype, k.shape[2] - q.shape[2]
    # Blocks are those of the keys: the queries are their last positions, and with a mask in any block.
    begin = before // layout.block if key_mask is None else 0
    q = F.pad(wide(q) * scale, (0, 0, before - begin * layout.block, 0))
    q, k, v, real, turned = _from_first_real(q, wide(hide(k, key_mask)), wide(hide(v, key_mask)), key_mask)
    position = torch.arange(k.shape[2], device=k.device)
    starts = [max(start - layout.back, 0) for start in range(0, k.shape[2], layout.block)][begin:]
    group = _group(k.shape[0] * k.shape[1] * clusters * (k.shape[3] + v.shape[3]), len(starts))
    far = past_segments(
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
    out = _read(q, k, v, real, far, layout, group=group, visible=visible, begin=begin)
    out = _turn_back(out, turned)
    if turned is not None:
        # Padding before the first real token was last when it was read.
        out = out.masked_fill((position < turned[:, None])[:, None, :, None], 0.0)
    return out[:, :, before - begin * layout.block :].to(dtype)


def _group(numbers: int, blocks: int) -> int:
    """Blocks that are worked on at once, by the numbers in the summaries of one."""
    return min(blocks, _MOST, max(_FEWEST, _GROUP // numbers))


def _from_first_real(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """With the first real token first, whatever padding stood before it, and how far they were turned."""
    if key_mask is None:
        return q, k, v, torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device), None
    turned = key_mask.long().argmax(dim=-1)
    q, k, v = (_turn(x, turned) for x in (q, k, v))
    return q, k, v, _turn(key_mask[:, None, :, None], turned)[:, 0, :, 0], turned


def _turn(x: Tensor, by: Tensor) -> Tensor:
    """Token i of the result is token i + by of x, and what stood before comes last."""
    index = (torch.arange(x.shape[2], device=x.device) + by[:, None]) % x.shape[2]
    return x.gather(2, index[:, None, :, None].expand_as(x))


def _turn_back(x: Tensor, turned: Tensor | None) -> Tensor:
    return x if turned is None else _turn(x, -turned)


def _read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor,
    far: Iterator[Far],
    layout: Layout,
    *,
    group: int,
    visible: Tensor | None = None,
    begin: int = 0,
) -> Tensor:
    """Softmax of every block over its slice, the first tokens outside it, and its clusters.

    Args:
        q: [batch heads tokens head_dim], those from block `begin` on.
        far: [batch kv_heads blocks clusters …], so many blocks at a time as `group` says.
        visible: Which keys of the slice each row of a block may read, bool [block keys], and then none after
            the slice; None: all.
    """
    tokens, blocks, value_dim = q.shape[2], -(-q.shape[2] // layout.block), v.shape[3]
    # A bias stands in one more column of the keys, which queries meet with a 1; all are made equally wide.
    widest = max(k.shape[3], value_dim) + 1
    first = torch.arange(k.shape[2], device=k.device)[: layout.first]
    start = torch.arange(begin, begin + blocks, device=k.device)[:, None] * layout.block
    outside = first < start - layout.back
    if visible is None:
        outside |= first >= start + layout.block + layout.ahead
    outside = (outside & real[:, None, : layout.first])[:, None, ..., None]
    few_k, few_v = (x[:, :, None, : layout.first].expand(-1, -1, blocks, -1, -1) for x in (k, v))
    few_k, few_v = _widened(few_k, _bias(outside, k), widest), _padded(few_v, widest)
    near_real = _stretch(real[:, None, :, None], begin, blocks, layout)
    near_k = _widened(_stretch(k, begin, blocks, layout), _bias(near_real, k), widest)
    near_v = _padded(_stretch(v, begin, blocks, layout), widest)
    near_k, near_v = (x.unfold(2, layout.width, layout.block).mT for x in (near_k, near_v))
    rows = _widened(F.pad(q, (0, 0, 0, blocks * layout.block - tokens)), q.new_ones(()), widest)
    # Rows of the heads that read the same keys stand together: [batch kv_heads blocks rows widest].
    rows = rows.unflatten(1, (k.shape[1], -1)).unflatten(3, (blocks, layout.block)).transpose(2, 3)
    heads = rows.shape[3]
    parts = (x.split(group, dim=2) for x in (rows.flatten(3, 4), near_k, near_v, few_k, few_v))
    out = []
    for some, one_k, one_v, first_k, first_v, clusters in zip(*parts, far, strict=True):
        far_k = _widened(clusters.k, torch.where(clusters.alive, clusters.bias, _HIDDEN), widest)
        keys = torch.cat([one_k, first_k, far_k], dim=3)
        values = torch.cat([one_v, first_v, _padded(clusters.v, widest)], dim=3)
        mask = None if visible is None else F.pad(visible, (0, keys.shape[3] - layout.width), value=True)
        out.append(_kernel(some, keys, values, mask)[..., :value_dim])
    found = torch.cat(out, dim=2).unflatten(3, (heads, layout.block)).transpose(2, 3)
    return found.flatten(3, 4)[:, :, :, :tokens].flatten(1, 2)


def _stretch(x: Tensor, begin: int, blocks: int, layout: Layout) -> Tensor:
    """All that is in the slices of some blocks, zeros where the sequence has ended or not begun."""
    low, high = begin * layout.block - layout.back, (begin + blocks) * layout.block + layout.ahead
    return F.pad(x[:, :, max(low, 0) : high], (0, 0, max(-low, 0), max(high - x.shape[2], 0)))


def _bias(visible: Tensor, like: Tensor) -> Tensor:
    """0 where visible, else what hides."""
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, _HIDDEN)


def _widened(x: Tensor, column: Tensor, width: int) -> Tensor:
    """`x` [… dim] with a column more, [… 1], and zeros up to the width."""
    return _padded(torch.cat([x, column.expand(*x.shape[:-1], 1)], dim=-1), width)


def _padded(x: Tensor, width: int) -> Tensor:
    """Zeros up to the width; F.pad copies even where none are wanted."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _kernel(rows: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """Fused attention of [batch heads blocks …]; rows of several heads follow each other in a block."""
    if visible is not None:
        visible = visible.repeat(rows.shape[3] // visible.shape[0], 1)
    q, k, v = (x.flatten(0, 1) for x in (rows, keys, values))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=1.0)
    return out.unflatten(0, rows.shape[:2])
