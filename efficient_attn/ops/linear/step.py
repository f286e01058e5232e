"""One decoding step of linear attention: one token after a state, without a mask, in few operations.

With positive features, m_f the mean value of the past keys and z_f the logarithm of their summed features,
the state after a key with exponents u and value v is z' = log(e^z + e^u), m' = m + e^(u − z') (v − m), and a
query with exponents a reads Σ_f softmax_f(a + z') m'_f.
"""

import math

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast
from efficient_attn.ops.grouped_queries import unfold
from efficient_attn.ops.linear.features import Features
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.state import LinearState, Means, with_ones

_ALL = slice(None)


def step(inputs: LinearInputs, state: LinearState | Means) -> tuple[Tensor, LinearState | Means]:
    """Output of one token [batch heads 1 value_dim], and the state after it."""
    shape = inputs.k.shape[:2]
    flat = type(state)(*(x.flatten(0, 1) for x in state))
    out, after = _step_of_means(inputs, flat) if isinstance(flat, Means) else _step_of_sums(inputs, flat)
    return unfold(out.unflatten(0, shape), inputs.q.shape[1]), type(state)(
        *(x.unflatten(0, shape) for x in after)
    )


def _step_of_means(inputs: LinearInputs, state: Means) -> tuple[Tensor, Means]:
    q, k, v = inputs.flatten_heads(inputs.q, _ALL), inputs.flat_keys(_ALL), inputs.flat_values(_ALL)
    if inputs.map.exponents is None:
        queries, keys = _both(_features(inputs, q, k).log_scale)
    else:
        w = inputs.expand_to_heads(inputs.exponents()).mT
        below = torch.rsub(k @ k.mT, -math.log(w.shape[-1]) / 2, alpha=abs(inputs.scale) / 2)
        keys = torch.baddbmm(below, k, w, alpha=math.sqrt(abs(inputs.scale)))
        if inputs.log_weights is not None:
            keys = keys + inputs.expand_to_heads(inputs.log_weights)
    log_sums = torch.logaddexp(state.log_sums, keys)
    means = torch.lerp(state.means, v, (keys - log_sums).exp().mT)
    if inputs.map.exponents is None:
        exponents = queries + log_sums
    else:
        exponents = torch.baddbmm(log_sums, q, w, alpha=inputs.query_factor)
    return exponents.softmax(dim=-1) @ means, Means(means, log_sums)


def _step_of_sums(inputs: LinearInputs, state: LinearState) -> tuple[Tensor, LinearState]:
    features = _features(inputs, inputs.flatten_heads(inputs.q, _ALL), inputs.flat_keys(_ALL))
    assert features.values is not None, "other features are kept as means"
    (queries, keys), values = _both(features.values), with_ones(inputs.flat_values(_ALL))
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
    directions = None if inputs.directions is None else upcast(inputs.directions).to(rows.dtype)
    return inputs.map.features(rows, directions)


def _both(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :-1], rows[:, -1:]
