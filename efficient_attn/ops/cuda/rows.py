"""Triton kernels of the rows of causal linear attention with exponential features, forward.

A chunk's rows run over blocks of features with a running maximum, as flash attention runs over keys. Key
features are relative to the largest exponent of all keys up to the end of the chunk, feature by feature.
Where that key is later than a row and dwarfs all that the row sees, the row's powers leave the range of
floats: its chunk gets a flag, and the repair, launched for all chunks, computes it again. There rows go in
blocks of 16: keys of earlier blocks at the largest exponent that all 16 rows see, pairs of the block key by
key.
"""

import triton
import triton.language as tl

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


@triton.jit
def line_of(rows, number, i):
    """Row i of a tile [rows columns] with row numbers `number`."""
    return tl.max(tl.where((number == i)[:, None], rows, float("-inf")), 0)


@triton.jit
def store_outputs(
    out, logarithms, negative, line, row, real, acc, lost, total, top,
    DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Store rows divided by their denominators, and the logarithms of these. Rows without keys are zero.

    Rounding to operands takes `lost` from the sum of the weights, so from the output's denominator too.
    """
    # A comparison with NaN is false: such a row counts as seen, and shows.
    empty = total <= 0
    safe = tl.where(empty, 1.0, total)
    rows = tl.where(empty[:, None], 0.0, acc / (safe - lost)[:, None])
    store_rows(out + line * DIM, row, real, rows, DIM, PADDED)
    logarithm = tl.where(empty, float("inf"), (top + tl.log2(safe)) * 0.6931471805599453)
    tl.store(logarithms + line + row, logarithm, mask=real)
    tl.store(negative + line + row, (row < 0).to(tl.int8), mask=real)


@triton.jit(do_not_specialize=["tokens", "before", "first", "slots"])
def chunk_kernel(
    w, bias, q, k, v, key_offsets,
    sums, ones, references,
    out, logarithms, negative, flags,
    query_factor, factor, weak,
    tokens, before, first, slots, features, heads, kv_heads,
    w_h, q_strides, k_strides, v_strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr, OPERANDS: tl.constexpr,
):  # fmt: skip
    """Rows of one chunk of one head, and the flag of the chunk."""
    slot, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    kv = h // (heads // kv_heads)
    column = tl.arange(0, TOKENS)
    t = (first + slot) * TOKENS + column
    offset = load_offsets(key_offsets, b * kv_heads + kv, t, tokens)
    real, real_rows = offset != float("-inf"), (t >= before) & (t < tokens)
    keys = load_tokens(k, k_strides, b, kv, t, real, DIM, PADDED)
    queries = load_tokens(q, q_strides, b, h, t - before, real_rows, DIM, PADDED)
    at = ((b * kv_heads + kv) * slots + slot) * features
    top, total = tl.full([TOKENS], float("-inf"), tl.float32), tl.zeros([TOKENS], tl.float32)
    acc, scores = tl.zeros([TOKENS, VALUE_PADDED], tl.float32), tl.zeros([TOKENS, TOKENS], tl.float32)
    for start in range(0, features, FEATURES):
        f = start + tl.arange(0, FEATURES)
        rays = load_directions(w, w_h, kv, f, DIM, PADDED)
        past, past_ones = tl.load(references + at + f), tl.load(ones + at + f)
        exponents = dot(keys, tl.trans(rays)) * factor + offset[:, None]
        exponents = with_weights(exponents, bias, kv, f, features, HAS_BIAS)
        reference = finite(tl.maximum(past, tl.max(exponents, 0)))
        fade, key_powers = tl.exp2(past - reference), tl.exp2(exponents - reference[None, :])
        exponents = dot(queries, tl.trans(rays)) * query_factor + reference[None, :]
        new = tl.maximum(top, tl.max(exponents, 1))
        shrink, powers = tl.exp2(top - new), tl.exp2(exponents - new[:, None])
        scores = scores * shrink[:, None] + dot(powers.to(OPERANDS), tl.trans(key_powers.to(OPERANDS)))
        powers *= fade[None, :]
        total = total * shrink + tl.sum(powers * past_ones[None, :], 1)
        state = load_state(sums, at, f, VALUE_DIM, VALUE_PADDED)
        acc = acc * shrink[:, None] + dot(powers.to(OPERANDS), state)
        top = new
    scores = tl.where(column[:, None] >= column[None, :], scores, 0.0)
    score_sums = tl.sum(scores, 1)
    total += score_sums
    values = load_tokens(v, v_strides, b, kv, t, real, VALUE_DIM, VALUE_PADDED)
    weights = scores.to(OPERANDS)
    acc += dot(weights, values.to(OPERANDS))
    # A sum of differences would spill registers.
    lost = score_sums - tl.sum(weights.to(tl.float32), 1)
    # One feature shows whether a past exists, also the empty past of means, whose repair gives zeros.
    seen = tl.cumsum(tl.where(real, 1.0, 0.0), 0) + tl.load(ones + at) > 0
    weak_rows = tl.where(seen & (total < weak) & real_rows, 1, 0)
    tl.store(flags + bh * tl.num_programs(0) + slot, tl.max(weak_rows, 0))
    line = bh * (tokens - before)
    store_outputs(
        out, logarithms, negative, line, t - before, real_rows, acc, lost, total, top, VALUE_DIM, VALUE_PADDED
    )


@triton.jit(do_not_specialize=["tokens", "before", "first", "slots"])
def repair_kernel(
    w, bias, q, k, v, key_offsets,
    sums, ones, references,
    out, logarithms, negative, flags,
    query_factor, factor, weak,
    tokens, before, first, slots, features, heads, kv_heads,
    w_h, q_strides, k_strides, v_strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr, OPERANDS: tl.constexpr,
):  # fmt: skip
    """Recompute the rows of one flagged chunk of one head, in blocks of 16."""
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
    values = load_tokens(v, v_strides, b, kv, t, real, VALUE_DIM, VALUE_PADDED).to(OPERANDS)
    at, line = ((b * kv_heads + kv) * slots + slot) * features, bh * (tokens - before)
    for block in range(0, TOKENS, 16):
        i = (first + slot) * TOKENS + block + number
        block_offset = load_offsets(key_offsets, b * kv_heads + kv, i, tokens)
        real_i, real_rows = block_offset != float("-inf"), (i >= before) & (i < tokens)
        queries = load_tokens(q, q_strides, b, h, i - before, real_rows, DIM, PADDED)
        block_keys = load_tokens(k, k_strides, b, kv, i, real_i, DIM, PADDED)
        top, total = tl.full([16], float("-inf"), tl.float32), tl.zeros([16], tl.float32)
        acc, scores = tl.zeros([16, VALUE_PADDED], tl.float32), tl.zeros([16, TOKENS], tl.float32)
        pair_tops, pairs = tl.full([16, 16], float("-inf"), tl.float32), tl.zeros([16, 16], tl.float32)
        for start in range(0, features, FEATURES):
            f = start + tl.arange(0, FEATURES)
            rays = load_directions(w, w_h, kv, f, DIM, PADDED)
            past, past_ones = tl.load(references + at + f), tl.load(ones + at + f)
            exponents = dot(keys, tl.trans(rays)) * factor + offset[:, None]
            exponents = with_weights(exponents, bias, kv, f, features, HAS_BIAS)
            exponents = tl.where((column < block)[:, None], exponents, float("-inf"))
            latest = tl.maximum(past, tl.max(exponents, 0))
            fade, key_powers = tl.exp2(past - finite(latest)), tl.exp2(exponents - finite(latest)[None, :])
            query_exponents = dot(queries, tl.trans(rays)) * query_factor
            new = tl.maximum(top, tl.max(query_exponents + latest[None, :], 1))
            shrink = tl.exp2(top - finite(new))
            powers = tl.exp2(query_exponents + latest[None, :] - finite(new)[:, None])
            scores = scores * shrink[:, None] + dot(powers.to(OPERANDS), tl.trans(key_powers.to(OPERANDS)))
            powers *= fade[None, :]
            total = total * shrink + tl.sum(powers * past_ones[None, :], 1)
            state = load_state(sums, at, f, VALUE_DIM, VALUE_PADDED)
            acc = acc * shrink[:, None] + dot(powers.to(OPERANDS), state)
            top = new
            exponents = dot(block_keys, tl.trans(rays)) * factor + block_offset[:, None]
            exponents = with_weights(exponents, bias, kv, f, features, HAS_BIAS)
            for j in range(0, 16):
                pair = query_exponents + line_of(exponents, number, j)[None, :]
                pair_top = tl.max(pair, 1)
                pair_sum = tl.sum(tl.exp2(pair - finite(pair_top)[:, None]), 1)
                chosen = (number == j)[None, :] & (number >= j)[:, None]
                tops = tl.where(chosen, pair_top[:, None], pair_tops)
                new_tops = tl.maximum(pair_tops, tops)
                added = tl.where(chosen, pair_sum[:, None] * tl.exp2(tops - finite(new_tops)), 0.0)
                pairs = pairs * tl.exp2(pair_tops - finite(new_tops)) + added
                pair_tops = new_tops
        new = tl.maximum(top, tl.max(pair_tops, 1))
        shrink, pairs = tl.exp2(top - finite(new)), pairs * tl.exp2(pair_tops - finite(new)[:, None])
        total = (total + tl.sum(scores, 1)) * shrink + tl.sum(pairs, 1)
        block_values = load_tokens(v, v_strides, b, kv, i, real_i, VALUE_DIM, VALUE_PADDED).to(OPERANDS)
        weights, pair_weights = scores.to(OPERANDS), pairs.to(OPERANDS)
        acc = (acc + dot(weights, values)) * shrink[:, None] + dot(pair_weights, block_values)
        lost = tl.sum(scores - weights.to(tl.float32), 1) * shrink
        lost += tl.sum(pairs - pair_weights.to(tl.float32), 1)
        row = i - before
        store_outputs(
            out, logarithms, negative, line, row, real_rows, acc, lost, total, new, VALUE_DIM, VALUE_PADDED
        )
