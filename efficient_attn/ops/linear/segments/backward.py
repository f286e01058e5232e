"""Backward pass of causal linear attention, segment by segment, with features recomputed.

With L_t the logarithm of row t's denominator, δ_t = g_t·out_t and G_tj = g_t·v_j − δ_t, the weight of key j
in row t is Σ_f e^(a_tf + u_jf − L_t), and

    ∂a_tf = Σ_{j≤t} G_tj e^(a_tf + u_jf − L_t),   ∂u_jf = Σ_{t≥j} G_tj e^(a_tf + u_jf − L_t),
    ∂v_j = Σ_{t≥j} Σ_f e^(a_tf + u_jf − L_t) g_t:

within a chunk from all pairs, at the scales of the forward pass; beyond it from the state of earlier keys for
queries and from that of later queries, Σ_t e^(a_tf − L_t) [g_t, −δ_t], for keys. No such power exceeds 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast_dtype
from efficient_attn.ops.linear.backward import (
    CausalGradients,
    Outputs,
    Scaled,
    at_reference,
    feature_gradients,
)
from efficient_attn.ops.linear.features import Features
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.segments.chunks import Segment, segments
from efficient_attn.ops.linear.segments.forward import Keys, keys_of
from efficient_attn.ops.linear.segments.scaled import floor, scaled_queries, visible_scale
from efficient_attn.ops.linear.segments.scan import running_states
from efficient_attn.ops.linear.segments.weak_chunks import chunk_rows, put_chunks, weak, weak_chunks
from efficient_attn.ops.linear.segments.weak_chunks_backward import weak_chunk_gradients
from efficient_attn.ops.linear.state import LinearState, with_ones

# Factor on upstream gradients, a power of two: products in float32 reach down to e⁻⁸⁰.
_LIFT = 2.0**50


class Rows(NamedTuple):
    """Query-side quantities of a segment in chunks.

    Attributes:
        queries: [batch kv_heads chunks·rows head_dim], scaled.
        features: [flat_heads chunks rows features].
        g: [g, −δ], [flat_heads chunks rows value_dim+1].
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
    for some in segments(inputs, inputs.k.shape[-2] - inputs.q.shape[-2]):
        rows, values = inputs.key_rows(some), with_ones(inputs.values(some))
        features = inputs.key_features(rows, some)
        grad, grad_v = _read_queries(features, values, later)
        grads[1][..., some, :], grads[2][..., some, :] = inputs.key_gradient(rows, features, grad), grad_v
    grad_q, grad_k, grad_v = (grad.to(x.dtype) for grad, x in zip(grads, inputs[:3], strict=True))
    # A past key is visible to every row, so that the powers of positive features are at most 1.
    past_sums = (later.log_scale + first).exp().mT * later.sums if to_past else None
    return CausalGradients(grad_q, grad_k, grad_v, past_sums)


def _rows(segment: Segment, grad_out: Tensor, outputs: Outputs) -> Rows:
    queries, g, out = segment.query_rows(), segment.rows(grad_out), segment.rows(outputs.out)
    sign = None
    if segment.inputs.map.signed:
        sign = 1 - 2 * segment.rows(outputs.negative)
    return Rows(
        queries,
        segment.query_features(queries),
        torch.cat([g, -(g * out).sum(dim=-1, keepdim=True)], dim=-1),
        segment.rows(outputs.log_normaliser, torch.inf),
        sign,
    )


def _normalised(rows: Rows, offset: Tensor) -> Scaled:
    """Features of queries times e^offset over the row's denominator."""
    scaled = at_reference(rows.features, offset - rows.logarithm)
    return scaled if rows.sign is None else Scaled(*(x * rows.sign for x in scaled if x is not None))


def _within_chunks(segment: Segment, rows: Rows, past: LinearState, grads: tuple[Tensor, ...]) -> LinearState:
    """Write gradients from earlier keys and from pairs of the same chunk; return the state after them."""
    keys = keys_of(segment, past)
    earlier = _normalised(rows, floor(keys.before.log_scale))
    grad_q = feature_gradients(earlier, rows.g @ keys.before.sums.mT)
    pairs = _pairs(rows, keys)
    grad_q = _sum(grad_q, pairs.grad_queries)
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
    grad_scores = _triangle(factors * ((lift * rows.g) @ keys.values.mT), size)
    scores = _triangle(factors * (queries.weights @ keys.scaled.weights.mT), size)
    found = Pairs(
        _gradients(queries.weights, grad_scores @ keys.scaled.weights, rows.features, lift),
        _gradients(keys.scaled.weights, grad_scores.mT @ queries.weights, keys.features, lift),
        scores.mT @ rows.g[..., :-1],
    )
    return found if weak_rows is None else _with_weak_chunks(found, weak_rows, rows, keys)


def _with_weak_chunks(pairs: Pairs, weak_rows: Tensor, rows: Rows, keys: Keys) -> Pairs:
    """The gradients, computed again for weak chunks."""
    size = keys.values.shape[-2]
    for chunks in weak_chunks(weak_rows, rows.features.log_scale.shape[-1]):
        found = weak_chunk_gradients(
            chunk_rows(rows.features.log_scale, chunks, size),
            *(x.flatten(0, 1)[chunks] for x in (keys.features.log_scale, keys.values)),
            *(chunk_rows(x, chunks, size) for x in (rows.g, rows.logarithm)),
        )
        whole = pairs.grad_queries.log_scale, pairs.grad_keys.log_scale, pairs.grad_values
        grad_q, grad_k, grad_v = (put_chunks(x, chunks, y) for x, y in zip(whole, found, strict=True))
        pairs = Pairs(Features(grad_q, None), Features(grad_k, None), grad_v)
    return pairs


def _from_later(segment: Segment, rows: Rows, later: LinearState, grads: tuple[Tensor, ...]) -> LinearState:
    """Add the gradients from queries of later chunks; return the state of all queries from the segment on."""
    largest = (rows.features.log_scale - rows.logarithm).amax(dim=-2, keepdim=True)
    own = LinearState(_normalised(rows, -floor(largest)).weights.mT @ rows.g, largest)
    last = (x.flatten(0, 1).unsqueeze(1) for x in later)
    pairs = zip(own, last, strict=True)
    running = running_states(LinearState(*(torch.cat(pair, dim=1) for pair in pairs)), reverse=True)
    key_rows = segment.key_rows()
    features = segment.key_features(key_rows)
    grad, grad_v = _read_queries(features, segment.values(), LinearState(*(x[:, 1:] for x in running)))
    grads[1][..., segment.positions, :] += segment.key_gradient(key_rows, features, grad)
    grads[2][..., segment.positions, :] += segment.value_gradient(grad_v)
    return LinearState(*(x[:, 0].unflatten(0, segment.inputs.k.shape[:2]) for x in running))


def _read_queries(keys: Features, values: Tensor, later: LinearState) -> tuple[Features, Tensor]:
    """Gradients of keys' features and of values, from a state of queries that all see them."""
    scaled = at_reference(keys, floor(later.log_scale))
    return feature_gradients(scaled, values @ later.sums.mT), scaled.weights @ later.sums[..., :-1]


def _gradients(weights: Tensor, grad_weights: Tensor, features: Features, lift: float) -> Features:
    if features.values is None:
        return Features((weights * grad_weights).div_(lift), None)
    return Features((weights * grad_weights).sum(dim=-1, keepdim=True), grad_weights)


def _sum(one: Features, other: Features) -> Features:
    values = None
    if one.values is not None and other.values is not None:
        values = one.values + other.values
    return Features(one.log_scale + other.log_scale, values)


def _triangle(scores: Tensor, size: int) -> Tensor:
    return scores.unflatten(-2, (-1, size)).tril().flatten(-3, -2)
