"""Exact softmax of blocks of queries over the blocks of keys that they read: O(tokens · keys read).

The tokens from the first real token on are cut into blocks of equal length. The queries of a block share the
keys that they read, which are gathered. A causal block reads itself, up to each query, and earlier blocks.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.alignment import MASKED, Alignment, aligned, alignment, alike, bias_of, padded_rows
from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.operators import transformed
from efficient_attn.ops.paths import HELD, note_kernel, tuned_for_cpu
from efficient_attn.ops.softmax import flex
from efficient_attn.ops.softmax.biased import Step, Steps, eager, gathered_softmax, readable
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values

# Numbers of gathered keys and values in a step on the CPU, so that they stay in cache, and in compiled code,
# whose size grows with the steps.
_STEP, _COMPILED = 3 << 18, 1 << 22
# Numbers of tokens in a block that FlexAttention takes for a block of scores, and most rows of its tiles.
_FLEX_BLOCKS, _FLEX_ROWS = (16, 32, 64, 128), 64


class Sums(NamedTuple):
    """Sums of the real queries and keys of each block.

    Attributes:
        q: Sums of queries, [batch heads blocks head_dim].
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
    """

    queries: Tensor
    real: Tensor
    total: int
    sums: Sums | None = None


class Pattern(NamedTuple):
    """Which keys a query reads.

    Attributes:
        readers: Number of first blocks whose queries read all keys. Not for causal patterns.
        choose: Numbers of the blocks that each block reads besides itself, without repetition, padded by
            numbers ≥ total, [batch or 1, heads or 1, blocks, most].
    """

    block: int
    readers: int
    choose: Callable[[Blocks], Tensor]
    causal: bool


def block_sums(
    x: Tensor, tokens: int, key_mask: Tensor | None, block: int, earlier: Tensor | None = None
) -> Tensor:
    """Sums of the real tokens of each block, [batch heads blocks dim], in float32 or better.

    Args:
        x: The last tokens, [batch heads tokens dim].
        tokens: Number of all tokens.
        key_mask: bool [batch tokens], of earlier tokens too; None: all are real.
    """
    x, total, start = upcast(x), -(-tokens // block), tokens - x.shape[2]
    if x.shape[2] == 0:
        return x if earlier is None else earlier
    if total == 1 and key_mask is None:
        sums = x.sum(dim=2, keepdim=True)
    elif key_mask is None:
        before, after = start % block, total * block - tokens
        x = F.pad(x, (0, 0, before, after)) if before + after else x
        sums = x.unflatten(2, (-1, block)).sum(dim=3)
        # Later tokens belong to the last earlier block, or to new blocks.
        sums = F.pad(sums, (0, 0, start // block, 0)) if start >= block else sums
    else:
        position = aligned(torch.arange(start, tokens, device=x.device), tokens, key_mask)
        number = (position // block)[:, None, :, None].expand_as(x)
        sums = x.new_zeros(*x.shape[:2], total, x.shape[3])
        sums = sums.scatter_add(2, number, zero_masked(x, key_mask[:, start:]))
    if earlier is not None:
        sums[:, :, : earlier.shape[2]] += earlier
    return sums


def block_attention(
    q: Queries,
    k: Keys,
    v: Values,
    pattern: Pattern,
    *,
    scale: float,
    key_mask: KeyMask | None,
    sums: Sums | None = None,
    read: Tensor | None = None,
) -> Output:
    """softmax(scale · q kᵀ) v over the keys of the blocks that a pattern chooses.

    Padding before the first real token is in no block, and has the output 0.

    Args:
        read: Result of `blocks_read` for a call without a key mask, or None.
    """
    if key_mask is None and _one_call(q, k, v, pattern):
        try:
            return _by_flex(q, k, v, pattern, scale, sums)
        except flex.NotCompiledError:
            pass
    q, dtype = upcast(q), q.dtype
    if scale <= 0:
        q, scale = q * scale, 1.0
    if key_mask is None or not (tuned_for_cpu(q) and eager(q, k, v)):
        inputs = alignment(q, k, v, key_mask, None)
        out = _attend(inputs, pattern, scale, key_mask is not None, sums, read)
        return inputs.restored([out], zero_padding=True).to(dtype)
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
        outs.append(F.pad(_attend(inputs, pattern, scale, True, part_sums, None), (0, 0, padding, 0)))
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
    read = blocks_read(range(total), None, k, pattern, sums).sort(dim=3).values
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


def _attend(
    inputs: Alignment, pattern: Pattern, scale: float, masked: bool, sums: Sums | None, read: Tensor | None
) -> Tensor:
    ((q, span),), size, value_dim = inputs.runs(), pattern.block, inputs.v.shape[3]
    k, v, real = inputs.k, inputs.v, inputs.real if masked else None
    # The fused kernel requires one width.
    (batch, kv_heads), q = k.shape[:2], padded_rows(q, max(q.shape[3], value_dim))
    queries = range(span.start // size, -(-span.stop // size))
    before, after = span.start - queries.start * size, queries.stop * size - span.stop
    if read is None:
        read = blocks_read(queries, real, k, pattern, sums)
    read = read.expand(batch, kv_heads if read.shape[1] == 1 else q.shape[1], -1, -1)
    # A single block is not padded, and its causal queries read no key behind the last of them.
    single = len(queries) == 1
    if not single and before + after:
        q = F.pad(q, (0, 0, before, after))
    rows, last = q.shape[2] // len(queries), size - after * (single and pattern.causal)
    # Queries of a group of heads are rows of one block.
    blocks = q.reshape(batch * read.shape[1], -1, len(queries), rows, q.shape[3]).transpose(1, 2)
    later = None
    if pattern.causal and rows > 1:
        # Below the bias of a masked key, so that a query without real keys does not average later keys.
        later = q.new_full((rows, last), 2 * MASKED).triu(last - rows + 1).repeat(blocks.shape[2], 1)
    keys, values, strides = _rows(k, v)
    steps = _steps(k, read, real, strides, pattern, q.shape[3], last, later)
    out = gathered_softmax(blocks.flatten(2, 3), keys, values, steps, scale)
    out = out.view(blocks.shape).transpose(1, 2).reshape(q.shape)[..., :value_dim]
    return out if single else out[:, :, before : before + len(span)]


def keys_read(
    q: Tensor, k: Tensor, key_mask: Tensor | None, rows: Tensor, pattern: Pattern, sums: Sums | None = None
) -> Tensor:
    """Keys of the blocks that queries read, bool [batch heads rows k_tokens], later keys included."""
    tokens, device = k.shape[2], k.device
    real = torch.ones(len(k), tokens, dtype=torch.bool, device=device) if key_mask is None else key_mask
    position, numbers = rows + tokens - q.shape[2], torch.arange(tokens, device=device)
    of_rows, of_keys = (aligned(x, tokens, key_mask).expand(len(k), -1) for x in (position, numbers))
    # A pair of blocks is read, [batch heads blocks blocks].
    ordered = real.gather(1, of_keys.argsort(dim=1))
    read = blocks_read(range(-(-tokens // pattern.block)), ordered, k, pattern, sums)
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
def blocks_read(
    queries: range, real: Tensor | None, k: Tensor, pattern: Pattern, sums: Sums | None
) -> Tensor:
    """Numbers of the blocks that blocks of queries read, [… blocks most], falling, and their own last.

    Args:
        real: Whether a key is real, bool [batch tokens]; None: all are.
    """
    tokens, size = k.shape[2], pattern.block
    total, row = -(-tokens // size), torch.arange(queries.start, queries.stop, device=k.device)
    last = torch.full((1, 1, 1), total, device=k.device)
    if real is not None:
        count = (torch.arange(1, tokens + 1, device=k.device) * real).amax(dim=1)[:, None, None]
        last = (count + size - 1) // size
    read = pattern.choose(Blocks(row, last, total, sums)).clamp_max(total).sort(dim=3, descending=True).values
    # A short sequence has fewer blocks.
    read = read[..., max(read.shape[3] - total + 1, 0) :]
    return torch.cat([read, row[:, None].expand(*read.shape[:3], 1)], dim=3)


def _rows(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Rows of all keys and values [rows dim], and their strides in batch entries, heads and tokens."""
    trained = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    whole = all(x.stride(3) == 1 and not any(y % x.shape[3] for y in x.stride()[:3]) for x in (k, v))
    strides, strides_v = ([y // x.shape[3] for y in x.stride()[:3]] for x in (k, v))
    if trained or not eager(k, v) or not whole or strides != strides_v:
        return k.flatten(0, 2), v.flatten(0, 2), [k.shape[1] * k.shape[2], k.shape[2], 1]
    # A cache has room behind the tokens of each head.
    number = 1 + sum((length - 1) * stride for length, stride in zip(k.shape, strides, strict=False))
    rows_k, rows_v = (x.as_strided((number, x.shape[3]), (x.shape[3], 1)) for x in (k, v))
    return rows_k, rows_v, strides


def _steps(
    k: Tensor,
    read: Tensor,
    real: Tensor | None,
    strides: list[int],
    pattern: Pattern,
    width: int,
    last: int,
    later: Tensor | None,
) -> Steps:
    """Steps of `gathered_softmax` over all blocks of queries.

    Args:
        read: Numbers of the blocks that each block reads, [batch heads blocks most].
        strides: Strides of the rows of keys, see `_rows`.
        width: Numbers in a row that a step gathers.
        last: Number of keys that a block reads of its own.
        later: Score bias of these keys, [rows last]; None: zero.
    """
    (batch, kv_heads, tokens), (heads, blocks, most), size = k.shape[:3], read.shape[1:], pattern.block
    head = torch.arange(batch * heads, device=k.device)[:, None, None]
    # First row of the keys of each head.
    begin = head // (heads // kv_heads) * strides[1]
    if batch > 1 and strides[0] != kv_heads * strides[1]:
        begin = begin + head // heads * (strides[0] - kv_heads * strides[1])
    read, within = read.flatten(0, 1) * size, torch.arange(size, device=k.device)
    readers = min(pattern.readers, blocks)
    # A list is shorter where fewer blocks are read, if no device has to wait for its length.
    hosted = readable(k)
    lengths = (read < tokens).sum(dim=2).tolist() if hosted else [[most] * blocks] * len(read)
    whole = hosted and real is None and (tokens % size == 0 or last < size)

    def step(part: tuple[slice, slice], listed: Tensor, uniform: bool) -> Step:
        number = listed.shape[2] * size - size + last
        token = (listed[..., None] + within).flatten(2)[..., :number]
        bias = None if later is None else F.pad(later, (number - last, 0))
        if not (whole and uniform):
            visible, token = token < tokens, token.clamp_max(tokens - 1)
            if real is not None:
                visible = visible & real.flatten()[head[part[0]] // heads * tokens + token]
            if not hosted or not visible.all():
                of_keys = bias_of(visible[:, :, None], k)
                bias = of_keys if bias is None else of_keys + bias
        return Step(part, begin[part[0]] + token * strides[2], bias)

    def steps() -> Iterator[Step]:
        for part in _parts(len(read), range(readers), 2 * width * (tokens + size), k):
            listed = torch.arange(0, tokens, size, device=k.device)
            yield step(part, listed.expand(*read[part].shape[:2], -1), True)
        # Consecutive blocks whose lists are equally long, in the first head at least.
        end = readers
        while end < blocks:
            start, length = end, lengths[0][end]
            while end < blocks and lengths[0][end] == length:
                end += 1
            for part in _parts(len(read), range(start, end), 2 * width * length * size, k):
                counts = [count for row in lengths[part[0]] for count in row[part[1]]]
                listed = read[part][..., most - max(counts) :]
                yield step(part, listed, min(counts) == max(counts))

    return steps


def _parts(heads: int, blocks: range, numbers: int, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Heads and blocks of each step, where a block of queries gathers `numbers` numbers."""
    group = heads
    if readable(k):
        group = min(max(_STEP // (numbers * max(len(blocks), 1)), 1), heads)
    most = max((_STEP if readable(k) else _COMPILED if tuned_for_cpu(k) else HELD) // (numbers * group), 1)
    for head in range(0, heads, group):
        for block in range(blocks.start, blocks.stop, most):
            yield slice(head, head + group), slice(block, min(block + most, blocks.stop))
