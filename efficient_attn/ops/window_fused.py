"""Window attention through the fused kernel of the CPU, forward and backward, as registered operators.

Consecutive blocks of queries read slices of the keys that overlap. The slices are views: nothing is copied,
and the kernel keeps the scores of a block to itself, so what exists beyond inputs and outputs is one group
of blocks. Products cost (block + window) / window times the least that is possible.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops import flash
from efficient_attn.ops.precision import wide, without_autocast

# Queries that share one slice of keys, and blocks that go through the kernel at once: fewer on the way
# back, where each block has derivatives of a whole slice.
_BLOCK, _GROUP, _GROUP_BACK = 32, 16, 4
# Queries at once near the ends of the sequence, where slices are cut off and no two are alike.
_EDGE = 128


class Piece(NamedTuple):
    """Blocks of queries and the slices of keys that they read.

    Attributes:
        start: The first query.
        rows: Queries in a block.
        blocks: How many; each begins `rows` queries, and as many keys, after the one before.
        first_key: The first key of the first slice.
        keys: Keys in a slice.
    """

    start: int
    rows: int
    blocks: int
    first_key: int
    keys: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.blocks

    def queries(self, x: Tensor) -> Tensor:
        """What belongs to the queries, [heads tokens …] as [heads blocks rows …], a view."""
        return x[:, self.start : self.stop].unflatten(1, (self.blocks, self.rows))

    def slices(self, x: Tensor, heads: int) -> Tensor:
        """The slices of keys or values, [heads|1 tokens dim] as [heads blocks keys dim], overlapping."""
        run = x[:, self.first_key : self.first_key + (self.blocks - 1) * self.rows + self.keys]
        run = wide(run) if run.is_floating_point() else run
        head, token, dim = run.stride()
        return run.as_strided(
            (heads, self.blocks, self.keys, x.shape[-1]),
            (head if x.shape[0] == heads else 0, self.rows * token, token, dim),
            run.storage_offset(),
        )

    def add(self, whole: Tensor, parts: Tensor) -> None:
        """Add slices [heads blocks keys dim] to where they were read from, [heads|1 tokens dim]."""
        if whole.shape[0] != parts.shape[0]:
            parts = parts.sum(dim=0, keepdim=True)
        for column in range(0, self.keys, self.rows):
            part = parts[:, :, column : column + self.rows]
            start = self.first_key + column
            target = whole[:, start : start + (self.blocks - 1) * self.rows + part.shape[2]]
            if self.blocks == 1:
                target += part[:, 0]
            else:
                target.unflatten(1, (self.blocks, self.rows)).add_(part)


def pieces(queries: int, keys: int, back: int, ahead: int, group: int) -> Iterator[Piece]:
    """All queries, each once: groups of whole blocks, and what is left at both ends of the sequence."""
    before = keys - queries
    # As many keys as make whole blocks, so that slices can be added block by block.
    reach = -(-(back + ahead) // _BLOCK) * _BLOCK
    begin = max(0, -(-(reach - ahead - before) // _BLOCK))
    end = max(begin, (queries - ahead) // _BLOCK)
    edges = [(0, queries)] if begin == end else [(0, begin * _BLOCK), (end * _BLOCK, queries)]
    for first, last in edges:
        for start in range(first, last, _EDGE):
            stop = min(start + _EDGE, last)
            low, high = max(before + start - back, 0), min(before + stop + ahead, keys)
            yield Piece(start, stop - start, 1, low, high - low)
    for block in range(begin, end, group):
        start, blocks = block * _BLOCK, min(group, end - block)
        yield Piece(start, _BLOCK, blocks, before + start + ahead - reach, reach + _BLOCK)


def window_bias(piece: Piece, before: int, back: int, ahead: int, like: Tensor) -> Tensor | None:
    """What hides keys outside the window from a block's rows, 0 or −inf, [rows keys]; None: nothing does."""
    lag = before + piece.start - piece.first_key
    if lag <= back - piece.rows + 1 and lag + ahead >= piece.keys - 1:
        return None
    outside = like.new_ones(piece.rows, piece.keys, dtype=torch.bool)
    outside = outside.triu(lag + ahead + 1) | outside.tril(lag - back - 1)
    return wide(like.new_zeros(())).masked_fill(outside, -torch.inf)


@torch.library.custom_op("efficient_attn::window", mutates_args=())
def fused_window(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, back: int, ahead: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The output [batch heads q_tokens dim] and each row's log-sum-exp [batch heads q_tokens]."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    log_sum = wide(q.new_empty(0)).new_empty(q.shape[:-1])
    with without_autocast(q):
        for heads, mask in _heads(q, k, v, key_mask):
            queries, keys, values, outs, sums = (heads(x) for x in (q, k, v, out, log_sum))
            for piece, bias in _steps(queries, keys, mask, back, ahead, _GROUP):
                k_read, v_read = (piece.slices(x, len(queries)) for x in (keys, values))
                some, logarithm = flash.attend(wide(piece.queries(queries)), k_read, v_read, bias, scale)
                piece.queries(outs).copy_(some)
                piece.queries(sums).copy_(logarithm)
                del some, logarithm
    return out, log_sum


@fused_window.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, back: int, ahead: int, scale: float
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), wide(q.new_empty(0)).new_empty(q.shape[:-1])


@torch.library.custom_op("efficient_attn::window_backward", mutates_args=())
def fused_window_backward(
    gradient: Tensor,
    out: Tensor,
    log_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    back: int,
    ahead: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives by q, k and v; the weights of a group of blocks are made anew from the log-sum-exps."""
    by_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    # A key is read by several blocks, whose parts are summed in float32 or better.
    by_k, by_v = (torch.zeros_like(wide(x), memory_format=torch.contiguous_format) for x in (k, v))
    with without_autocast(q):
        for heads, mask in _heads(q, k, v, key_mask):
            queries, keys, values, sums = (heads(x) for x in (q, k, v, log_sum))
            given, outs = heads(gradient), heads(out)
            for piece, bias in _steps(queries, keys, mask, back, ahead, _GROUP_BACK):
                k_read, v_read = (piece.slices(x, len(queries)) for x in (keys, values))
                some_q, some_k, some_v = flash.gradients(
                    wide(piece.queries(given)),
                    wide(piece.queries(queries)),
                    k_read,
                    v_read,
                    wide(piece.queries(outs)),
                    piece.queries(sums),
                    bias,
                    scale,
                )
                piece.queries(heads(by_q)).copy_(some_q)
                piece.add(heads(by_k), some_k)
                piece.add(heads(by_v), some_v)
                del some_q, some_k, some_v
    return by_q, by_k.to(k.dtype), by_v.to(v.dtype)


@fused_window_backward.register_fake
def _(gradient: Tensor, out: Tensor, log_sum: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])


def _heads(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor | None]]:
    """How to take out the heads [heads tokens …] that go through the kernel together, and their key mask.

    All at once where they lie evenly in memory and no mask tells the batch's entries apart; where heads
    of queries share one of keys, those.
    """
    batch, kv_heads = k.shape[:2]
    grouped = q.shape[1] != kv_heads
    if not grouped and key_mask is None and all(_even(x) for x in (q, k, v)):
        yield _all, None
        return
    for entry in range(batch):
        mask = None if key_mask is None else key_mask[entry]
        for group in range(kv_heads) if grouped else (0,):
            yield partial(_some, entry=entry, group=group, groups=kv_heads if grouped else 1), mask


def _all(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def _some(x: Tensor, entry: int, group: int, groups: int) -> Tensor:
    return x[entry].chunk(groups)[group]


def _even(x: Tensor) -> bool:
    return x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _steps(
    queries: Tensor, keys: Tensor, mask: Tensor | None, back: int, ahead: int, group: int
) -> Iterator[tuple[Piece, Tensor | None]]:
    """The pieces, and what is added to the scores of each, [rows keys] or [1 blocks rows keys]."""
    before = keys.shape[1] - queries.shape[1]
    known: dict[tuple[int, ...], Tensor | None] = {}
    for piece in pieces(queries.shape[1], keys.shape[1], back, ahead, group):
        alike = (piece.rows, piece.keys, piece.start - piece.first_key)
        if alike not in known:
            known[alike] = window_bias(piece, before, back, ahead, like=queries)
        bias = known[alike]
        if mask is not None:
            visible = piece.slices(mask[None, :, None], 1).mT
            shown = wide(queries.new_zeros(())) if bias is None else bias
            bias = torch.where(visible, shown, -torch.inf)
        yield piece, bias
