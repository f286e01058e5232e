"""Causal linear attention, segment by segment, for every feature map on any device.

Let a_tf be the exponents of queries and u_jf of keys. Row t of a chunk is the sum of two parts, each at
a scale that keys visible to the row determine, so that no other key takes its digits:

    past:   e^α Σ_f e^(a_tf + R_f − α) P_f,   with P and R the state before the chunk,
    chunk:  e^(α + τ) Σ_{j≤t} (p_t·r_j) e^(β_j − τ) [v_j, 1],
            p_tf = e^(a_tf + c_f − α),  r_jf = e^(u_jf − c_f − β_j),  c_f = max_j u_jf,  τ = max_{j≤t} β_j.

The backward pass recomputes the features. With L_t the logarithm of row t's denominator, δ_t = g_t·out_t and
G_tj = g_t·v_j − δ_t, the weight of key j in row t is Σ_f e^(a_tf + u_jf − L_t), and

    ∂a_tf = Σ_{j≤t} G_tj e^(a_tf + u_jf − L_t),   ∂u_jf = Σ_{t≥j} G_tj e^(a_tf + u_jf − L_t),
    ∂v_j = Σ_{t≥j} Σ_f e^(a_tf + u_jf − L_t) g_t.

Within a chunk they follow from all pairs, at the scales of the forward pass. Beyond it queries read the state
of earlier keys, and keys the state of later queries, Σ_t e^(a_tf − L_t) [g_t, −δ_t]. No such power exceeds 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast_dtype
from efficient_attn.ops.linear.features import Features
from efficient_attn.ops.linear.full import key_gradients
from efficient_attn.ops.linear.inputs import LinearInputs, Outputs, rows_of
from efficient_attn.ops.linear.scaled_chunks import (
    UNSEEN,
    ScaledKeys,
    ScaledQueries,
    Segment,
    floor,
    in_digits,
    running_states,
    scaled_keys,
    scaled_queries,
    segments,
    states,
    visible_scale,
)
from efficient_attn.ops.linear.state import (
    CausalGradients,
    LinearState,
    divide,
    exponential,
    log_sum,
    read_gradients,
)
from efficient_attn.ops.linear.weak_chunks import (
    ScaledSums,
    chunk_rows,
    put_chunks,
    read_weak_chunks,
    weak,
    weak_chunk_gradients,
    weak_chunks,
)


class Keys(NamedTuple):
    """Keys of a segment in chunks.

    Attributes:
        rows: Scaled keys, [batch kv_heads chunks·size head_dim].
        features: [flat_heads chunks size features].
        values: Values and ones, [flat_heads chunks size value_dim+1].
        scaled: The same features at scales of their own.
        before: State of all keys before each chunk, [flat_heads chunks …].
        after: State of all keys up to the end of the segment, [batch kv_heads …].
    """

    rows: Tensor
    features: Features
    values: Tensor
    scaled: ScaledKeys
    before: LinearState
    after: LinearState


def attend_segment(inputs: LinearInputs, part: slice, past: LinearState) -> tuple[Outputs, LinearState]:
    """Output rows of some queries after the keys of a state, and the state after them."""
    segment = Segment.of(inputs, part)
    keys = keys_of(segment, past)
    queries = segment.query_features(segment.query_rows())
    earlier = _read_state(queries, keys.before)
    here = _read_chunk(
        scaled_queries(queries, keys.scaled), keys.scaled, keys.values, unscaled=inputs.map.unscaled
    )
    if queries.values is None:
        total = here.sums[..., -1:] + (earlier.scale - here.scale).exp() * earlier.sums[..., -1:]
        here = read_weak_chunks(here, total.log(), queries.log_scale, keys.features.log_scale, keys.values)
    outputs = _outputs(here, earlier, segment.inputs)
    return Outputs(*(segment.tokens(x) for x in outputs)), keys.after


def keys_of(segment: Segment, past: LinearState) -> Keys:
    rows, values = segment.inputs.key_rows(slice(None)), segment.values()
    features = segment.key_features(rows)
    scaled = scaled_keys(features)
    unscaled = segment.inputs.map.unscaled
    before, after = running_states(states(scaled, values, unscaled=unscaled), past, unscaled=unscaled)
    return Keys(rows, features, values, scaled, before, after)


def _read_state(queries: Features, state: LinearState) -> ScaledSums:
    """Sums over all keys before each chunk."""
    if queries.values is not None:
        return ScaledSums(queries.values @ state.sums, floor(state.log_scale))
    exponents = queries.log_scale + floor(state.log_scale)
    largest = exponents.detach().amax(dim=-1, keepdim=True).round()
    return ScaledSums((exponents - largest).exp() @ state.sums, largest)


def _read_chunk(queries: ScaledQueries, keys: ScaledKeys, values: Tensor, *, unscaled: bool) -> ScaledSums:
    """Sums over the keys of the same chunk, up to each row's own."""
    size = values.shape[-2]
    if unscaled:
        scores = _triangle(queries.weights @ keys.weights.mT, size)
        return ScaledSums(scores @ values, keys.log_scale[..., :1, :])
    visible = visible_scale(keys, queries.weights.shape[-2])
    # Exponents of visible keys are at most 0; the others, excluded below, stay finite for a gradient's sake.
    # The bound lies above 0, since the derivative of a clamp at its bound depends on torch's version.
    factors = (keys.log_scale.mT - floor(rows_of(visible, slice(0, size)))).clamp_max(1.0).exp()
    scores = (queries.weights @ keys.weights.mT).unflatten(-2, (-1, size))
    sums = (scores * factors.unsqueeze(-3)).tril().flatten(-3, -2) @ values
    return ScaledSums(sums, visible if queries.log_scale is None else visible + queries.log_scale)


def _outputs(here: ScaledSums, earlier: ScaledSums, inputs: LinearInputs) -> Outputs:
    """Output rows from the sums over both parts of the visible keys."""
    kind = inputs.map
    if kind.unscaled:
        sums = here.sums + earlier.sums
        total = sums[..., -1:]
        seen = None if inputs.key_mask is None else ~(total <= 0)
        return Outputs(divide(sums, total, seen), log_sum(total, 0.0, seen), total < 0)
    scale = floor(torch.maximum(here.scale, earlier.scale))
    sums = (here.scale - scale).exp() * here.sums
    sums = torch.addcmul(sums, (earlier.scale - scale).exp(), earlier.sums)
    # Comparisons with NaN are false: a NaN counts as seen, and shows.
    total, seen = sums[..., -1:], ~(scale <= UNSEEN)
    if kind.signed:
        seen_rows = None if inputs.key_mask is None else seen
        return Outputs(divide(sums, total, seen_rows), log_sum(total, scale, seen_rows), total < 0)
    # A sum of 0 of positive features is a weak row that is not computed again.
    seen = seen & ~(total <= 0)
    return Outputs(divide(sums, total, seen), log_sum(*in_digits(total, scale), seen), total < 0)


# Factor on upstream gradients, a power of two: products in float32 reach down to e⁻⁸⁰.
_LIFT = 2.0**50


class Rows(NamedTuple):
    """Query-side quantities of a segment in chunks.

    Attributes:
        queries: [batch kv_heads chunks·rows head_dim], scaled.
        features: [flat_heads chunks rows features].
        g: [g, −δ], without scales times e^(−L), [flat_heads chunks rows value_dim+1].
        logarithm: L, [flat_heads chunks rows 1]; +inf: no key.
        sign: Sign of the denominator, 1 or −1; None: all are positive.
    """

    queries: Tensor
    features: Features
    g: Tensor
    logarithm: Tensor
    sign: Tensor | None


def causal_gradients(
    inputs: LinearInputs, past: LinearState, grad_out: Tensor, outputs: Outputs, *, to_past: bool
) -> CausalGradients:
    """Gradients with respect to q, k, v and, if `to_past`, `past`, the state before the first query."""
    grads = tuple(x.new_zeros(x.shape, dtype=upcast_dtype(x.dtype)) for x in inputs[:3])
    parts, empty = segments(inputs), torch.full_like(past.log_scale, -torch.inf)
    first = past.log_scale
    for part in parts:
        segment = Segment.of(inputs, part)
        past = _within_chunks(segment, _rows(segment, grad_out, outputs), past, grads)
    later = LinearState(torch.zeros_like(past.sums), empty)
    for part in reversed(parts):
        segment = Segment.of(inputs, part)
        later = _from_later(segment, _rows(segment, grad_out, outputs), later, grads)
    if before := inputs.k.shape[-2] - inputs.q.shape[-2]:
        k, v = (x[..., :before, :] for x in inputs[1:3])
        earlier = inputs._replace(k=k, v=v, key_mask=inputs.mask(slice(before)))
        grads[1][..., :before, :], grads[2][..., :before, :] = key_gradients(
            earlier, -later.log_scale, later.sums
        )
    grad_q, grad_k, grad_v = (grad.to(x.dtype) for grad, x in zip(grads, inputs[:3], strict=True))
    # A past key is visible to every row, so that the powers of positive features are at most 1.
    past_sums = (later.log_scale + first).exp().mT * later.sums if to_past else None
    return CausalGradients(grad_q, grad_k, grad_v, past_sums)


def _rows(segment: Segment, grad_out: Tensor, outputs: Outputs) -> Rows:
    queries, g, out = segment.query_rows(), segment.rows(grad_out), segment.rows(outputs.out)
    sign, logarithm = None, segment.rows(outputs.log_normaliser, torch.inf)
    if segment.inputs.map.signed:
        sign = 1 - 2 * segment.rows(outputs.negative)
    g = torch.cat([g, -(g * out).sum(dim=-1, keepdim=True)], dim=-1)
    if segment.inputs.map.unscaled:
        g = g * logarithm.neg().exp()
    return Rows(queries, segment.query_features(queries), g, logarithm, sign)


def _within_chunks(segment: Segment, rows: Rows, past: LinearState, grads: tuple[Tensor, ...]) -> LinearState:
    """Write gradients from earlier keys and from pairs of the same chunk. Return the state after them."""
    keys, unscaled = keys_of(segment, past), segment.inputs.map.unscaled
    offset = floor(keys.before.log_scale) - rows.logarithm
    if rows.features.values is None:
        weights = exponential(rows.features.log_scale + offset)
        grad_q = Features(weights * (rows.g @ keys.before.sums.mT), None)
    else:
        g = rows.g if rows.sign is None else rows.g * (exponential(offset) * rows.sign)
        grad_q = rows.features._replace(values=g @ keys.before.sums.mT)
    pairs = _pairs_without_scales(rows, keys) if unscaled else _pairs(rows, keys)
    log_scale, values = pairs.grad_queries
    if grad_q.values is not None and values is not None:
        values = grad_q.values + values
    grad_q = Features(grad_q.log_scale + log_scale, values)
    grad_q_rows = segment.query_gradient(rows.queries, rows.features, grad_q)
    grads[0][..., segment.part, :] = grad_q_rows
    grads[1][..., segment.positions, :] = segment.key_gradient(keys.rows, keys.features, pairs.grad_keys)
    grads[2][..., segment.positions, :] = segment.value_gradient(pairs.grad_values)
    return keys.after


class Pairs(NamedTuple):
    """Gradients from the pairs of a query and a key of the same chunk."""

    grad_queries: Features
    grad_keys: Features
    grad_values: Tensor


def _pairs_without_scales(rows: Rows, keys: Keys) -> Pairs:
    queries, weights, size = rows.features.values, keys.scaled.weights, keys.values.shape[-2]
    assert queries is not None, "features without scales are values"
    grad_scores = _triangle(rows.g @ keys.values.mT, size)
    return Pairs(
        rows.features._replace(values=grad_scores @ weights),
        keys.features._replace(values=grad_scores.mT @ queries),
        _triangle(queries @ weights.mT, size).mT @ rows.g[..., :-1],
    )


def _pairs(rows: Rows, keys: Keys) -> Pairs:
    queries, size = scaled_queries(rows.features, keys.scaled), keys.values.shape[-2]
    logarithm, weak_rows, rest = rows.logarithm, None, None
    if queries.log_scale is not None:
        scale = visible_scale(keys.scaled, rows.g.shape[-2]) + queries.log_scale
        weak_rows = weak(logarithm - scale)
        # The difference of whole scales has no rounding.
        whole = logarithm.round()
        rest = (whole - logarithm).nan_to_num().exp()
        logarithm = whole.masked_fill(weak_rows, torch.inf) - queries.log_scale
    # Powers of later keys may be infinite; the triangle excludes them.
    factors = (keys.scaled.log_scale.mT - logarithm).exp()
    if rest is not None:
        factors = factors * rest
    if rows.sign is not None:
        factors = factors * rows.sign
    # At the scales of float32 products are near its smallest number, and gradients of long texts below it.
    lift = _LIFT if factors.dtype == torch.float32 and queries.log_scale is not None else 1.0
    upstream = rows.g if lift == 1.0 else lift * rows.g
    grad_scores = _triangle(factors * (upstream @ keys.values.mT), size)
    scores = _triangle(factors * (queries.weights @ keys.scaled.weights.mT), size)
    pairs = Pairs(
        _gradients(queries.weights, grad_scores @ keys.scaled.weights, rows.features, lift),
        _gradients(keys.scaled.weights, grad_scores.mT @ queries.weights, keys.features, lift),
        scores.mT @ rows.g[..., :-1],
    )
    return pairs if weak_rows is None else _with_weak_chunks(pairs, weak_rows, rows, keys)


def _with_weak_chunks(pairs: Pairs, weak_rows: Tensor, rows: Rows, keys: Keys) -> Pairs:
    size = keys.values.shape[-2]
    for chunks in weak_chunks(weak_rows, rows.features.log_scale.shape[-1]):
        gradients = weak_chunk_gradients(
            chunk_rows(rows.features.log_scale, chunks, size),
            *(x.flatten(0, 1)[chunks] for x in (keys.features.log_scale, keys.values)),
            *(chunk_rows(x, chunks, size) for x in (rows.g, rows.logarithm)),
        )
        whole = pairs.grad_queries.log_scale, pairs.grad_keys.log_scale, pairs.grad_values
        grad_q, grad_k, grad_v = (put_chunks(x, chunks, y) for x, y in zip(whole, gradients, strict=True))
        pairs = Pairs(Features(grad_q, None), Features(grad_k, None), grad_v)
    return pairs


def _from_later(segment: Segment, rows: Rows, later: LinearState, grads: tuple[Tensor, ...]) -> LinearState:
    """Add the gradients from queries of later chunks. Return the state of all queries from the segment on."""
    unscaled = segment.inputs.map.unscaled
    largest = (rows.features.log_scale - rows.logarithm).amax(dim=-2, keepdim=True)
    offset = -floor(largest) - rows.logarithm
    if rows.features.values is None:
        sums = LinearState(exponential(rows.features.log_scale + offset).mT @ rows.g, largest)
    elif rows.sign is None:
        sums = LinearState(rows.features.values.mT @ rows.g, rows.features.log_scale[..., :1, :])
    else:
        g = rows.g * (exponential(offset) * rows.sign)
        sums = LinearState(rows.features.values.mT @ g, largest)
    after, whole = running_states(sums, later, reverse=True, unscaled=unscaled)
    key_rows = segment.inputs.key_rows(slice(None))
    features = segment.key_features(key_rows)
    offset = floor(after.log_scale)
    grad, grad_v = read_gradients(features, segment.values(), offset, after.sums, unscaled=unscaled)
    grads[1][..., segment.positions, :] += segment.key_gradient(key_rows, features, grad)
    grads[2][..., segment.positions, :] += segment.value_gradient(grad_v)
    return whole


def _gradients(weights: Tensor, grad_weights: Tensor, features: Features, lift: float) -> Features:
    if features.values is None:
        return Features((weights * grad_weights).div_(lift), None)
    return Features((weights * grad_weights).sum(dim=-1, keepdim=True), grad_weights)


def _triangle(scores: Tensor, size: int) -> Tensor:
    return scores.unflatten(-2, (-1, size)).tril().flatten(-3, -2)
