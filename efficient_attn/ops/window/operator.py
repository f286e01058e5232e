"""Window attention on the CPU, forward and backward, as registered operators.

The fused kernel computes many heads and blocks of queries per call. The slices of keys that consecutive
blocks read overlap and are views. Memory excluding inputs and outputs is the scratch of one call.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, upcast_dtype, without_autocast
from efficient_attn.ops.operators import check_one_device, operator
from efficient_attn.ops.softmax import cpu_flash
from efficient_attn.ops.window.global_keys import WindowInputs, add_gradients, global_keys_of, merge

# Queries per block, and blocks of all heads per kernel call. Larger blocks read more keys outside the window,
# but their slices overlap less, so the backward pass adds up fewer gradients.
_BLOCK, BLOCKS = 32, 128
_BLOCK_BACK, BLOCKS_BACK = 64, 24
# Most keys that a query reads in addition to itself for which small blocks make gradients faster.
_SHORT, BLOCKS_SHORT = 256, 64
# Queries per tile near the ends of the sequence, where slices are truncated and differ.
_EDGE = 128
# Scores of a head up to which a sequence hardly longer than its window is one tile.
_SMALL = 2**18


class WindowTile(NamedTuple):
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


# The fields of `WindowInputs`.
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? key_mask, int back, int ahead, float scale, "
    "Tensor? first_k=None, Tensor? first_v=None, Tensor? far=None, Tensor? at=None"
)


@operator("window", f"({_SCHEMA}) -> (Tensor, Tensor)")
def fused_window(*fields: Any) -> tuple[Tensor, Tensor]:
    """The output [batch heads q_tokens dim] and each row's log-sum-exp [batch heads q_tokens]."""
    inputs = WindowInputs(*fields)
    (q, k, v, key_mask, back, ahead, scale), first = inputs[:7], global_keys_of(inputs)
    back, ahead = min(back, k.shape[2]), min(ahead, k.shape[2])
    # The output of half precision is rounded once, after the global keys.
    dtype = q.dtype if first is None else upcast_dtype(q.dtype)
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
    log_sum = upcast(q.new_empty(0)).new_empty(q.shape[:-1])
    with without_autocast(q):
        for heads, mask in _heads(q, k, v, key_mask):
            queries, keys, values, outs, sums = (heads(x) for x in (q, k, v, out, log_sum))
            for tile, bias in _steps(queries, keys, mask, back, ahead, _BLOCK, BLOCKS):
                k_read, v_read = (tile.slices(x, len(queries)) for x in (keys, values))
                rows, logarithm = cpu_flash.flash_rows(
                    upcast(tile.queries(queries)), k_read, v_read, bias, scale
                )
                tile.queries(outs).copy_(rows)
                tile.queries(sums).copy_(logarithm)
                del rows, logarithm
        if first is not None:
            merge(inputs._replace(back=back, ahead=ahead), first, out, log_sum)
    return out.to(q.dtype), log_sum


@torch.library.register_fake(fused_window)
def _(*fields: Any) -> tuple[Tensor, Tensor]:
    inputs = WindowInputs(*fields)
    check_one_device(**inputs._asdict())
    log_sum = upcast(inputs.q.new_empty(0)).new_empty(inputs.q.shape[:-1])
    return inputs.q.new_empty(*inputs.q.shape[:-1], inputs.v.shape[-1]), log_sum


@operator(
    "window_backward",
    f"(Tensor grad_out, Tensor out, Tensor log_sum, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def fused_window_backward(grad_out: Tensor, out: Tensor, log_sum: Tensor, *fields: Any) -> tuple[Tensor, ...]:
    """Gradients with respect to q, k, v, first_k and first_v, the last two empty without keys of their own.

    The weights of the window and of the global keys are recomputed from the log-sum-exps.
    """
    inputs = WindowInputs(*fields)
    (q, k, v, key_mask, back, ahead, scale), first = inputs[:7], global_keys_of(inputs)
    back, ahead = min(back, k.shape[2]), min(ahead, k.shape[2])
    dtype = upcast_dtype(q.dtype)
    # Several blocks read a key; their contributions are summed in float32 or better.
    sums = [q.new_empty(q.shape, dtype=dtype), *(x.new_zeros(x.shape, dtype=dtype) for x in (k, v))]
    with without_autocast(q):
        for heads, mask in _heads(q, k, v, key_mask):
            tensors = (heads(x) for x in (grad_out, q, out, log_sum, sums[0], k, v, *sums[1:]))
            _add_gradients([*tensors], mask, back, ahead, scale)
        by_first = q.new_empty(0), q.new_empty(0)
        if first is not None:
            by_first = add_gradients(q, first, scale, (grad_out, out, log_sum), sums)
    # One conversion at a time: in half precision all three exist in float32 until here.
    grads = sums.pop(0).to(q.dtype), sums.pop(0).to(k.dtype), sums.pop(0).to(v.dtype)
    return *grads, by_first[0].to(k.dtype), by_first[1].to(v.dtype)


@torch.library.register_fake(fused_window_backward)
def _(grad_out: Tensor, out: Tensor, log_sum: Tensor, *fields: Any) -> tuple[Tensor, ...]:
    inputs = WindowInputs(*fields)
    empty = inputs.first_k is None or inputs.at is not None
    first = [inputs.q.new_empty(0)] * 2 if empty else inputs[7:9]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*inputs[:3], *first))


def _add_gradients(tensors: list[Tensor], mask: Tensor | None, back: int, ahead: int, scale: float) -> None:
    """Write the query gradients of heads [heads tokens …], and add to the key and value gradients.

    Args:
        tensors: Output gradients, q, outputs, log-sum-exps, gradients of q, then k, v and their gradients.
    """
    queries, keys = tensors[1], tensors[5]
    size = (_BLOCK, BLOCKS_SHORT) if back + ahead <= _SHORT else (_BLOCK_BACK, BLOCKS_BACK)
    for tile, bias in _steps(queries, keys, mask, back, ahead, *size):
        grad_out, q, out, log_sum, grad_q = (upcast(tile.queries(x)) for x in tensors[:5])
        k, v = (tile.slices(x, len(queries)) for x in tensors[5:7])
        some_q, some_k, some_v = cpu_flash.gradients(grad_out, q, k, v, out, log_sum, bias, scale)
        grad_q.copy_(some_q)
        tile.add(tensors[7], some_k)
        tile.add(tensors[8], some_v)
        del grad_out, q, out, k, v, some_q, some_k, some_v


def _heads(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor | None]]:
    """Selectors of the heads [heads tokens …] of one kernel call, each with its key mask.

    One selector of all heads if they are evenly strided and there is no mask; otherwise one per batch entry,
    and per group of query heads that share a key head.
    """
    batch, kv_heads = k.shape[:2]
    grouped = q.shape[1] != kv_heads
    even = all(batch == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in (q, k, v))
    if even and not grouped and key_mask is None:
        yield lambda x: x.flatten(0, 1), None
        return
    for entry in range(batch):
        mask = None if key_mask is None else key_mask[entry]
        for group in range(kv_heads) if grouped else (0,):
            yield partial(_group, entry=entry, group=group, groups=kv_heads if grouped else 1), mask


def _group(x: Tensor, entry: int, group: int, groups: int) -> Tensor:
    return x[entry].chunk(groups)[group]


def _steps(
    queries: Tensor, keys: Tensor, mask: Tensor | None, back: int, ahead: int, block: int, blocks: int
) -> Iterator[tuple[WindowTile, Tensor | None]]:
    """Tiles, each with its score bias, [rows keys] or [1 blocks rows keys]."""
    before = keys.shape[1] - queries.shape[1]
    biases: dict[tuple[int, ...], Tensor | None] = {}
    group = max(blocks // len(queries), 1)
    for tile in tiles(queries.shape[1], keys.shape[1], back, ahead, block, group):
        alike = (tile.rows, tile.keys, tile.start - tile.first_key)
        if alike not in biases:
            biases[alike] = window_bias(tile, before, back, ahead, like=queries)
        bias = biases[alike]
        if mask is not None:
            visible = tile.slices(mask[None, :, None], 1).mT
            shown = upcast(queries.new_zeros(())) if bias is None else bias
            bias = torch.where(visible, shown, -torch.inf)
        yield tile, bias


def tiles(queries: int, keys: int, back: int, ahead: int, block: int, group: int) -> Iterator[WindowTile]:
    """Tiles of all queries: both ends of the sequence, and up to `group` inner blocks of `block` queries."""
    before = keys - queries
    if keys < 2 * (back + ahead) and queries * keys <= _SMALL:
        yield WindowTile(0, queries, 1, 0, keys)
        return
    reach = -(-(back + ahead) // block) * block
    # Blocks begin … end − 1 have slices inside the sequence.
    begin = max(0, -(-(reach - ahead - before) // block))
    end = max(begin, (queries - ahead) // block)
    for first, last in [(0, begin * block), (end * block, queries)] if end > begin else [(0, queries)]:
        for start in range(first, last, _EDGE):
            stop = min(start + _EDGE, last)
            low, high = max(before + start - back, 0), min(before + stop + ahead, keys)
            yield WindowTile(start, stop - start, 1, low, high - low)
    for number in range(begin, end, group):
        blocks, first_key = min(group, end - number), before + number * block + ahead - reach
        yield WindowTile(number * block, block, blocks, first_key, reach + block)


def window_bias(tile: WindowTile, before: int, back: int, ahead: int, like: Tensor) -> Tensor | None:
    """Score bias that masks keys outside the window, 0 or −inf, [rows keys], or None: all are inside."""
    lag = before + tile.start - tile.first_key
    if lag <= back - tile.rows + 1 and lag + ahead >= tile.keys - 1:
        return None
    hidden = like.new_full((tile.rows, tile.keys), -torch.inf, dtype=upcast_dtype(like.dtype))
    return hidden.triu(lag + ahead + 1) + hidden.tril(lag - back - 1)
