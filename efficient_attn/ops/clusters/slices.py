"""Queries at their positions, and the slices of near keys that their blocks read."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.paths import step_capacity, tuned_for_cpu

# Numbers per step on the CPU in the keys and values of the heads, so that they stay in cache.
_HEADS = 1 << 20
# Score bias of a masked key: finite, since a gradient multiplies it by zero.
MASKED = -1e30


class Alignment(NamedTuple):
    """Queries, and keys of which the first is real in every batch entry that has a real one.

    Attributes:
        q: [batch heads queries head_dim].
        k: [batch kv_heads tokens head_dim], zero where masked.
        v: [batch kv_heads tokens value_dim], zero where masked.
        real: Whether a key is real, bool [batch tokens].
        positions: Positions of consecutive queries among the keys, in the order of q.
        shift: Number of tokens before the first real one, which were rotated to the end with their queries,
            [batch]; None: nothing was rotated.
        queries: Number of queries of the call, the last tokens if anything was rotated.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor
    positions: Sequence[range]
    shift: Tensor | None
    queries: int

    def runs(self) -> Iterator[tuple[Tensor, range]]:
        """Consecutive queries with their positions."""
        # A split has an operator of its own in the backward pass.
        single = len(self.positions) == 1
        parts = (self.q,) if single else self.q.split([len(span) for span in self.positions], dim=2)
        return zip(parts, self.positions, strict=True)

    def counted(self, first: int) -> Tensor:
        """Whether a key belongs to clusters, bool [batch tokens]; the first tokens do not."""
        return self.real & (torch.arange(self.real.shape[1], device=self.real.device) >= first)

    def real_queries(self) -> Tensor:
        """Whether a query is that of a real token, bool [batch queries]."""
        return torch.cat([self.real[:, span.start : span.stop] for span in self.positions], dim=1)

    def restored(self, outs: list[Tensor], *, causal: bool) -> Tensor:
        """Outputs of the queries of the call, from the outputs of `runs`."""
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
        if self.shift is None:
            return out
        out = _turn(out, -self.shift)
        if causal:
            # Padding before the first real token was rotated to the end.
            padding = torch.arange(out.shape[2], device=out.device) < self.shift[:, None]
            out = out.masked_fill(padding[:, None, :, None], 0.0)
        return out[:, :, out.shape[2] - self.queries :]


def alignment(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, positions: Sequence[range] | None
) -> Alignment:
    """The queries of a call at their positions, with keys and values in float32 or better.

    Args:
        positions: Positions of consecutive queries, where every first key is real if any is; None: the
            queries are the last tokens.
    """
    k, v = upcast(zero_masked(k, key_mask)), upcast(zero_masked(v, key_mask))
    tokens, queries = k.shape[2], q.shape[2]
    last = [range(tokens - queries, tokens)]
    if key_mask is None:
        real = torch.ones(k.shape[0], tokens, dtype=torch.bool, device=k.device)
        return Alignment(q, k, v, real, positions or last, None, queries)
    if positions is not None:
        return Alignment(q, k, v, key_mask, positions, None, queries)
    # A mask may put the queries anywhere.
    q, shift = F.pad(q, (0, 0, tokens - queries, 0)), key_mask.long().argmax(dim=-1)
    q, k, v = (_turn(x, shift) for x in (q, k, v))
    real = _turn(key_mask[:, None, :, None], shift)[:, 0, :, 0]
    return Alignment(q, k, v, real, [range(tokens)], shift, queries)


def alike(mask: Tensor) -> list[tuple[slice, int]]:
    """Neighbouring batch entries with one first real token, and this token; the number of tokens: none."""
    first = torch.where(mask.any(dim=1), mask.long().argmax(dim=1), mask.shape[1]).tolist()
    groups, begin = [], 0
    for start, entries in groupby(first):
        end = begin + len(list(entries))
        groups.append((slice(begin, end), start))
        begin = end
    return groups


def after(x: Tensor, tokens: int) -> Tensor:
    """`x` after so many empty tokens."""
    return F.pad(x, (0, 0, tokens, 0)) if tokens else x


def without(x: Tensor, tokens: int) -> Tensor:
    """`x` without its first tokens; a slice of all would be an operator of its own in the backward pass."""
    return x[:, :, tokens:] if tokens else x


def _turn(x: Tensor, by: Tensor) -> Tensor:
    """`x` rotated along the tokens: token i of the result is token i + by of x."""
    index = (torch.arange(x.shape[2], device=x.device) + by[:, None]) % x.shape[2]
    return x.gather(2, index[:, None, :, None].expand_as(x))


def by_heads(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *, stages: int = 1) -> Tensor:
    """Outputs, with as many heads per step as fit in cache, or in memory on other devices.

    Args:
        stages: Number of stages of `attend`, one after the other.
    """
    numbers = k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]) // stages
    heads = max(1, _HEADS // numbers) if tuned_for_cpu(k) else step_capacity(numbers)
    if heads >= k.shape[1]:
        return attend(q, k, v)
    rows = heads * (q.shape[1] // k.shape[1])
    parts = zip(q.split(rows, dim=1), k.split(heads, dim=1), v.split(heads, dim=1), strict=True)
    return torch.cat([attend(*part) for part in parts], dim=1)


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
        for part, *near in zip(rows, *parts, strict=True):
            yield Slices(part, tuple(near[: len(self.k)]), tuple(near[len(self.k) :]))

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
    near_k = biased_rows(_stretch(k, begin, blocks, layout), _bias(near_real, k), widest)
    near_v = padded_rows(_stretch(v, begin, blocks, layout), widest)
    near_k, near_v = (x.unfold(2, layout.width, layout.block).mT for x in (near_k, near_v))
    rows = biased_rows(F.pad(q, (0, 0, 0, blocks * layout.block - q.shape[2])), q.new_ones(()), widest)
    rows = rows.unflatten(1, (k.shape[1], -1)).unflatten(3, (blocks, layout.block)).transpose(2, 3)
    if not layout.first:
        return Slices(rows.flatten(3, 4), (near_k,), (near_v,))
    outside = _outside(real, begin, blocks, layout, past=past)
    few_k, few_v = (x[:, :, None, : layout.first].expand(-1, -1, blocks, -1, -1) for x in (k, v))
    few_k, few_v = biased_rows(few_k, _bias(outside, k), widest), padded_rows(few_v, widest)
    return Slices(rows.flatten(3, 4), (near_k, few_k), (near_v, few_v))


def aligned(at: Tensor, tokens: int, key_mask: Tensor | None) -> Tensor:
    """Positions of tokens in an `Alignment`, [batch tokens], or [1 tokens] without a mask."""
    shift = 0 if key_mask is None else key_mask.long().argmax(dim=1, keepdim=True)
    return (at[None] - shift) % tokens


def near_keys(layout: Layout, at: Tensor, tokens: int, key_mask: Tensor | None) -> Tensor:
    """Keys in the slices of aligned queries `at` positions, and global tokens, bool [batch rows tokens]."""
    keys = aligned(torch.arange(tokens, device=at.device), tokens, key_mask)[:, None]
    offset = keys - (at // layout.block * layout.block)[..., None]
    return (offset >= -layout.back) & (offset < layout.block + layout.ahead) | (keys < layout.first)


def in_order(out: Tensor, q: Tensor, layout: Layout) -> Tensor:
    """Outputs of the rows of all blocks, [batch kv_heads blocks rows dim], in the order of q."""
    heads = q.shape[1] // out.shape[1]
    rows = out.unflatten(3, (heads, layout.block)).transpose(2, 3)
    return rows.flatten(3, 4)[:, :, :, : q.shape[2]].flatten(1, 2)


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


def biased_rows(x: Tensor, column: Tensor, width: int) -> Tensor:
    """`x` [… dim] with an extra column [… 1] and zero columns up to the width."""
    return padded_rows(torch.cat([x, column.expand(*x.shape[:-1], 1)], dim=-1), width)


def padded_rows(x: Tensor, width: int) -> Tensor:
    """`x` with zero columns up to the width; F.pad would copy even without any."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
