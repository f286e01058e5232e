"""Triton kernels of the states of causal linear attention with exponential features.

Exponents are base 2: u_jf = c w_f·k_j − h |k_j|² + b_f of keys and a_tf = ±c w_f·q_t of queries. With L_t the
logarithm of row t's denominator, two recurrences of one form run over the tokens,

    Σ_{j≤t} 2^(u_jf) [v_j, 1]   forwards,    Σ_{t≥j} 2^(a_tf − L_t) [g_t, −δ_t]   backwards,

each stored as sums relative to 2^reference, feature by feature. Features do not depend on each other, so
that a program walks over the tokens with a block of features. Sequences are cut into segments, whose states
are computed at once, scanned, and walked again from the scanned states to write the state at every chunk.

Positions are of keys. The queries are the last positions, from position `before` on. State slots
belong to the chunks from `first`, the chunk of the first query, on: the state before chunk c is slot
c − first. States of queries are the states after a chunk, slot c − first + 1; slot 0 has all queries.
"""

import triton
import triton.language as tl


@triton.jit
def finite(reference):
    """The reference with 0 in place of −inf, so that it can be subtracted."""
    return tl.where(reference == float("-inf"), 0.0, reference)


@triton.jit
def dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_rows(x, row, real, stride, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Rows [rows PADDED] of a head, zero where not real."""
    dim = tl.arange(0, PADDED)
    return tl.load(
        x + row[:, None] * stride + dim[None, :], mask=real[:, None] & (dim < DIM)[None, :], other=0.0
    )


@triton.jit
def store_rows(x, row, real, rows, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Store rows [rows PADDED] of a contiguous head."""
    dim = tl.arange(0, PADDED)
    tl.store(
        x + row[:, None] * DIM + dim[None, :],
        rows.to(x.dtype.element_ty),
        mask=real[:, None] & (dim < DIM)[None, :],
    )


@triton.jit
def load_tokens(x, strides, b, h, row, real, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Rows [rows PADDED] of a head of [batch heads tokens dim], zero where not real."""
    return load_rows(x + b * strides[0] + h * strides[1], row, real, strides[2], DIM, PADDED)


@triton.jit
def load_offsets(offsets, head, t, tokens):
    """Offsets of the keys at positions, −inf for a hidden key and past the last."""
    return tl.load(offsets + head * tokens + t, mask=t < tokens, other=float("-inf"))


@triton.jit
def load_directions(w, w_h, kv, f, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Directions of features of a key head, [features PADDED]."""
    return load_rows(w + kv * w_h, f, f >= 0, DIM, DIM, PADDED)


@triton.jit
def with_weights(exponents, bias, kv, f, features, HAS_BIAS: tl.constexpr):
    """Exponents [keys features] plus the base-2 logarithm of each feature's weight."""
    if HAS_BIAS:
        exponents += (tl.load(bias + kv * features + f) * 1.4426950408889634)[None, :]
    return exponents


@triton.jit
def load_state(sums, at, f, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Sums [features PADDED] of the state that starts at feature `at`."""
    return load_rows(sums + at * DIM, f, f >= 0, DIM, DIM, PADDED)


@triton.jit(do_not_specialize=["tokens", "before", "first", "per_segment", "slots"])
def walk_kernel(
    w, bias, x, y, mask, offsets, columns,
    segment_sums, segment_ones, segment_references, sums, ones, references,
    factor, half, constant,
    tokens, before, first, per_segment, slots, features, heads, kv_heads,
    w_h, x_strides, y_strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    QUERIES: tl.constexpr, WRITE: tl.constexpr, OPERANDS: tl.constexpr,
):  # fmt: skip
    """State of a segment by itself, or with WRITE, from the state before it, states at its chunks.

    Of keys, the first launch also writes the offsets −h |k|² and a constant, −inf for a hidden key.
    """
    f = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    segment, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, kv = bh // kv_heads, bh % kv_heads
    chunks = tl.cdiv(tokens, TOKENS)
    steps = chunks - first if QUERIES else chunks
    group = heads // kv_heads if QUERIES else 1
    rays = load_directions(w, w_h, kv, f, DIM, PADDED)
    # Slot 0 holds the state before the first segment, and each segment writes to the slot after its own.
    at = (bh * (tl.num_programs(1) + 1) + segment) * features
    reference = tl.full([FEATURES], float("-inf"), tl.float32)
    total, acc = tl.zeros([FEATURES], tl.float32), tl.zeros([FEATURES, VALUE_PADDED], tl.float32)
    if WRITE:
        acc = load_state(segment_sums, at, f, VALUE_DIM, VALUE_PADDED)
        total, reference = tl.load(segment_ones + at + f), tl.load(segment_references + at + f)
    last = tl.minimum((segment + 1) * per_segment, steps)
    for turn in range(segment * per_segment * group, last * group):
        step, member = turn // group, turn % group
        chunk = chunks - 1 - step if QUERIES else step
        if WRITE:
            slot = chunk - first + 1 if QUERIES else chunk - first
            # A mask, since registers spill over a branch.
            written = f >= tl.where((member == 0) & (slot >= 0), 0, features)
            to = (bh * slots + slot) * features
            store_rows(sums + to * VALUE_DIM, f, written, acc, VALUE_DIM, VALUE_PADDED)
            tl.store(ones + to + f, total, mask=written)
            tl.store(references + to + f, reference, mask=written)
        t = chunk * TOKENS + tl.arange(0, TOKENS)
        if QUERIES:
            h = kv * group + member
            row, real = t - before, (t >= before) & (t < tokens)
            place = (b * heads + h) * (tokens - before) + row
        else:
            h = kv
            row, real = t, t < tokens
            place = bh * tokens + t
            if HAS_MASK:
                real = real & (tl.load(mask + b * tokens + t, mask=real, other=0) != 0)
        rows = load_tokens(x, x_strides, b, h, row, real, DIM, PADDED)
        values = load_tokens(y, y_strides, b, h, row, real, VALUE_DIM, VALUE_PADDED)
        if QUERIES or WRITE:
            offset = tl.load(offsets + place, mask=real, other=float("-inf"))
        else:
            wide = rows.to(tl.float32)
            offset = tl.where(real, -half * tl.sum(wide * wide, 1) - constant, float("-inf"))
            if tl.program_id(0) == 0:
                tl.store(offsets + place, offset, mask=t < tokens)
        exponents = dot(rays, tl.trans(rows)) * factor + offset[None, :]
        if HAS_BIAS:
            exponents += (tl.load(bias + kv * features + f) * 1.4426950408889634)[:, None]
        new = tl.maximum(reference, tl.max(exponents, 1))
        fade, powers = tl.exp2(reference - finite(new)), tl.exp2(exponents - finite(new)[:, None])
        if QUERIES:
            column = tl.load(columns + place, mask=real, other=0.0)
            total = total * fade + tl.sum(powers * column[None, :], 1)
        else:
            total = total * fade + tl.sum(powers, 1)
        acc = acc * fade[:, None] + dot(powers.to(OPERANDS), values.to(OPERANDS))
        reference = new
    if not WRITE:
        at += features
        store_rows(segment_sums + at * VALUE_DIM, f, f >= 0, acc, VALUE_DIM, VALUE_PADDED)
        tl.store(segment_ones + at + f, total)
        tl.store(segment_references + at + f, reference)
    elif QUERIES and last == steps:
        to = bh * slots * features
        store_rows(sums + to * VALUE_DIM, f, f >= 0, acc, VALUE_DIM, VALUE_PADDED)
        tl.store(ones + to + f, total)
        tl.store(references + to + f, reference)


@triton.jit(do_not_specialize=["segments"])
def scan_kernel(
    sums, ones, references,
    to_sums, to_ones, to_references,
    segments, features,
    DIM: tl.constexpr, PADDED: tl.constexpr, FEATURES: tl.constexpr, HAS_PAST: tl.constexpr,
):  # fmt: skip
    """The state after each segment, from the state of each segment by itself and that of slot 0.

    All warps read ones and references, and one writes them: in place, a late warp would read the result.
    """
    f, bh = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES), tl.program_id(1).to(tl.int64)
    at = bh * (segments + 1) * features
    reference = tl.full([FEATURES], float("-inf"), tl.float32)
    total, acc = tl.zeros([FEATURES], tl.float32), tl.zeros([FEATURES, PADDED], tl.float32)
    if HAS_PAST:
        acc = load_state(sums, at, f, DIM, PADDED)
        total, reference = tl.load(ones + at + f), tl.load(references + at + f)
    store_rows(to_sums + at * DIM, f, f >= 0, acc, DIM, PADDED)
    tl.store(to_ones + at + f, total)
    tl.store(to_references + at + f, reference)
    for _ in range(0, segments):
        at += features
        next_acc = load_state(sums, at, f, DIM, PADDED)
        next_total, next_reference = tl.load(ones + at + f), tl.load(references + at + f)
        new = tl.maximum(reference, next_reference)
        fade, factor = tl.exp2(reference - finite(new)), tl.exp2(next_reference - finite(new))
        acc = acc * fade[:, None] + next_acc * factor[:, None]
        total, reference = total * fade + next_total * factor, new
        store_rows(to_sums + at * DIM, f, f >= 0, acc, DIM, PADDED)
        tl.store(to_ones + at + f, total)
        tl.store(to_references + at + f, reference)
