"""Linear attention of every query to every key, forward and backward, as registered operators.

Memory excluding inputs, outputs and gradients is O(chunk · features + features · value_dim) per head in
both passes: the backward pass recomputes the features of a chunk instead of storing all features.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import without_autocast
from efficient_attn.ops.grouped_queries import unfold
from efficient_attn.ops.linear.features import Features
from efficient_attn.ops.linear.inputs import FIELDS, LinearInputs, Outputs, chunks, in_range, new_outputs
from efficient_attn.ops.linear.softmax_identity import suits, two_softmaxes, two_softmaxes_gradients
from efficient_attn.ops.linear.state import (
    LinearState,
    divide,
    exponential,
    finite,
    keep_for_backward,
    log_sum,
    merge,
    output_gradients,
    query_weights,
    read_gradients,
    sees,
    summarise,
    with_ones,
)
from efficient_attn.ops.linear.trigonometric import trigonometric_attention, trigonometric_gradients
from efficient_attn.ops.operators import check_one_device, operator, transformable
from efficient_attn.ops.paths import tuned_for_cpu
from efficient_attn.ops.softmax.flex import NotCompiledError


def full_linear_attention(inputs: LinearInputs) -> Outputs:
    """Σ_j φ(q)·φ(k_j) v_j / Σ_j φ(q)·φ(k_j) over all keys (Choromanski et al. 2021, section 2.2)."""
    return Outputs(*_attend(*inputs)[:3])


def whole_state(inputs: LinearInputs) -> LinearState:
    states = (
        summarise(
            inputs.key_features(inputs.key_rows(part), part),
            inputs.real_rows(inputs.v, part),
            unscaled=inputs.map.unscaled,
        )
        for part in chunks(inputs, inputs.k.shape[-2])
    )
    state = next(states)
    for following in states:
        state = merge(state, following)
    return state


@operator("full_linear", f"({FIELDS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def _full(*fields: Any) -> tuple[Tensor, ...]:
    inputs = LinearInputs(*fields)
    with without_autocast(inputs.q):
        if suits(inputs):
            with suppress(NotCompiledError):
                outputs, state = two_softmaxes(inputs)
                return *outputs, *state
        if inputs.map.trigonometric and tuned_for_cpu(inputs.q):
            outputs, state = trigonometric_attention(inputs)
            return *outputs, *state
        if plain := inputs.plain():
            state = whole_state(plain)
            outputs = read_state(plain, state)
            if in_range(outputs.log_normaliser, _blind(inputs)):
                return *outputs, state.sums, state.log_scale.repeat(1, 1, 1, inputs.num_features)
        state = whole_state(inputs)
        return *read_state(inputs, state), *state


def _blind(inputs: LinearInputs) -> Tensor | None:
    """Whether rows have no real key, bool [batch 1 1 1]; None: all have."""
    return None if inputs.key_mask is None else ~inputs.key_mask.any(dim=-1)[:, None, None, None]


def read_state(inputs: LinearInputs, state: LinearState) -> Outputs:
    parts = chunks(inputs, inputs.q.shape[-2])
    outputs = new_outputs(inputs.q, inputs.v) if len(parts) != 1 else None
    seen = None if inputs.key_mask is None else sees(state)
    for part in parts:
        features = inputs.query_features(inputs.query_rows(part))
        weights, reference = query_weights(features, state.log_scale)
        sums = weights @ state.sums
        total = sums[..., -1:]
        rows = Outputs(divide(sums, total, seen), log_sum(total, reference, seen), total < 0)
        if outputs is None:
            out, *rest = (unfold(x, inputs.q.shape[1]) for x in rows)
            return Outputs(out.to(inputs.q.dtype), *rest)
        outputs.put(part, rows)
    assert outputs is not None
    return outputs


@torch.library.register_fake(_full)
def _(*fields: Any) -> tuple[Tensor, ...]:
    inputs = LinearInputs(*fields)
    check_one_device(**inputs._asdict())
    outputs, features = new_outputs(inputs.q, inputs.v), inputs.num_features
    shape, logarithm = inputs.k.shape[:2], outputs.log_normaliser
    return (
        *outputs,
        logarithm.new_empty(*shape, features, inputs.v.shape[-1] + 1),
        logarithm.new_empty(*shape, 1, 1 if inputs.map.has_values else features),
    )


@operator(
    "full_linear_backward",
    "(Tensor grad_out, Tensor out, Tensor logarithm, Tensor negative, Tensor sums, Tensor reference, "
    f"{FIELDS}) -> (Tensor, Tensor, Tensor)",
)
def _full_backward(grad_out: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
    outputs, state, inputs = Outputs(*saved[:3]), LinearState(*saved[3:5]), LinearInputs(*saved[5:])
    with without_autocast(inputs.q):
        if inputs.map.exponential:
            return two_softmaxes_gradients(inputs, grad_out, *outputs[:2], state)
        if inputs.map.trigonometric and tuned_for_cpu(inputs.q):
            return trigonometric_gradients(inputs, grad_out, outputs, state)
        plain = inputs.plain()
        if plain is not None and in_range(outputs.log_normaliser, _blind(inputs)):
            inputs, state = plain, LinearState(state.sums, state.log_scale[..., :1])
        grad_q, query_sums = query_gradients(inputs, state, grad_out, outputs)
        return grad_q, *key_gradients(inputs, state.log_scale, query_sums)


def query_gradients(
    inputs: LinearInputs, state: LinearState, grad_out: Tensor, outputs: Outputs
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to q and to the sums of the state."""
    grad_q, kv_heads = torch.empty_like(inputs.q, memory_format=torch.contiguous_format), inputs.k.shape[1]
    query_sums = torch.zeros_like(state.sums)
    for part in chunks(inputs, inputs.q.shape[-2]):
        rows = inputs.query_rows(part)
        features = inputs.query_features(rows)
        logarithm, sign = outputs.normaliser(part, kv_heads)
        offset = finite(state.log_scale) - logarithm
        g = output_gradients(grad_out, outputs.out, part, kv_heads)
        if features.values is None:
            weights = exponential(features.log_scale + offset)
            grads = Features(weights * (g @ state.sums.mT), None)
        else:
            g = g * (exponential(offset) * sign)
            weights, grads = features.values, features._replace(values=g @ state.sums.mT)
        grad_q[..., part, :] = unfold(inputs.query_gradient(rows, features, grads), inputs.q.shape[1])
        query_sums += weights.mT @ g
    return grad_q, query_sums


def key_gradients(inputs: LinearInputs, reference: Tensor, query_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients with respect to k and v, from the gradient of the sums of a state at `reference`."""
    grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[1:3])
    for part in chunks(inputs, inputs.k.shape[-2]):
        rows = inputs.key_rows(part)
        features = inputs.key_features(rows, part)
        values = with_ones(inputs.real_rows(inputs.v, part))
        offset, unscaled = -finite(reference), inputs.map.unscaled
        grads, grad_values = read_gradients(features, values, offset, query_sums, unscaled=unscaled)
        grad_k[..., part, :] = inputs.key_gradient(rows, features, grads)
        grad_v[..., part, :] = grad_values
    return grad_k, grad_v


@torch.library.register_fake(_full_backward)
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in arguments[6:9])


def _backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple:
    if grad_out is None:
        return (None,) * 9
    return *_differentiate(grad_out, *ctx.saved_tensors, ctx.kind, ctx.scale), *[None] * 6


_attend = transformable(_full, _backward, keep_for_backward)
_differentiate = transformable(_full_backward)
