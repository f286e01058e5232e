"""Softmax of blocks of queries over slices of the keys, and over the summaries of all other keys.

A few blocks are one call of the fused kernel: a cluster summary is an ordinary key with a score bias.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.clusters.summaries import Summary

# Score bias of a masked key: finite, since a gradient multiplies it by zero.
MASKED = -1e30


class Layout(NamedTuple):
    """Layout of the near keys of a query.

    Attributes:
        block: Number of queries that share a slice of keys.
        back: Number of keys of the slice before the block.
        ahead: Number of keys of the slice after the block.
        first: Number of global tokens at the beginning of the sequence, which every query reads.
    """

    block: int
    back: int
    ahead: int
    first: int

    @property
    def width(self) -> int:
        """Number of keys in a slice."""
        return self.block + self.back + self.ahead


def read_slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor,
    summaries: Iterator[Summary],
    layout: Layout,
    *,
    group: int,
    begin: int = 0,
) -> Tensor:
    """Softmax of every block over its slice, the global tokens outside it, and its cluster summaries.

    Args:
        q: Queries from block `begin` on, [batch heads tokens head_dim].
        summaries: [batch kv_heads blocks clusters …], `group` blocks at a time.
    """
    value_dim = v.shape[3]
    slices = near_slices(q, k, v, real, layout, past=False, begin=begin)
    widest = slices.rows.shape[-1]
    out = []
    for some, clusters in zip(slices.split(group), summaries, strict=True):
        far_k = _widened(clusters.k, torch.where(clusters.alive, clusters.bias, MASKED), widest)
        keys, values = some.near(far_k, _padded(clusters.v, widest))
        out.append(_kernel(some.rows, keys, values)[..., :value_dim])
    return in_order(torch.cat(out, dim=2), q, layout)


class Slices(NamedTuple):
    """Blocks of queries with the keys that they read one by one.

    All three have one width, [batch kv_heads blocks … width]. A column of the keys holds their score bias,
    and the queries hold 1 there; further columns are zero.

    Attributes:
        rows: Queries; the rows of the heads that share keys follow one another.
        k: Keys of the slice, and then the global tokens outside it, each [… keys width].
        v: Their values.
    """

    rows: Tensor
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    def split(self, group: int | list[int]) -> "Iterator[Slices]":
        """The same for `group` blocks at a time, or for these numbers of blocks."""
        rows, *parts = (x.split(group, dim=2) for x in (self.rows, *self.k, *self.v))
        for some, *near in zip(rows, *parts, strict=True):
            yield Slices(some, tuple(near[: len(self.k)]), tuple(near[len(self.k) :]))

    def near(self, *far: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values; `far` are keys and values to append."""
        return torch.cat([*self.k, *far[:1]], dim=3), torch.cat([*self.v, *far[1:]], dim=3)


def near_slices(
    q: Tensor, k: Tensor, v: Tensor, real: Tensor, layout: Layout, *, past: bool, begin: int
) -> Slices:
    """Blocks of queries from block `begin` on, with their slices and the global tokens outside them.

    Args:
        past: Whether only the global tokens before a slice are read.
    """
    blocks = -(-q.shape[2] // layout.block)
    widest = max(k.shape[3], v.shape[3]) + 1
    near_real = _stretch(real[:, None, :, None], begin, blocks, layout)
    near_k = _widened(_stretch(k, begin, blocks, layout), _bias(near_real, k), widest)
    near_v = _padded(_stretch(v, begin, blocks, layout), widest)
    near_k, near_v = (x.unfold(2, layout.width, layout.block).mT for x in (near_k, near_v))
    rows = _widened(F.pad(q, (0, 0, 0, blocks * layout.block - q.shape[2])), q.new_ones(()), widest)
    rows = rows.unflatten(1, (k.shape[1], -1)).unflatten(3, (blocks, layout.block)).transpose(2, 3)
    if not layout.first:
        return Slices(rows.flatten(3, 4), (near_k,), (near_v,))
    outside = _outside(real, begin, blocks, layout, past=past)
    few_k, few_v = (x[:, :, None, : layout.first].expand(-1, -1, blocks, -1, -1) for x in (k, v))
    few_k, few_v = _widened(few_k, _bias(outside, k), widest), _padded(few_v, widest)
    return Slices(rows.flatten(3, 4), (near_k, few_k), (near_v, few_v))


def in_order(out: Tensor, q: Tensor, layout: Layout) -> Tensor:
    """Outputs of the rows of all blocks, [batch kv_heads blocks rows dim], in the order of q."""
    heads = q.shape[1] // out.shape[1]
    found = out.unflatten(3, (heads, layout.block)).transpose(2, 3)
    return found.flatten(3, 4)[:, :, :, : q.shape[2]].flatten(1, 2)


def _outside(real: Tensor, begin: int, blocks: int, layout: Layout, *, past: bool) -> Tensor:
    """Global tokens outside the slice of each block, before it if `past`, bool [batch 1 blocks first 1]."""
    first = torch.arange(real.shape[1], device=real.device)[: layout.first]
    start = torch.arange(begin, begin + blocks, device=real.device)[:, None] * layout.block
    outside = first < start - layout.back
    if not past:
        outside |= first >= start + layout.block + layout.ahead
    return (outside & real[:, None, : layout.first])[:, None, ..., None]


def _stretch(x: Tensor, begin: int, blocks: int, layout: Layout) -> Tensor:
    """Tokens from the first to the last slice of some blocks, with zeros outside the sequence."""
    low, high = begin * layout.block - layout.back, (begin + blocks) * layout.block + layout.ahead
    return F.pad(x[:, :, max(low, 0) : high], (0, 0, max(-low, 0), max(high - x.shape[2], 0)))


def _bias(visible: Tensor, like: Tensor) -> Tensor:
    """0 where visible, else the bias of a masked key."""
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, MASKED)


def _widened(x: Tensor, column: Tensor, width: int) -> Tensor:
    """`x` [… dim] with an extra column [… 1] and zero columns up to the width."""
    return _padded(torch.cat([x, column.expand(*x.shape[:-1], 1)], dim=-1), width)


def _padded(x: Tensor, width: int) -> Tensor:
    """`x` with zero columns up to the width; F.pad would copy even without any."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _kernel(rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Fused attention of [batch heads blocks …]; the rows of several heads follow one another in a block."""
    q, k, v = (x.flatten(0, 1) for x in (rows, keys, values))
    out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return out.unflatten(0, rows.shape[:2])
