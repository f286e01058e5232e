"""Triton kernels of the gradients of queries of causal linear attention with exponential features.

With L_t the logarithm of row t's denominator, δ_t = g_t·out_t and G_tj = g_t·v_j − δ_t, in powers of two,

    ∂a_tf = Σ_{j≤t} G_tj 2^(a_tf + u_jf − L_t),

from the pairs of a chunk and the state of earlier keys. Every such power is at most 1, but its two factors
are taken at a reference that a later key of the chunk may have set. Where a factor leaves the range of
floats, the chunk gets a flag and is computed again, as in the forward pass.
"""

import triton
import triton.language as tl

from efficient_attn.ops.cuda.rows import line_of
from efficient_attn.ops.cuda.states import (
    dot,
    finite,
    load_directions,
    load_offsets,
    load_rows,
    load_state,
    load_tokens,
    store_rows,
    with_weights,
)


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(
    g,
    out, logarithms,
    offsets, deltas,
    rows, heads,
    g_strides,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """−L_t in base 2, and −δ_t."""
    row, bh = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1).to(tl.int64)
    real, line = row < rows, bh * rows
    upstream = load_tokens(g, g_strides, bh // heads, bh % heads, row, real, VALUE_DIM, VALUE_PADDED)
    outputs = load_rows(out + line * VALUE_DIM, row, real, VALUE_DIM, VALUE_DIM, VALUE_PADDED)
    delta = tl.sum(upstream.to(tl.float32) * outputs.to(tl.float32), 1)
    logarithm = tl.load(logarithms + line + row, mask=real, other=float("inf"))
    tl.store(offsets + line + row, logarithm * -1.4426950408889634, mask=real)
    tl.store(deltas + line + row, -delta, mask=real)


@triton.jit(do_not_specialize=["tokens", "before", "first", "slots"])
def query_kernel(
    w, bias, q, k, v, key_offsets, g, offsets, deltas,
    sums, ones, references,
    grad_q, flags,
    query_factor, factor, root, limit,
    tokens, before, first, slots, features, heads, kv_heads,
    w_h, q_strides, k_strides, v_strides, g_strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr, OPERANDS: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk's queries of one head, and the flag of the chunk."""
    slot, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    kv = h // (heads // kv_heads)
    column = tl.arange(0, TOKENS)
    t = (first + slot) * TOKENS + column
    offset = load_offsets(key_offsets, b * kv_heads + kv, t, tokens)
    real, real_rows = offset != float("-inf"), (t >= before) & (t < tokens)
    keys = load_tokens(k, k_strides, b, kv, t, real, DIM, PADDED)
    values = load_tokens(v, v_strides, b, kv, t, real, VALUE_DIM, VALUE_PADDED)
    queries = load_tokens(q, q_strides, b, h, t - before, real_rows, DIM, PADDED)
    upstream = load_tokens(g, g_strides, b, h, t - before, real_rows, VALUE_DIM, VALUE_PADDED)
    line = bh * (tokens - before)
    row_offset = tl.load(offsets + line + t - before, mask=real_rows, other=float("-inf"))
    delta = tl.load(deltas + line + t - before, mask=real_rows, other=0.0)
    visible = (column[:, None] >= column[None, :]) & real[None, :]
    # Inputs keep their own precision here: in float16 rounding them would double the error.
    pairs = tl.where(visible, dot(upstream, tl.trans(values)) + delta[:, None], 0.0).to(OPERANDS)
    upstream = upstream.to(OPERANDS)
    at = ((b * kv_heads + kv) * slots + slot) * features
    grad, largest = tl.zeros([TOKENS, PADDED], tl.float32), tl.full([TOKENS], float("-inf"), tl.float32)
    for start in range(0, features, FEATURES):
        f = start + tl.arange(0, FEATURES)
        rays = load_directions(w, w_h, kv, f, DIM, PADDED)
        past, past_ones = tl.load(references + at + f), tl.load(ones + at + f)
        exponents = dot(keys, tl.trans(rays)) * factor + offset[:, None]
        exponents = with_weights(exponents, bias, kv, f, features, HAS_BIAS)
        reference = finite(tl.maximum(past, tl.max(exponents, 0)))
        fade, key_powers = tl.exp2(past - reference), tl.exp2(exponents - reference[None, :])
        state = load_state(sums, at, f, VALUE_DIM, VALUE_PADDED)
        slopes = dot(upstream, tl.trans(state)) + delta[:, None] * past_ones[None, :]
        slopes = slopes * fade[None, :] + dot(pairs, key_powers.to(OPERANDS))
        exponents = dot(queries, tl.trans(rays)) * query_factor + (row_offset[:, None] + reference[None, :])
        largest = tl.maximum(largest, tl.max(exponents, 1))
        slopes *= tl.exp2(tl.minimum(exponents, limit))
        grad += dot(slopes.to(OPERANDS), rays.to(OPERANDS))
    tl.store(flags + bh * tl.num_programs(0) + slot, tl.max(tl.where(largest > limit, 1, 0), 0))
    store_rows(grad_q + line * DIM, t - before, real_rows, grad * root, DIM, PADDED)


@triton.jit(do_not_specialize=["tokens", "before", "first", "slots"])
def query_repair_kernel(
    w, bias, q, k, v, key_offsets, g, offsets, deltas,
    sums, ones, references,
    grad_q, flags,
    query_factor, factor, root, limit,
    tokens, before, first, slots, features, heads, kv_heads,
    w_h, q_strides, k_strides, v_strides, g_strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr, OPERANDS: tl.constexpr,
):  # fmt: skip
    """Gradients of one flagged chunk's queries of one head, in blocks of 16."""
    slot, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(flags + bh * tl.num_programs(0) + slot) == 0:
        return
    b, h = bh // heads, bh % heads
    kv = h // (heads // kv_heads)
    column, number = tl.arange(0, TOKENS), tl.arange(0, 16)
    t = (first + slot) * TOKENS + column
    offset = load_offsets(key_offsets, b * kv_heads + kv, t, tokens)
    real = offset != float("-inf")
    keys = load_tokens(k, k_strides, b, kv, t, real, DIM, PADDED)
    at, line = ((b * kv_heads + kv) * slots + slot) * features, bh * (tokens - before)
    for block in range(0, TOKENS, 16):
        i = (first + slot) * TOKENS + block + number
        row = i - before
        block_offset = load_offsets(key_offsets, b * kv_heads + kv, i, tokens)
        real_i, real_rows = block_offset != float("-inf"), (i >= before) & (i < tokens)
        queries = load_tokens(q, q_strides, b, h, row, real_rows, DIM, PADDED)
        upstream = load_tokens(g, g_strides, b, h, row, real_rows, VALUE_DIM, VALUE_PADDED)
        row_offset = tl.load(offsets + line + row, mask=real_rows, other=float("-inf"))
        delta = tl.load(deltas + line + row, mask=real_rows, other=0.0)
        block_keys = load_tokens(k, k_strides, b, kv, i, real_i, DIM, PADDED)
        block_values = load_tokens(v, v_strides, b, kv, i, real_i, VALUE_DIM, VALUE_PADDED)
        values = load_tokens(v, v_strides, b, kv, t, real, VALUE_DIM, VALUE_PADDED)
        pairs = (dot(upstream, tl.trans(values)) + delta[:, None]).to(OPERANDS)
        block_pairs = dot(upstream, tl.trans(block_values)) + delta[:, None]
        upstream = upstream.to(OPERANDS)
        grad = tl.zeros([16, PADDED], tl.float32)
        for start in range(0, features, FEATURES):
            f = start + tl.arange(0, FEATURES)
            rays = load_directions(w, w_h, kv, f, DIM, PADDED)
            past, past_ones = tl.load(references + at + f), tl.load(ones + at + f)
            exponents = dot(keys, tl.trans(rays)) * factor + offset[:, None]
            exponents = with_weights(exponents, bias, kv, f, features, HAS_BIAS)
            exponents = tl.where((column < block)[:, None], exponents, float("-inf"))
            latest = tl.maximum(past, tl.max(exponents, 0))
            fade, key_powers = tl.exp2(past - finite(latest)), tl.exp2(exponents - finite(latest)[None, :])
            state = load_state(sums, at, f, VALUE_DIM, VALUE_PADDED)
            slopes = dot(upstream, tl.trans(state)) + delta[:, None] * past_ones[None, :]
            slopes = slopes * fade[None, :] + dot(pairs, key_powers.to(OPERANDS))
            row_exponents = dot(queries, tl.trans(rays)) * query_factor + row_offset[:, None]
            slopes *= tl.exp2(row_exponents + latest[None, :])
            exponents = dot(block_keys, tl.trans(rays)) * factor + block_offset[:, None]
            exponents = with_weights(exponents, bias, kv, f, features, HAS_BIAS)
            for j in range(0, 16):
                pair = tl.exp2(tl.minimum(row_exponents + line_of(exponents, number, j)[None, :], 1.0))
                slope = tl.sum(tl.where((number == j)[None, :], block_pairs, 0.0), 1)
                slopes += pair * tl.where(number >= j, slope, 0.0)[:, None]
            grad += dot(slopes.to(OPERANDS), rays.to(OPERANDS))
        store_rows(grad_q + line * DIM, row, real_rows, grad * root, DIM, PADDED)
