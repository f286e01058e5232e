"""Softmax of blocks of queries over slices of the keys and over what stands for the rest of them.

All of it is one call of the fused kernel for a few blocks: a summary is a key like another, with a bias.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.summaries import Summary

# Hides a key by what is added to its score. Finite: a gradient multiplies it by zero.
_MASKED = -1e30


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


def read_slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor,
    summaries: Iterator[Summary],
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
    for some, one_k, one_v, first_k, first_v, clusters in zip(*parts, summaries, strict=True):
        far_k = _widened(clusters.k, torch.where(clusters.alive, clusters.bias, _MASKED), widest)
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
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, _MASKED)


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
