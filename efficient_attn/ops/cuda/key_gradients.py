"""Triton kernels of the gradients of keys and values of causal linear attention with exponential features.

In the notation of `query_gradients`,

    ∂u_jf = Σ_{t≥j} G_tj 2^(a_tf + u_jf − L_t),   ∂v_j = Σ_{t≥j} Σ_f 2^(a_tf + u_jf − L_t) g_t:

from the pairs of a chunk and the state of later queries. An earlier query of the chunk may have set the
reference that takes a factor out of the range of floats; such chunks are computed again.
"""

import triton
import triton.language as tl

from efficient_attn.ops.cuda.rows import line_of
from efficient_attn.ops.cuda.states import (
    dot,
    finite,
    load_directions,
    load_offsets,
    load_state,
    load_tokens,
    store_rows,
    with_weights,
)


@triton.jit(do_not_specialize=["tokens", "before", "first", "slots"])
def key_kernel(
    w, bias, q, k, v, key_offsets, g, offsets, deltas,
    sums, ones, references,
    grad_k, grad_v, flags,
    query_factor, factor, root, scale, limit,
    tokens, before, first, slots, features, heads, kv_heads,
    w_h, q_strides, k_strides, v_strides, g_strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr, OPERANDS: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk's keys and values of one key head, and the flag of the chunk."""
    chunk, bkv = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, kv = bkv // kv_heads, bkv % kv_heads
    group = heads // kv_heads
    column = tl.arange(0, TOKENS)
    t = chunk * TOKENS + column
    offset = load_offsets(key_offsets, bkv, t, tokens)
    real, real_rows = offset != float("-inf"), (t >= before) & (t < tokens)
    keys = load_tokens(k, k_strides, b, kv, t, real, DIM, PADDED)
    values = load_tokens(v, v_strides, b, kv, t, real, VALUE_DIM, VALUE_PADDED)
    at = (bkv * slots + tl.maximum(chunk - first + 1, 0)) * features
    longer, largest = tl.zeros([TOKENS], tl.float32), tl.full([TOKENS], float("-inf"), tl.float32)
    by_key, by_value = tl.zeros([TOKENS, PADDED], tl.float32), tl.zeros([TOKENS, VALUE_PADDED], tl.float32)
    for member in range(0, group):
        h = kv * group + member
        line = (b * heads + h) * (tokens - before)
        queries = load_tokens(q, q_strides, b, h, t - before, real_rows, DIM, PADDED)
        upstream = load_tokens(g, g_strides, b, h, t - before, real_rows, VALUE_DIM, VALUE_PADDED)
        row_offset = tl.load(offsets + line + t - before, mask=real_rows, other=float("-inf"))
        delta = tl.load(deltas + line + t - before, mask=real_rows, other=0.0)
        # [keys rows]
        visible = (column[:, None] <= column[None, :]) & real[:, None]
        # As in `query_kernel`, inputs keep their own precision here.
        pairs = tl.where(visible, dot(values, tl.trans(upstream)) + delta[None, :], 0.0).to(OPERANDS)
        scores = tl.zeros([TOKENS, TOKENS], tl.float32)
        for start in range(0, features, FEATURES):
            f = start + tl.arange(0, FEATURES)
            rays = load_directions(w, w_h, kv, f, DIM, PADDED)
            # The state has the queries of all heads and is read once.
            later = tl.where(member == 0, tl.load(references + at + f), float("-inf"))
            exponents = dot(queries, tl.trans(rays)) * query_factor + row_offset[:, None]
            latest = tl.maximum(later, tl.max(exponents, 0))
            reference = finite(latest)
            fade, powers = tl.exp2(later - reference), tl.exp2(exponents - reference[None, :]).to(OPERANDS)
            state = load_state(sums, at, f, VALUE_DIM, VALUE_PADDED)
            slopes = dot(values.to(OPERANDS), tl.trans(state)) + tl.load(ones + at + f)[None, :]
            slopes = slopes * fade[None, :] + dot(pairs, powers)
            exponents = dot(keys, tl.trans(rays)) * factor + (offset[:, None] + reference[None, :])
            exponents = with_weights(exponents, bias, kv, f, features, HAS_BIAS)
            largest = tl.maximum(
                largest, tl.max(tl.where((latest > float("-inf"))[None, :], exponents, float("-inf")), 1)
            )
            key_powers = tl.exp2(tl.minimum(exponents, limit))
            slopes *= key_powers
            longer += tl.sum(slopes, 1)
            by_key += dot(slopes.to(OPERANDS), rays.to(OPERANDS))
            scores += dot(key_powers.to(OPERANDS), tl.trans(powers))
            by_value += dot((key_powers * fade[None, :]).to(OPERANDS), state)
        scores = tl.where(column[:, None] <= column[None, :], scores, 0.0)
        # Read again, as the keys below: registers do not hold them over the loop.
        upstream = load_tokens(g, g_strides, b, h, t - before, real_rows, VALUE_DIM, VALUE_PADDED)
        by_value += dot(scores.to(OPERANDS), upstream.to(OPERANDS))
    tl.store(flags + bkv * tl.num_programs(0) + chunk, tl.max(tl.where(largest > limit, 1, 0), 0))
    keys = load_tokens(k, k_strides, b, kv, t, real, DIM, PADDED)
    by_key = by_key * root - keys.to(tl.float32) * (longer * scale)[:, None]
    line, in_range = bkv * tokens, t < tokens
    store_rows(grad_k + line * DIM, t, in_range, by_key, DIM, PADDED)
    store_rows(grad_v + line * VALUE_DIM, t, in_range, by_value, VALUE_DIM, VALUE_PADDED)


@triton.jit(do_not_specialize=["tokens", "before", "first", "slots"])
def key_repair_kernel(
    w, bias, q, k, v, key_offsets, g, offsets, deltas,
    sums, ones, references,
    grad_k, grad_v, flags,
    query_factor, factor, root, scale, limit,
    tokens, before, first, slots, features, heads, kv_heads,
    w_h, q_strides, k_strides, v_strides, g_strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr, OPERANDS: tl.constexpr,
):  # fmt: skip
    """Gradients of one flagged chunk's keys and values of one key head, in blocks of 16."""
    chunk, bkv = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(flags + bkv * tl.num_programs(0) + chunk) == 0:
        return
    b, kv = bkv // kv_heads, bkv % kv_heads
    group = heads // kv_heads
    column, number = tl.arange(0, TOKENS), tl.arange(0, 16)
    t = chunk * TOKENS + column
    real_rows = (t >= before) & (t < tokens)
    at = (bkv * slots + tl.maximum(chunk - first + 1, 0)) * features
    for block in range(0, TOKENS, 16):
        j = chunk * TOKENS + block + number
        row = j - before
        offset = load_offsets(key_offsets, bkv, j, tokens)
        real, real_block = offset != float("-inf"), (j >= before) & (j < tokens)
        keys = load_tokens(k, k_strides, b, kv, j, real, DIM, PADDED)
        values = load_tokens(v, v_strides, b, kv, j, real, VALUE_DIM, VALUE_PADDED)
        longer = tl.zeros([16], tl.float32)
        by_key, by_value = tl.zeros([16, PADDED], tl.float32), tl.zeros([16, VALUE_PADDED], tl.float32)
        for member in range(0, group):
            h = kv * group + member
            line = (b * heads + h) * (tokens - before)
            queries = load_tokens(q, q_strides, b, h, t - before, real_rows, DIM, PADDED)
            upstream = load_tokens(g, g_strides, b, h, t - before, real_rows, VALUE_DIM, VALUE_PADDED)
            row_offset = tl.load(offsets + line + t - before, mask=real_rows, other=float("-inf"))
            delta = tl.load(deltas + line + t - before, mask=real_rows, other=0.0)
            block_queries = load_tokens(q, q_strides, b, h, row, real_block, DIM, PADDED)
            block_g = load_tokens(g, g_strides, b, h, row, real_block, VALUE_DIM, VALUE_PADDED)
            block_offset = tl.load(offsets + line + row, mask=real_block, other=float("-inf"))
            block_delta = tl.load(deltas + line + row, mask=real_block, other=0.0)
            pairs = (dot(values, tl.trans(upstream)) + delta[None, :]).to(OPERANDS)
            block_pairs = dot(values, tl.trans(block_g)) + block_delta[None, :]
            scores, block_scores = tl.zeros([16, TOKENS], tl.float32), tl.zeros([16, 16], tl.float32)
            for start in range(0, features, FEATURES):
                f = start + tl.arange(0, FEATURES)
                rays = load_directions(w, w_h, kv, f, DIM, PADDED)
                later = tl.where(member == 0, tl.load(references + at + f), float("-inf"))
                later_ones = tl.load(ones + at + f)
                exponents = dot(queries, tl.trans(rays)) * query_factor + row_offset[:, None]
                exponents = tl.where((column >= block + 16)[:, None], exponents, float("-inf"))
                latest = tl.maximum(later, tl.max(exponents, 0))
                fade = tl.exp2(later - finite(latest))
                powers = tl.exp2(exponents - finite(latest)[None, :]).to(OPERANDS)
                state = load_state(sums, at, f, VALUE_DIM, VALUE_PADDED)
                slopes = dot(values.to(OPERANDS), tl.trans(state)) + later_ones[None, :]
                slopes = slopes * fade[None, :] + dot(pairs, powers)
                key_exponents = dot(keys, tl.trans(rays)) * factor + offset[:, None]
                key_exponents = with_weights(key_exponents, bias, kv, f, features, HAS_BIAS)
                key_powers = tl.exp2(tl.minimum(key_exponents + latest[None, :], 1.0))
                slopes *= key_powers
                scores += dot(key_powers.to(OPERANDS), tl.trans(powers))
                by_value += dot((key_powers * fade[None, :]).to(OPERANDS), state)
                exponents = dot(block_queries, tl.trans(rays)) * query_factor + block_offset[:, None]
                for i in range(0, 16):
                    pair = key_exponents + line_of(exponents, number, i)[None, :]
                    pair = tl.where((number <= i)[:, None], tl.exp2(tl.minimum(pair, 1.0)), 0.0)
                    slope = tl.sum(tl.where((number == i)[None, :], block_pairs, 0.0), 1)
                    slopes += pair * slope[:, None]
                    block_scores += tl.where((number == i)[None, :], tl.sum(pair, 1)[:, None], 0.0)
                longer += tl.sum(slopes, 1)
                by_key += dot(slopes.to(OPERANDS), rays.to(OPERANDS))
            by_value += dot(scores.to(OPERANDS), upstream.to(OPERANDS))
            by_value += dot(block_scores.to(OPERANDS), block_g.to(OPERANDS))
        by_key = by_key * root - keys.to(tl.float32) * (longer * scale)[:, None]
        line, in_range = bkv * tokens, j < tokens
        store_rows(grad_k + line * DIM, j, in_range, by_key, DIM, PADDED)
        store_rows(grad_v + line * VALUE_DIM, j, in_range, by_value, VALUE_DIM, VALUE_PADDED)
