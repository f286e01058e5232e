"""Window attention on the CPU, forward and backward, as registered operators.

Batched products compute the blocks of a long sequence whose key slices lie inside it. The fused kernel
computes its ends, and the whole of a shorter sequence, many heads and blocks per call; the slices of
consecutive blocks overlap and are views. Memory excluding inputs and outputs is the scratch of one step.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, upcast_dtype, without_autocast
from efficient_attn.ops.operators import check_one_device
from efficient_attn.ops.softmax import cpu_flash
from efficient_attn.ops.window.blocks import (
    BLOCK,
    Backward,
    Band,
    Forward,
    attend_blocks,
    differentiate_blocks,
)
from efficient_attn.ops.window.global_keys import add_gradients, global_keys, merge

# Blocks per kernel call; fewer in the backward pass, where each block has gradients of a slice.
_GROUP, _GROUP_BACK = 16, 4
# Thresholds of the batched products: numbers in q, compared with which the scratch memory is small, and
# blocks in a head, above which one head per step costs less.
_LARGE, _MANY = 2**20, 32
# Largest number of blocks that a backward step can keep for the next step.
_KEPT = 8
# Queries per tile near the ends of the sequence, where slices are truncated and differ.
_EDGE = 128
# Scores of a head up to which a sequence hardly longer than its window is one tile.
_SMALL = 2**18


class Tile(NamedTuple):
    """Blocks of queries and the slices of keys that they read.

    Attributes:
        start: Index of the first query.
        rows: Queries per block.
        blocks: Number of blocks; consecutive blocks are `rows` queries and `rows` keys apart.
        first_key: Index of the first key of the first slice.
        keys: Keys per slice.
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
        """View of the tile's queries, [heads tokens …] as [heads blocks rows …]."""
        return x[:, self.start : self.stop].unflatten(1, (self.blocks, self.rows))

    def slices(self, x: Tensor, heads: int) -> Tensor:
        """Overlapping slices of keys or values, [heads|1 tokens dim] as [heads blocks keys dim]."""
        contiguous_rows = x[:, self.first_key : self.first_key + (self.blocks - 1) * self.rows + self.keys]
        contiguous_rows = upcast(contiguous_rows) if contiguous_rows.is_floating_point() else contiguous_rows
        head, token, dim = contiguous_rows.stride()
        return contiguous_rows.as_strided(
            (heads, self.blocks, self.keys, x.shape[-1]),
            (head if x.shape[0] == heads else 0, self.rows * token, token, dim),
            contiguous_rows.storage_offset(),
        )

    def add(self, whole: Tensor, parts: Tensor) -> None:
        """Add slices [heads blocks keys dim] to their positions in [heads|1 tokens dim]."""
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


@torch.library.custom_op("efficient_attn::window", mutates_args=())
def fused_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    back: int,
    ahead: int,
    scale: float,
    first_k: Tensor | None = None,
    first_v: Tensor | None = None,
    far: Tensor | None = None,
    at: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output [batch heads q_tokens dim] and each row's log-sum-exp [batch heads q_tokens].

    Args:
        first_k, first_v, far, at: `GlobalKeys`, or None.
    """
    first = global_keys(first_k, first_v, far, at)
    # The output of half precision is rounded once, after the global keys.
    dtype = q.dtype if first is None else upcast_dtype(q.dtype)
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
    log_sum = upcast(q.new_empty(0)).new_empty(q.shape[:-1])
    inside = whole_blocks(q.shape[-2], k.shape[-2], back, ahead)
    products = q.numel() >= _LARGE and inside.blocks >= _MANY
    with without_autocast(q):
        if products:
            attend_blocks(Forward(q, k, v, key_mask, out, log_sum), inside, scale)
        for heads, mask in _heads(q, k, v, key_mask):
            queries, keys, values, outs, sums = (heads(x) for x in (q, k, v, out, log_sum))
            for tile, bias in _steps(queries, keys, mask, back, ahead, inside, None if products else _GROUP):
                k_read, v_read = (tile.slices(x, len(queries)) for x in (keys, values))
                some, logarithm = cpu_flash.attend(upcast(tile.queries(queries)), k_read, v_read, bias, scale)
                tile.queries(outs).copy_(some)
                tile.queries(sums).copy_(logarithm)
                del some, logarithm
        if first is not None:
            merge(q, key_mask, first, out, log_sum, back, ahead, scale)
    return out.to(q.dtype), log_sum


@fused_window.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, back: int, ahead: int, scale: float, *first: Any
) -> tuple[Tensor, Tensor]:
    check_one_device(q=q, k=k, v=v, key_mask=key_mask)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), upcast(q.new_empty(0)).new_empty(q.shape[:-1])


@torch.library.custom_op("efficient_attn::window_backward", mutates_args=())
def fused_window_backward(
    grad_out: Tensor,
    out: Tensor,
    log_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    back: int,
    ahead: int,
    scale: float,
    first_k: Tensor | None = None,
    first_v: Tensor | None = None,
    far: Tensor | None = None,
    at: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients with respect to q, k, v, first_k and first_v, the last two empty without keys of their own.

    The weights of the window and of the global keys are recomputed from the log-sum-exps.
    """
    dtype = upcast_dtype(q.dtype)
    grad_q = q.new_empty(q.shape, dtype=dtype)
    # Several blocks read a key; their contributions are summed in float32 or better.
    grad_k, grad_v = (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))
    sums = [grad_q, grad_k, grad_v]
    inside = whole_blocks(q.shape[-2], k.shape[-2], back, ahead)
    products = q.numel() >= _LARGE and inside.blocks >= _MANY and inside.kept <= _KEPT
    with without_autocast(q):
        if products:
            forward = Forward(q, k, v, key_mask, out, log_sum)
            differentiate_blocks(Backward(forward, grad_out, grad_q, grad_k, grad_v), inside, scale)
        for heads, mask in _heads(q, k, v, key_mask):
            queries, keys, values, log_sums = (heads(x) for x in (q, k, v, log_sum))
            grad_outs, outs = heads(grad_out), heads(out)
            group = None if products else _GROUP_BACK
            for tile, bias in _steps(queries, keys, mask, back, ahead, inside, group):
                k_read, v_read = (tile.slices(x, len(queries)) for x in (keys, values))
                some_q, some_k, some_v = cpu_flash.gradients(
                    upcast(tile.queries(grad_outs)),
                    upcast(tile.queries(queries)),
                    k_read,
                    v_read,
                    upcast(tile.queries(outs)),
                    tile.queries(log_sums),
                    bias,
                    scale,
                )
                tile.queries(heads(grad_q)).copy_(some_q)
                tile.add(heads(grad_k), some_k)
                tile.add(heads(grad_v), some_v)
                del some_q, some_k, some_v
        by_first = q.new_empty(0), q.new_empty(0)
        first = global_keys(first_k, first_v, far, at)
        if first is not None:
            by_first = add_gradients(grad_out, out, log_sum, q, first, scale, *sums)
    # One conversion at a time: in half precision all three exist in float32 until here.
    del grad_q, grad_k, grad_v
    grads = sums.pop(0).to(q.dtype), sums.pop(0).to(k.dtype), sums.pop(0).to(v.dtype)
    return *grads, by_first[0].to(k.dtype), by_first[1].to(v.dtype)


@fused_window_backward.register_fake
def _(
    grad_out: Tensor,
    out: Tensor,
    log_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    back: int,
    ahead: int,
    scale: float,
    first_k: Tensor | None = None,
    first_v: Tensor | None = None,
    far: Tensor | None = None,
    at: Tensor | None = None,
) -> tuple[Tensor, ...]:
    first = [q.new_empty(0) if x is None or at is not None else x for x in (first_k, first_v)]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, *first))


def _heads(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor | None]]:
    """Selectors of the heads [heads tokens …] of one kernel call, each with its key mask.

    One selector of all heads if they are evenly strided and there is no mask; otherwise one per batch entry,
    and per group of query heads that share a key head.
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
    queries: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    back: int,
    ahead: int,
    inside: Band,
    group: int | None,
) -> Iterator[tuple[Tile, Tensor | None]]:
    """Tiles, each with its score bias, [rows keys] or [1 blocks rows keys]."""
    before = keys.shape[1] - queries.shape[1]
    known: dict[tuple[int, ...], Tensor | None] = {}
    for tile in tiles(queries.shape[1], keys.shape[1], back, ahead, inside, group):
        alike = (tile.rows, tile.keys, tile.start - tile.first_key)
        if alike not in known:
            known[alike] = window_bias(tile, before, back, ahead, like=queries)
        bias = known[alike]
        if mask is not None:
            visible = tile.slices(mask[None, :, None], 1).mT
            shown = upcast(queries.new_zeros(())) if bias is None else bias
            bias = torch.where(visible, shown, -torch.inf)
        yield tile, bias


def whole_blocks(queries: int, keys: int, back: int, ahead: int) -> Band:
    """Band of the blocks whose slices lie inside the sequence; possibly empty."""
    before = keys - queries
    reach = -(-(back + ahead) // BLOCK) * BLOCK
    begin = max(0, -(-(reach - ahead - before) // BLOCK))
    end = max(begin, (queries - ahead) // BLOCK)
    return Band(begin * BLOCK, end - begin, before + begin * BLOCK + ahead, back + ahead)


def tiles(queries: int, keys: int, back: int, ahead: int, inside: Band, group: int | None) -> Iterator[Tile]:
    """Tiles of all queries: both ends of the sequence, and `group` inner blocks per tile unless None."""
    before = keys - queries
    if group is not None and keys < 2 * (back + ahead) and queries * keys <= _SMALL:
        yield Tile(0, queries, 1, 0, keys)
        return
    begin, end = inside.first, inside.first + inside.blocks * BLOCK
    for first, last in [(0, begin), (end, queries)] if inside.blocks else [(0, queries)]:
        for start in range(first, last, _EDGE):
            stop = min(start + _EDGE, last)
            low, high = max(before + start - back, 0), min(before + stop + ahead, keys)
            yield Tile(start, stop - start, 1, low, high - low)
    if group is not None:
        for block in range(0, inside.blocks, group):
            blocks, read = min(group, inside.blocks - block), inside.read(block, 1)
            yield Tile(inside.queries(block, 1).start, BLOCK, blocks, read.start, inside.width)


def window_bias(tile: Tile, before: int, back: int, ahead: int, like: Tensor) -> Tensor | None:
    """Score bias that masks keys outside the window, 0 or −inf, [rows keys]; None: all keys are inside."""
    lag = before + tile.start - tile.first_key
    if lag <= back - tile.rows + 1 and lag + ahead >= tile.keys - 1:
        return None
    hidden = like.new_full((tile.rows, tile.keys), -torch.inf, dtype=upcast_dtype(like.dtype))
    return hidden.triu(lag + ahead + 1) + hidden.tril(lag - back - 1)
