"""Causal linear attention, forward and backward, as registered operators.

    call                                             algorithm
    one token after a state, no mask                 `step`
    CUDA, kernel that has passed its check there     `ops.cuda`, which stores the state at every chunk
    CPU, exponential features of directions          `causal_exponential`, chunks in place
    CPU, other exponents (elu, learned features)     `segments` of plain values, or of logarithms
    all others                                       `segments`

A segment holds chunks, whose states one scan yields; weak chunks are computed again by blocks. Memory
excluding inputs, outputs and gradients does not depend on the length, but for the CUDA kernels.

A decoding step is one token after a state, without a mask, in few operations. With positive features, m_f
the mean value of the past keys and z_f the logarithm of their summed features, the state after a key with
exponents u and value v is z' = log(e^z + e^u), m' = m + e^(u − z') (v − m), and a query with exponents a
reads Σ_f softmax_f(a + z') m'_f.
"""

import math
from typing import Any

import torch
from torch import Tensor

from efficient_attn.ops import cuda
from efficient_attn.ops.dtypes import upcast, without_autocast
from efficient_attn.ops.grouped_queries import unfold
from efficient_attn.ops.linear.causal_exponential import causal_exponential, causal_exponential_gradients
from efficient_attn.ops.linear.features import Features
from efficient_attn.ops.linear.full import whole_state
from efficient_attn.ops.linear.inputs import FIELDS, LinearInputs, Outputs, in_range, new_outputs
from efficient_attn.ops.linear.scaled_chunks import segments
from efficient_attn.ops.linear.segments import attend_segment, causal_gradients
from efficient_attn.ops.linear.state import (
    CausalGradients,
    LinearState,
    Means,
    keep_for_backward,
    merge,
    with_ones,
)
from efficient_attn.ops.operators import check_one_device, operator, transformable, transformed
from efficient_attn.ops.paths import tuned_for_cpu

_ALL = slice(None)


def causal_linear_attention(inputs: LinearInputs) -> Outputs:
    """Linear attention of each token to the tokens up to itself. The queries are the last positions."""
    return Outputs(*_attend(*inputs))


def causal_rows(inputs: LinearInputs, past: LinearState | None) -> Outputs:
    """Output of every query, without autograd. Queries are the last positions, `past` precedes all keys."""
    if cuda.serves(inputs):
        return cuda.causal_rows(inputs, past)[0]
    outputs = new_outputs(inputs.q, inputs.v)
    if past is None and (plain := inputs.plain()):
        _read_segments(plain, None, outputs)
        if in_range(outputs.log_normaliser, _blind(inputs)):
            return outputs
    if inputs.k.shape[-2] > inputs.q.shape[-2]:
        past = _before_queries(inputs, past)
    if inputs.map.exponential and tuned_for_cpu(inputs.q):
        causal_exponential(inputs, past, outputs)
    else:
        _read_segments(inputs, past, outputs)
    return outputs


def _read_segments(inputs: LinearInputs, past: LinearState | None, into: Outputs) -> None:
    """Write the output of every query, segment by segment, after a state or the keys before the queries."""
    state = _past(inputs, inputs.k.shape[-2] - inputs.q.shape[-2]) if past is None else past
    for part in segments(inputs):
        rows, state = attend_segment(inputs, part, state)
        for whole, part_rows in zip(into, rows, strict=True):
            whole[..., part, :] = part_rows


def _blind(inputs: LinearInputs) -> Tensor | None:
    """Whether queries see no real key, bool [batch 1 queries 1]; None: all see some."""
    if inputs.key_mask is None:
        return None
    return (inputs.key_mask.cumsum(dim=-1) == 0)[:, None, -inputs.q.shape[-2] :, None]


def causal_row_gradients(
    inputs: LinearInputs, past: LinearState | None, grad_out: Tensor, outputs: Outputs, *, to_past: bool
) -> CausalGradients:
    """Gradients with respect to q, k, v and, if `to_past`, the state `past` of `causal_rows`."""
    if cuda.serves(inputs):
        return cuda.causal_gradients(inputs, past, grad_out, outputs, to_past=to_past)
    plain = inputs.plain() if past is None else None
    if plain is not None and in_range(outputs.log_normaliser, _blind(inputs)):
        inputs = plain
    if inputs.k.shape[-2] > inputs.q.shape[-2]:
        past = _before_queries(inputs, past)
    if inputs.map.exponential and tuned_for_cpu(inputs.q):
        return causal_exponential_gradients(inputs, past, grad_out, outputs, to_past=to_past)
    before = _past(inputs, 0) if past is None else past
    return causal_gradients(inputs, before, grad_out, outputs, to_past=to_past)


def extend_linear_attention(
    inputs: LinearInputs, state: LinearState | Means | None
) -> tuple[Tensor, LinearState | Means]:
    """Outputs of new tokens after the tokens of a state, and the state after them.

    Gradients also reach the state, since all operations are differentiable.
    """
    if state is not None and inputs.q.shape[-2] == 1 and inputs.key_mask is None:
        return step(inputs, state)
    sums = _past(inputs, 0) if state is None else state.to_sums() if isinstance(state, Means) else state
    out, sums = _extend(inputs, sums)
    return out, sums if inputs.map.has_values else Means.of(sums)


def _extend(inputs: LinearInputs, state: LinearState) -> tuple[Tensor, LinearState]:
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs[:3], *state))
    plain = not trained and not transformed(*inputs[:3])
    if plain and cuda.serves(inputs):
        outputs, last = cuda.causal_rows(inputs, state, with_state=True)
        assert last is not None
        return outputs.out, last
    outputs = new_outputs(inputs.q, inputs.v)
    if plain and inputs.map.exponential and tuned_for_cpu(inputs.q):
        causal_exponential(inputs, state, outputs)
        return outputs.out, merge(state, whole_state(inputs)) if inputs.k.shape[-2] else state
    rows = [outputs.out[..., :0, :]]
    for part in segments(inputs):
        outs, state = attend_segment(inputs, part, state)
        rows.append(outs.out)
    # The state is a view of the states of all chunks, which it would keep alive.
    return torch.cat(rows, dim=-2).to(inputs.q.dtype), LinearState(*(x.clone() for x in state))


def _before_queries(inputs: LinearInputs, past: LinearState | None) -> LinearState:
    state = _past(inputs, inputs.k.shape[-2] - inputs.q.shape[-2])
    return state if past is None else merge(past, state)


def _past(inputs: LinearInputs, before: int) -> LinearState:
    """The state of the keys before the first query."""
    first = slice(0, before)
    if before == 0:
        like, shape, features = upcast(inputs.v[..., :0, :]), inputs.k.shape[:2], inputs.num_features
        scales = 1 if inputs.map.has_values else features
        sums = like.new_zeros(*shape, features, inputs.v.shape[-1] + 1)
        return LinearState(sums, like.new_full((*shape, 1, scales), -torch.inf))
    mask = inputs.mask(first)
    return whole_state(inputs._replace(k=inputs.k[..., first, :], v=inputs.v[..., first, :], key_mask=mask))


@operator("causal_linear", f"({FIELDS}) -> (Tensor, Tensor, Tensor)")
def _causal(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = LinearInputs(*fields)
    with without_autocast(inputs.q):
        return (*causal_rows(inputs, None),)


@torch.library.register_fake(_causal)
def _(*fields: Any) -> tuple[Tensor, ...]:
    inputs = LinearInputs(*fields)
    check_one_device(**inputs._asdict())
    return (*new_outputs(inputs.q, inputs.v),)


@operator(
    "causal_linear_backward",
    f"(Tensor grad_out, Tensor out, Tensor logarithm, Tensor negative, {FIELDS}) -> (Tensor, Tensor, Tensor)",
)
def _causal_backward(
    grad_out: Tensor, out: Tensor, logarithm: Tensor, negative: Tensor, *fields: Any
) -> tuple[Tensor, Tensor, Tensor]:
    inputs, outputs = LinearInputs(*fields), Outputs(out, logarithm, negative)
    with without_autocast(inputs.q):
        return causal_row_gradients(inputs, None, grad_out, outputs, to_past=False)[:3]


@torch.library.register_fake(_causal_backward)
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in arguments[4:7])


def _backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple:
    if grad_out is None:
        return (None,) * 9
    return *_differentiate(grad_out, *ctx.saved_tensors, ctx.kind, ctx.scale), *[None] * 6


_attend = transformable(_causal, _backward, keep_for_backward)
_differentiate = transformable(_causal_backward)


def step(inputs: LinearInputs, state: LinearState | Means) -> tuple[Tensor, LinearState | Means]:
    """Output of one token [batch heads 1 value_dim], and the state after it."""
    shape = inputs.k.shape[:2]
    flat = type(state)(*(x.flatten(0, 1) for x in state))
    out, after = _step_of_means(inputs, flat) if isinstance(flat, Means) else _step_of_sums(inputs, flat)
    return unfold(out.unflatten(0, shape), inputs.q.shape[1]), type(state)(
        *(x.unflatten(0, shape) for x in after)
    )


def _step_of_means(inputs: LinearInputs, state: Means) -> tuple[Tensor, Means]:
    q, (k, v) = inputs.flat_queries(_ALL), inputs.flat_keys_and_values(_ALL)
    if not inputs.map.exponential:
        queries, keys = _both(_features(inputs, q, k).log_scale)
    else:
        w = inputs.expand_to_heads(inputs.exponents()).mT
        below = torch.rsub(k @ k.mT, -math.log(w.shape[-1]) / 2, alpha=abs(inputs.scale) / 2)
        keys = torch.baddbmm(below, k, w, alpha=math.sqrt(abs(inputs.scale)))
        if inputs.log_weights is not None:
            keys = keys + inputs.expand_to_heads(inputs.log_weights)
    log_sums = torch.logaddexp(state.log_sums, keys)
    means = torch.lerp(state.means, v, (keys - log_sums).exp().mT)
    if not inputs.map.exponential:
        exponents = queries + log_sums
    else:
        exponents = torch.baddbmm(log_sums, q, w, alpha=inputs.query_factor)
    return exponents.softmax(dim=-1) @ means, Means(means, log_sums)


def _step_of_sums(inputs: LinearInputs, state: LinearState) -> tuple[Tensor, LinearState]:
    q, (k, v) = inputs.flat_queries(_ALL), inputs.flat_keys_and_values(_ALL)
    features = _features(inputs, q, k)
    assert features.values is not None, "other features are kept as means"
    (queries, keys), values = _both(features.values), with_ones(v)
    if inputs.map.unscaled:
        after = LinearState(torch.baddbmm(state.sums, keys.mT, values), torch.zeros_like(state.log_scale))
    else:
        _, scale = _both(features.log_scale)
        largest = torch.maximum(state.log_scale, scale.detach())
        past = state.sums * (state.log_scale - largest).exp()
        after = LinearState(torch.baddbmm(past, keys.mT, values * (scale - largest).exp()), largest)
    sums = queries @ after.sums
    return sums[..., :-1] / sums[..., -1:], after


def _features(inputs: LinearInputs, q: Tensor, k: Tensor) -> Features:
    """Features of the rows of queries, then of the key, [flat_heads rows+1 …]."""
    rows = torch.cat([q * inputs.query_factor, k * math.sqrt(abs(inputs.scale))], dim=-2)
    return inputs.map.features(rows, inputs.directions_for(rows))


def _both(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :-1], rows[:, -1:]
