"""Exact softmax of blocks of queries over the blocks of keys that they read: O(tokens · keys read).

The tokens from the first real token on are cut into blocks of equal length. The queries of a block share the
keys that they read, which are gathered. A causal block reads itself, up to each query, and earlier blocks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.alignment import (
    MASKED,
    Alignment,
    after,
    aligned,
    alignment,
    alike,
    bias_of,
    biased_rows,
    padded_rows,
)
from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.operators import transformed
from efficient_attn.ops.paths import note_kernel, step_capacity, tuned_for_cpu
from efficient_attn.ops.softmax import flex
from efficient_attn.ops.softmax.biased import biased_softmax, eager
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values

# Numbers of gathered keys and values in a step on the CPU, so that they stay in cache.
_STEP = 1 << 18
# Numbers of tokens in a block that FlexAttention takes for a block of scores, and most rows of its tiles.
_FLEX_BLOCKS, _FLEX_ROWS = (16, 32, 64, 128), 64


class Sums(NamedTuple):
    """Sums of the real queries and keys of each block.

    Attributes:
        q: Sums of scaled queries, [batch heads blocks head_dim].
        k: Sums of keys, and numbers of real keys, [batch kv_heads blocks head_dim+1].
    """

    q: Tensor
    k: Tensor


class Blocks(NamedTuple):
    """Blocks of queries and keys.

    Attributes:
        queries: Numbers of the blocks of queries, [blocks].
        real: Number of blocks of keys up to the last real one, [batch 1 1].
        total: Number of all blocks of keys.
        sums: Sums of all blocks, for a pattern that needs them.
    """

    queries: Tensor
    real: Tensor
    total: int
    sums: Sums | None = None


class Pattern(NamedTuple):
    """Which keys a query reads.

    Attributes:
        block: Number of tokens in a block.
        readers: Number of first blocks whose queries read all keys. Not for causal patterns.
        choose: Numbers of the blocks that each block reads besides itself, without repetition, padded by
            numbers ≥ total, [batch or 1, heads or 1, blocks, most].
        causal: Whether a query reads no later key.
    """

    block: int
    readers: int
    choose: Callable[[Blocks], Tensor]
    causal: bool


def block_sums(x: Tensor, key_mask: Tensor | None, block: int, earlier: Tensor | None = None) -> Tensor:
    """Sums of the real tokens of each block, [batch heads blocks dim], in float32 or better.

    Args:
        x: The last tokens, [batch heads tokens dim].
        key_mask: bool [batch tokens], of earlier tokens too.
        earlier: Sums of the earlier tokens, or None.
    """
    if key_mask is None:
        key_mask = torch.ones(len(x), x.shape[2], dtype=torch.bool, device=x.device)
    tokens, new = key_mask.shape[1], x.shape[2]
    if tokens == 0:
        return upcast(x)
    position = aligned(torch.arange(tokens - new, tokens, device=x.device), tokens, key_mask)
    sums = upcast(x.new_empty(0)).new_zeros(*x.shape[:2], -(-tokens // block), x.shape[3])
    if earlier is not None:
        sums[:, :, : earlier.shape[2]] = earlier
    number = (position // block)[:, None, :, None].expand_as(x)
    return sums.scatter_add(2, number, upcast(zero_masked(x, key_mask[:, tokens - new :])))


def block_attention(
    q: Queries,
    k: Keys,
    v: Values,
    pattern: Pattern,
    *,
    scale: float,
    key_mask: KeyMask | None,
    sums: Sums | None = None,
) -> Output:
    """softmax(scale · q kᵀ) v over the keys of the blocks that a pattern chooses.

    Padding before the first real token is in no block, and has the output 0.
    """
    if key_mask is None and _one_call(q, k, v, pattern):
        try:
            return _by_flex(q, k, v, pattern, scale, sums)
        except flex.NotCompiledError:
            pass
    q, dtype = upcast(q) * scale, q.dtype
    if key_mask is None or not (tuned_for_cpu(q) and eager(q, k, v)):
        inputs = alignment(q, k, v, key_mask, None)
        return inputs.restored([_attend(inputs, pattern, sums)], zero_padding=True).to(dtype)
    # Batch entries with one first real token have the same blocks.
    tokens, outs = k.shape[2], []
    for rows, start in alike(key_mask):
        padding = min(max(start - tokens + q.shape[2], 0), q.shape[2])
        if start == tokens:
            zero = sum(x[rows, ..., :0].sum() for x in (q, k, v))
            outs.append(q.new_zeros(*q[rows].shape[:3], v.shape[3]) + zero)
            continue
        part = q[rows, :, padding:]
        span = [range(tokens - start - part.shape[2], tokens - start)]
        part_k, part_v = (x[rows, :, start:] for x in (k, v))
        inputs = alignment(part, part_k, part_v, key_mask[rows, start:], span)
        part_sums = None
        if sums is not None:
            total = -(-(tokens - start) // pattern.block)
            part_sums = Sums(*(x[rows, :, :total] for x in sums))
        outs.append(F.pad(_attend(inputs, pattern, part_sums), (0, 0, padding, 0)))
    return torch.cat(outs).to(dtype)


def _one_call(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> bool:
    """Whether FlexAttention serves a call without a key mask: on CUDA, whole, without gradients."""
    # An exported program may run without a compiler, and would then write all scores.
    whole = q.shape[2] == k.shape[2] and not torch.compiler.is_exporting() and not transformed(q, k, v)
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    listed = whole and not trained and pattern.block in _FLEX_BLOCKS
    return listed and flex.available(q, k, v, kernel="blocks-flex")


def _by_flex(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, sums: Sums | None) -> Tensor:
    """Outputs of all queries by one call of FlexAttention, which visits the blocks that they read.

    Raises:
        NotCompiledError: If the kernel cannot be compiled.
    """
    if scale <= 0:
        q, scale = q * scale, 1.0
    tokens, size = q.shape[2], pattern.block
    total = -(-tokens // size)
    real = torch.ones(1, tokens, dtype=torch.bool, device=q.device)
    read = _numbers(range(total), real, pattern, sums).sort(dim=3).values
    number, listed = (read < total).sum(dim=3, dtype=torch.int32), read.clamp_max(total - 1).int()
    tensors = (q.detach(), k.detach(), v.detach(), number, listed)
    if torch.compiler.is_compiling():
        out = _flex_attention(*tensors, size, pattern.causal, scale)
    else:
        # Sizes are marked on tensors, which must not be the caller's.
        for x, sizes in zip(tensors, ((0, 2), (0, 2), (0, 2), (2,), (2, 3)), strict=True):
            torch._dynamo.maybe_mark_dynamic(x, sizes)
        sizes = q.shape[1], *k.shape[1::2], v.shape[3], len(number), size
        call = flex.compiled(_flex_attention, q.device, q.dtype, *sizes)
        out = call(*tensors, size, pattern.causal, scale)
    note_kernel("flex")
    end = min(pattern.readers * size, tokens)
    if end == 0:
        return out
    rows = fused_attention(q[:, :, :end], k, v, scale=scale, causal=False, key_mask=None, dropout=0.0)
    return torch.cat([rows, out[:, :, end:]], dim=2)


def _flex_attention(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, listed: Tensor, size: int, causal: bool, scale: float
) -> Tensor:
    """softmax(scale · q kᵀ) v over `number` of the `listed` blocks of each block of queries."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def visible(entry: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query if causal else key >= 0

    tokens, grouped = q.shape[2], q.shape[1] != k.shape[1]
    # The queries of each block of keys serve the backward pass alone.
    nothing: tuple[None, None, None, None] = (None, None, None, None)
    listed_only = (number, listed, None, None)
    mask = BlockMask((tokens, tokens), *listed_only, *nothing, BLOCK_SIZE=(size, size), mask_mod=visible)
    rows = min(size, _FLEX_ROWS)
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": rows, "BLOCK_N": rows}
    out: Any = flex_attention(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped, kernel_options=options
    )
    return out


def _attend(inputs: Alignment, pattern: Pattern, sums: Sums | None) -> Tensor:
    """Outputs of the queries."""
    ((rows, span),) = inputs.runs()
    end = min(pattern.readers * pattern.block, span.stop)
    outs = []
    if span.start < end:
        outs.append(_read_all(inputs, rows[:, :, : end - span.start]))
    if end < span.stop:
        start = max(span.start, end)
        outs.append(_read(inputs, rows[:, :, start - span.start :], start, pattern, sums))
    return torch.cat(outs, dim=2)


def keys_read(
    q: Tensor, k: Tensor, key_mask: Tensor | None, rows: Tensor, pattern: Pattern, sums: Sums | None = None
) -> Tensor:
    """Keys of the blocks that queries read, bool [batch heads rows k_tokens], later keys included.

    Args:
        rows: Index of the queries, [rows].
    """
    tokens, device = k.shape[2], k.device
    real = torch.ones(len(k), tokens, dtype=torch.bool, device=device) if key_mask is None else key_mask
    position, numbers = rows + tokens - q.shape[2], torch.arange(tokens, device=device)
    of_rows, of_keys = (aligned(x, tokens, key_mask).expand(len(k), -1) for x in (position, numbers))
    # A pair of blocks is read, [batch heads blocks blocks].
    read = _numbers(range(-(-tokens // pattern.block)), real.gather(1, of_keys.argsort(dim=1)), pattern, sums)
    total = read.shape[2]
    pairs = torch.zeros(*read.shape[:3], total + 1, dtype=torch.bool, device=device).scatter_(3, read, True)
    pairs[:, :, : pattern.readers] = True
    by_rows = pairs.expand(len(k), -1, -1, -1).gather(
        2, (of_rows // pattern.block)[:, None, :, None].expand(-1, pairs.shape[1], -1, total + 1)
    )
    by_keys = by_rows.gather(3, (of_keys // pattern.block)[:, None, None].expand(*by_rows.shape[:3], -1))
    # Padding before the first real token reads nothing.
    return by_keys & (position >= real.long().argmax(dim=1, keepdim=True))[:, None, :, None]


@torch.no_grad()
def _numbers(queries: range, real: Tensor, pattern: Pattern, sums: Sums | None) -> Tensor:
    """Numbers of the blocks that blocks of queries read, [… blocks most], their own first.

    Args:
        real: Whether a key is real, bool [batch tokens].
    """
    tokens, size = real.shape[1], pattern.block
    count = (torch.arange(1, tokens + 1, device=real.device) * real).amax(dim=1)[:, None, None]
    total, row = -(-tokens // size), torch.arange(queries.start, queries.stop, device=real.device)
    read = pattern.choose(Blocks(row, (count + size - 1) // size, total, sums)).clamp_max(total)
    if read.shape[3] >= total:
        # A short sequence has fewer blocks.
        read = read.sort(dim=3).values[..., : total - 1]
    return torch.cat([row[:, None].expand(*read.shape[:3], 1), read], dim=3)


def _read_all(inputs: Alignment, q: Tensor) -> Tensor:
    """Outputs of queries that read all keys."""
    width = max(inputs.k.shape[3], inputs.v.shape[3]) + 1
    k = biased_rows(inputs.k, bias_of(inputs.real[:, None, :, None], inputs.k), width)
    rows = biased_rows(q.unflatten(1, (k.shape[1], -1)).flatten(2, 3), q.new_ones(()), width)
    out = biased_softmax(rows, k, padded_rows(inputs.v, width), None)
    return out[..., : inputs.v.shape[3]].unflatten(2, (-1, q.shape[2])).flatten(1, 2)


def _read(inputs: Alignment, q: Tensor, start: int, pattern: Pattern, sums: Sums | None) -> Tensor:
    """Outputs of consecutive queries from a position on, [batch heads queries value_dim]."""
    size, value_dim = pattern.block, inputs.v.shape[3]
    queries = range(start // size, -(-(start + q.shape[2]) // size))
    before = start - queries.start * size
    read = _numbers(queries, inputs.real, pattern, sums)
    batch, heads = len(q), inputs.k.shape[1] if read.shape[1] == 1 else q.shape[1]
    read = read.expand(batch, heads, -1, -1)

    later = None
    if pattern.causal:
        # Below the bias of a masked key, so that a query without real keys does not average later keys.
        later = q.new_full((size, size), 2 * MASKED).triu(1)
        later = F.pad(later, (0, (read.shape[3] - 1) * size))
    if len(queries) == 1:
        return _read_block(
            inputs, q, read, None if later is None else later[before : before + q.shape[2]], size
        )

    # Rows of all blocks: [batch heads blocks rows width].
    width = max(inputs.k.shape[3], value_dim) + 1
    rows = F.pad(after(q, before), (0, 0, 0, len(queries) * size - before - q.shape[2]))
    rows = biased_rows(rows, q.new_ones(()), width).unflatten(1, (heads, -1))
    rows = rows.unflatten(3, (len(queries), size)).transpose(2, 3)
    group = rows.shape[3]
    rows = rows.flatten(3, 4)
    later = None if later is None else later.repeat(group, 1)
    by_blocks, at = _by_blocks(inputs, read, size, width)
    numbers = batch * heads * read.shape[3] * size * 2 * width
    step = max(_STEP // numbers, 1) if tuned_for_cpu(q) else step_capacity(numbers)
    outs = []
    for part, places in zip(rows.split(step, dim=2), at.split(step, dim=2), strict=True):
        shape = (batch * heads, places.shape[2], -1, width)
        k, v = (x.index_select(0, places.flatten()).view(shape) for x in by_blocks)
        out = biased_softmax(part.flatten(0, 1), k, v, later)
        outs.append(out[..., :value_dim].unflatten(0, (batch, heads)))
    out = torch.cat(outs, dim=2).unflatten(3, (group, size)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return out[:, :, before : before + q.shape[2]]


def _by_blocks(inputs: Alignment, read: Tensor, size: int, width: int) -> tuple[list[Tensor], Tensor]:
    """Keys with their score bias and values, [batch · kv_heads · blocks, size · width], and rows of blocks.

    The last block of a head holds no real key.
    """
    (batch, kv_heads, tokens, _), heads = inputs.k.shape, read.shape[1]
    total = -(-tokens // size)
    room = (total + 1) * size - tokens
    bias = bias_of(F.pad(inputs.real, (0, room))[:, None, :, None], inputs.k)
    k = biased_rows(F.pad(inputs.k, (0, 0, 0, room)), bias, width)
    v = padded_rows(F.pad(inputs.v, (0, 0, 0, room)), width)
    by_blocks = [x.unflatten(2, (total + 1, size)).flatten(3).flatten(0, 2) for x in (k, v)]
    of_heads = torch.arange(heads, device=k.device) // (heads // kv_heads)
    first = torch.arange(batch, device=k.device)[:, None] * kv_heads + of_heads
    return by_blocks, read + first[:, :, None, None] * (total + 1)


def _read_block(inputs: Alignment, q: Tensor, read: Tensor, later: Tensor | None, size: int) -> Tensor:
    """Outputs of queries of one block. A decoding step copies only the keys that it reads.

    Args:
        read: Numbers of the blocks that are read, [batch heads 1 most].
        later: Score bias of later keys, [queries most·size]; None: no key is later.
    """
    (batch, kv_heads, tokens, _), heads = inputs.k.shape, read.shape[1]
    places = (read[:, :, 0, :, None] * size + torch.arange(size, device=q.device)).flatten(2)
    inside = places.clamp_max(tokens - 1)
    bias = bias_of(inputs.real[:, None].expand(-1, heads, -1).gather(2, inside), q)
    bias = bias.masked_fill(places >= tokens, 2 * MASKED).flatten(0, 1)[:, None, None]
    group = q.shape[1] // heads
    if later is not None:
        bias = bias + later.repeat(group, 1)
    by_heads = inside.unflatten(1, (kv_heads, -1)).flatten(2)
    k, v = (_keys_at(x, by_heads).reshape(batch * heads, 1, places.shape[2], x.shape[3]) for x in inputs[1:3])
    rows = q.unflatten(1, (heads, group)).flatten(2, 3).flatten(0, 1)[:, None]
    out = biased_softmax(rows, k, v, bias)
    return out.view(*q.shape[:3], inputs.v.shape[3])


def _keys_at(x: Tensor, at: Tensor) -> Tensor:
    """Rows of `x` [batch heads tokens dim] at the positions of each head [batch heads rows]."""
    if not tuned_for_cpu(x):
        return x.gather(2, at[..., None].expand(*at.shape, x.shape[3]))
    # The CPU copies whole rows only from two dimensions.
    heads = [y.index_select(0, rows) for y, rows in zip(x.flatten(0, 1), at.flatten(0, 1), strict=True)]
    return torch.stack(heads).unflatten(0, x.shape[:2])
