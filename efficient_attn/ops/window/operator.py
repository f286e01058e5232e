"""Window attention on the CPU, forward and backward, as registered operators.

Batched products compute the blocks of a long sequence whose key slices lie inside it. The fused kernel
computes its ends, and the whole of a shorter sequence, many heads and blocks per call; the slices of
consecutive blocks overlap and are views. Memory excluding inputs and outputs is the scratch of one step.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, upcast_dtype, without_autocast
from efficient_attn.ops.operators import check_one_device
from efficient_attn.ops.softmax import cpu_flash
from efficient_attn.ops.window.blocks import Band, Forward, attend_blocks
from efficient_attn.ops.window.blocks_backward import Backward, differentiate_blocks
from efficient_attn.ops.window.global_keys import add_gradients, global_keys, merge
from efficient_attn.ops.window.tiles import Tile, tiles, whole_blocks, window_bias

# Blocks per kernel call; fewer in the backward pass, where each block has gradients of a slice.
_GROUP, _GROUP_BACK = 16, 4
# Thresholds of the batched products: numbers in q, compared with which the scratch memory is small, and
# blocks in a head, above which one head per step costs less.
_LARGE, _MANY = 2**20, 32
# Largest number of blocks that a backward step can keep for the next step.
_KEPT = 8


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

    The weights of window and global keys alike are recomputed from the log-sum-exps.
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
