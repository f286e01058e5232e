"""Causal linear attention in chunks, forward and backward, as registered operators.

The forward pass carries a state of keys from chunk to chunk. The backward pass scans twice and recomputes
features: forwards with the state of keys for the query gradients, backwards with a state of queries for
the key and value gradients. Memory excluding inputs, outputs and gradients is
O(chunk · (chunk + features) + features · value_dim) per head.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import without_autocast
from efficient_attn.ops.linear.backward import (
    Outputs,
    at_reference,
    feature_gradients,
    keep_for_backward,
    new_outputs,
    normalised,
    output_gradients,
)
from efficient_attn.ops.linear.fast.causal import causal_exponential
from efficient_attn.ops.linear.fast.causal_backward import causal_exponential_gradients
from efficient_attn.ops.linear.features import Features
from efficient_attn.ops.linear.full import whole_state
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.state import (
    LinearState,
    causal_chunk,
    empty_state,
    finite,
    merge,
    rescaling,
    summarise,
    triangle,
    with_ones,
)
from efficient_attn.ops.operators import check_one_device, transformable

# Tokens per chunk, within which scores are computed directly.
CHUNK = 64


def causal_linear_attention(inputs: LinearInputs) -> Outputs:
    """Linear attention of each token to the tokens up to itself; the queries are the last positions."""
    return Outputs(*_attend(*inputs)[:3])


def extend_linear_attention(inputs: LinearInputs, state: LinearState | None) -> tuple[Tensor, LinearState]:
    """Outputs of new tokens after the tokens of a state, and the state after them.

    Gradients also reach the state, since all operations are differentiable.
    """
    rows, state = [], _past(inputs, 0) if state is None else state
    for part in _chunks(0, inputs.q.shape[-2]):
        chunk = causal_chunk(state, *_features(inputs, part, 0), inputs.values(part))
        rows.append(chunk.out.unflatten(2, (inputs.group, -1)).flatten(1, 2))
        state = chunk.state
    if not rows:
        return inputs.q.new_zeros(*inputs.q.shape[:-1], inputs.v.shape[-1]), state
    return torch.cat(rows, dim=-2).to(inputs.q.dtype), state


def _chunks(start: int, end: int) -> list[slice]:
    return [slice(i, min(i + CHUNK, end)) for i in range(start, end, CHUNK)]


def _features(inputs: LinearInputs, part: slice, before: int) -> tuple[Features, Features]:
    """Features of a chunk of queries and of the keys at the same positions."""
    keys = slice(part.start + before, part.stop + before)
    return (
        inputs.query_features(inputs.query_rows(part)),
        inputs.key_features(inputs.key_rows(keys), keys),
    )


def _past(inputs: LinearInputs, before: int) -> LinearState:
    """The state of the keys before the first query."""
    first = slice(0, before)
    if before == 0:
        keys = inputs.key_features(inputs.key_rows(first), first)
        return empty_state(keys, inputs.v.shape[-1])
    mask = None if inputs.key_mask is None else inputs.key_mask[:, first]
    return whole_state(inputs._replace(k=inputs.k[..., first, :], v=inputs.v[..., first, :], key_mask=mask))


@torch.library.custom_op("efficient_attn::causal_linear", mutates_args=())
def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    directions: Tensor | None,
    log_weights: Tensor | None,
    kind: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = LinearInputs(q, k, v, key_mask, directions, log_weights, kind, scale)
    outputs, before = new_outputs(q, v), k.shape[-2] - q.shape[-2]
    ends = torch.zeros(q.shape[-2] + 1, dtype=torch.bool)
    with without_autocast(q):
        if inputs.map.exponents is not None:
            causal_exponential(inputs, _past(inputs, before) if before else None, outputs)
            return *outputs, ends
        state = _past(inputs, before)
        for part in _chunks(0, q.shape[-2]):
            keys = slice(part.start + before, part.stop + before)
            chunk = causal_chunk(state, *_features(inputs, part, before), inputs.values(keys))
            outputs.put(part, chunk)
            ends[[part.start + length for length in accumulate(chunk.lengths)]] = True
            state = chunk.state
    return *outputs, ends


@_causal.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    directions: Tensor | None,
    log_weights: Tensor | None,
    kind: str,
    scale: float,
) -> tuple[Tensor, ...]:
    check_one_device(q=q, k=k, v=v, key_mask=key_mask, directions=directions, log_weights=log_weights)
    return *new_outputs(q, v), torch.empty(q.shape[-2] + 1, dtype=torch.bool)


@torch.library.custom_op("efficient_attn::causal_linear_backward", mutates_args=())
def _causal_backward(
    grad_out: Tensor,
    out: Tensor,
    logarithm: Tensor,
    negative: Tensor,
    ends: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    directions: Tensor | None,
    log_weights: Tensor | None,
    kind: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = LinearInputs(q, k, v, key_mask, directions, log_weights, kind, scale)
    if inputs.map.exponents is not None:
        with without_autocast(q):
            before = k.shape[-2] - q.shape[-2]
            past = _past(inputs, before) if before else None
            return causal_exponential_gradients(inputs, past, grad_out, out, logarithm)
    outputs, stops = Outputs(out, logarithm, negative), ends.nonzero().flatten().tolist()
    pieces = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    with without_autocast(q):
        grad_q = _query_gradients(inputs, grad_out, outputs, pieces)
        grad_k, grad_v = _key_gradients(inputs, grad_out, outputs, pieces)
    return grad_q, grad_k, grad_v


def _query_gradients(inputs: LinearInputs, grad_out: Tensor, outputs: Outputs, pieces: list[slice]) -> Tensor:
    """Gradients with respect to the queries, with the state of the forward pass."""
    grad_q = torch.empty_like(inputs.q, memory_format=torch.contiguous_format)
    before, kv_heads = inputs.k.shape[-2] - inputs.q.shape[-2], inputs.k.shape[1]
    state = _past(inputs, before)
    for part in pieces:
        positions = slice(part.start + before, part.stop + before)
        features, keys = _features(inputs, part, before)
        values = inputs.values(positions)
        here = merge(state, summarise(keys, values))
        queries = normalised(features, here.log_scale, *outputs.normaliser(part, kv_heads))
        g = output_gradients(grad_out, outputs.out, part, kv_heads)
        earlier = rescaling(state, here.log_scale).mT * state.sums
        weights = at_reference(keys, -finite(here.log_scale)).weights
        grad_weights = triangle(g @ with_ones(values).mT) @ weights + g @ earlier.mT
        rows = inputs.query_rows(part)
        grad_q[..., part, :] = inputs.query_gradient(rows, features, feature_gradients(queries, grad_weights))
        state = here
    return grad_q


def _key_gradients(
    inputs: LinearInputs, grad_out: Tensor, outputs: Outputs, pieces: list[slice]
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to keys and values, backwards in time with a state of queries."""
    grad_k, grad_v = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (inputs.k, inputs.v)
    )
    before, kv_heads = inputs.k.shape[-2] - inputs.q.shape[-2], inputs.k.shape[1]
    later: LinearState | None = None
    for part in reversed(pieces):
        features = inputs.query_features(inputs.query_rows(part))
        logarithm, sign = outputs.normaliser(part, kv_heads)
        g = output_gradients(grad_out, outputs.out, part, kv_heads)
        top = (features.log_scale - logarithm).amax(dim=-2, keepdim=True)
        if later is None:
            later = LinearState(top.new_zeros(*top.shape[:2], *_sums_shape(features, g)), top)
        here = torch.maximum(later.log_scale, top)
        queries = normalised(features, -finite(here), logarithm, sign)
        sums = rescaling(later, here).mT * later.sums
        positions = slice(part.start + before, part.stop + before)
        _put_key_gradients(inputs, positions, here, sums, (queries.weights, g), (grad_k, grad_v))
        later = LinearState(sums + queries.weights.mT @ g, here)
    if before and later is not None:
        for part in _chunks(0, before):
            _put_key_gradients(inputs, part, later.log_scale, later.sums, None, (grad_k, grad_v))
    return grad_k, grad_v


def _sums_shape(features: Features, g: Tensor) -> tuple[int, int]:
    values = features.log_scale if features.values is None else features.values
    return values.shape[-1], g.shape[-1]


def _put_key_gradients(
    inputs: LinearInputs,
    part: slice,
    reference: Tensor,
    sums: Tensor,
    queries: tuple[Tensor, Tensor] | None,
    into: tuple[Tensor, Tensor],
) -> None:
    """Write the gradients of some keys and values, from later queries' sums and their chunk's queries."""
    grad_k, grad_v = into
    rows = inputs.key_rows(part)
    features = inputs.key_features(rows, part)
    keys, values = at_reference(features, finite(reference)), with_ones(inputs.values(part))
    grad_weights, grad_values = values @ sums.mT, keys.weights @ sums[..., :-1]
    if queries is not None:
        weights, g = queries
        grad_weights = grad_weights + triangle(g @ values.mT).mT @ weights
        grad_values = grad_values + triangle(weights @ keys.weights.mT).mT @ g[..., :-1]
    grad_k[..., part, :] = inputs.key_gradient(rows, features, feature_gradients(keys, grad_weights))
    grad_v[..., part, :] = grad_values


@_causal_backward.register_fake
def _(
    grad_out: Tensor,
    out: Tensor,
    logarithm: Tensor,
    negative: Tensor,
    ends: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple:
    if grad_out is None:
        return (None,) * 8
    return *_differentiate(grad_out, *ctx.saved_tensors, ctx.kind, ctx.scale), *[None] * 5


_attend = transformable(_causal, _backward, keep_for_backward)
_differentiate = transformable(_causal_backward)
