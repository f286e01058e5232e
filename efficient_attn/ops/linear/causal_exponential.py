"""Causal linear attention with exponential features on the CPU, chunk by chunk and in place.

Forward, key features are relative to the largest exponent of all keys up to the end of the chunk, feature by
feature, so that the state stays in the range of floats. A row whose visible keys lie far below that
reference, set by a later key of its chunk, is recomputed by itself.

Backward, let p_tf = 2^(s_tf − L_t), L_t the logarithm of row t's denominator, r_jf = 2^(u_jf) and
δ_t = g_t·out_t. The weight of key j in row t is Σ_f p_tf r_jf, and the gradients of the exponents s of
queries and u of keys, and of the values, are

    ∂s_tf = p_tf Σ_{j≤t} (g_t·v_j − δ_t) r_jf,
    ∂u_jf = r_jf Σ_{t≥j} (g_t·v_j − δ_t) p_tf,   ∂v_j = Σ_f r_jf Σ_{t≥j} p_tf g_t.

A pass forwards in time with the state of the keys yields ∂s. A pass backwards with the state of the queries,
Σ_t p_tf [g_t, δ_t], yields ∂u and ∂v.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.linear.inputs import LOG2_E, ExpKernel, LinearInputs, Outputs, power
from efficient_attn.ops.linear.state import TINY, CausalGradients, LinearState, finite, sees
from efficient_attn.ops.paths import parts

# Tokens per chunk of the forward pass: larger chunks need fewer calls, but more pairs and more memory.
CHUNK = 80
# Rows recomputed per step: each needs chunk · features numbers.
_ROWS = 16
# Tokens per chunk of the backward pass, whose exponents and gradients stay in cache.
BACKWARD_CHUNK = 96


class Shifted(NamedTuple):
    """Sums of features over the past keys, relative to 2^reference.

    Attributes:
        values: [flat_heads features value_dim].
        ones: [flat_heads features 1].
        reference: [flat_heads 1 features]; −inf: no key.
    """

    values: Tensor
    ones: Tensor
    reference: Tensor


def triangle_(scores: Tensor) -> Tensor:
    """Scores [… group·tokens tokens] with zeros for later keys, in place."""
    tokens = scores.shape[-1]
    scores.unflatten(-2, (scores.shape[-2] // tokens, tokens)).tril_()
    return scores


def causal_exponential(inputs: LinearInputs, past: LinearState | None, into: Outputs) -> None:
    """Write the output of every query. The queries are the last positions, after the keys of `past`."""
    kernel, seen = ExpKernel(inputs), None
    if inputs.key_mask is not None:
        seen = (inputs.key_mask.cumsum(dim=-1) > 0)[:, None, None, :, None]
        if past is not None:
            seen = seen | sees(past).unsqueeze(2)
    before, length = inputs.k.shape[-2] - inputs.q.shape[-2], inputs.q.shape[-2]
    heads, value_dim = (*inputs.k.shape[:2], inputs.q.shape[1] // inputs.k.shape[1]), inputs.v.shape[-1]
    state = None if past is None else shifted_past(past)
    into.negative.zero_()
    outs, logarithms = into.out.unflatten(1, heads[1:]), into.log_normaliser.unflatten(1, heads[1:])
    for part in parts(length, CHUNK):
        positions = slice(part.start + before, part.stop + before)
        seen_rows = None if seen is None else seen[..., positions, :]
        sums, values, logarithm, state = _read_chunk(kernel, part, positions, state, seen_rows)
        rows, out = (*heads, part.stop - part.start), outs[..., part, :]
        torch.div(values.view(*rows, value_dim), sums.view(*rows, 1), out=out)
        logarithms[..., part, :] = logarithm.view(*rows, 1)
        if seen_rows is not None:
            out.masked_fill_(~seen_rows, 0.0)
            logarithms[..., part, :].masked_fill_(~seen_rows, torch.inf)


def shifted_past(past: LinearState) -> Shifted:
    sums, reference = past.sums.flatten(0, 1), past.log_scale.flatten(0, 1)
    return Shifted(sums[..., :-1], sums[..., -1:], reference * LOG2_E)


def empty_shifted(exponents: Tensor, value_dim: int) -> Shifted:
    """The state of no rows, for exponents [flat_heads rows features]."""
    flat_heads, _, features = exponents.shape
    sums = exponents.new_zeros(flat_heads, features, value_dim + 1)
    return Shifted(sums[..., :-1], sums[..., -1:], exponents.new_full((flat_heads, 1, features), -torch.inf))


def rescaled(state: Shifted, keys: Tensor) -> tuple[Tensor, Shifted]:
    """Rescale a state and the features of new keys, given as exponents, to a common reference."""
    reference = torch.maximum(state.reference, keys.amax(dim=-2, keepdim=True))
    factor = power(state.reference - finite(reference)).mT
    key_features = power(keys.sub_(finite(reference)))
    return key_features, Shifted(state.values * factor, state.ones * factor, reference)


def add(state: Shifted, key_features: Tensor, v: Tensor) -> None:
    """Add keys at the reference of the state, in place."""
    state.values.baddbmm_(key_features.mT, v)
    state.ones.add_(key_features.sum(dim=-2).unsqueeze(-1))


def _read_chunk(
    kernel: ExpKernel, part: slice, positions: slice, state: Shifted | None, seen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Shifted]:
    """Denominators, numerators and log denominators of a chunk's rows, and the state after it."""
    k, v = kernel.inputs.flat_keys_and_values(positions)
    keys = kernel.real_key_exponents(k, positions)
    queries = kernel.query_exponents(kernel.inputs.flat_queries(part))
    state = empty_shifted(keys, v.shape[-1]) if state is None else state
    key_features, here = rescaled(state, keys)
    queries.add_(finite(here.reference))
    top = queries.amax(dim=-1, keepdim=True)
    sums, out = _read(power(queries.sub_(top)), key_features, v, here)
    weak = sums < TINY[sums.dtype]
    if seen is not None:
        shape = *kernel.inputs.k.shape[:2], kernel.inputs.group
        weak &= seen.expand(*shape, -1, -1).flatten(2, 3).flatten(0, 1)
    if bool(weak.any()):
        _repair(kernel, part, positions, state, weak.squeeze(-1).nonzero(), (out, sums, top))
    return sums, out, top.add_(sums.log2()).div_(LOG2_E), here


def _read(weights: Tensor, key_features: Tensor, v: Tensor, state: Shifted) -> tuple[Tensor, Tensor]:
    """Denominators and numerators of a chunk's rows; the chunk's keys are added to the state in place."""
    # The state's feature sums precede the chunk's keys, so that one product reads both.
    scores = torch.bmm(weights, torch.cat([state.ones.mT, key_features], dim=1).mT)
    scores.unflatten(1, (-1, v.shape[1])).tril_(1)
    out = torch.bmm(scores[..., 1:], v).baddbmm_(weights, state.values)
    add(state, key_features, v)
    return scores.sum(dim=-1, keepdim=True), out


def _repair(
    kernel: ExpKernel,
    part: slice,
    positions: slice,
    state: Shifted,
    weak: Tensor,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Recompute rows [flat_head, row], each relative to its own visible keys."""
    queries = kernel.query_exponents(kernel.inputs.flat_queries(part))
    k, v = kernel.inputs.flat_keys_and_values(positions)
    keys = kernel.real_key_exponents(k, positions)
    length = keys.shape[-2]
    later = torch.arange(length, device=keys.device) > (weak[:, 1] % length)[:, None]
    for indices, hidden in zip(weak.split(_ROWS), later.split(_ROWS), strict=True):
        flat_heads, rows = indices.unbind(dim=1)
        exponents = keys[flat_heads].masked_fill_(hidden.unsqueeze(-1), -torch.inf)
        past = state.reference[flat_heads]
        reference = finite(torch.maximum(past, exponents.amax(dim=-2, keepdim=True)))
        weights = queries[flat_heads, rows].unsqueeze(-2) + reference
        top = weights.amax(dim=-1, keepdim=True)
        weights = power(weights.sub_(top))
        scores = torch.bmm(weights, power(exponents.sub_(reference)).mT)
        past_weights = weights * power(past - reference)
        sums = scores.sum(dim=-1, keepdim=True) + torch.bmm(past_weights, state.ones[flat_heads])
        out = torch.bmm(scores, v[flat_heads]) + torch.bmm(past_weights, state.values[flat_heads])
        for whole, repaired in zip(into, (out, sums, top), strict=True):
            whole[flat_heads, rows] = repaired.squeeze(-2)


def causal_exponential_gradients(
    inputs: LinearInputs, past: LinearState | None, grad_out: Tensor, outputs: Outputs, *, to_past: bool
) -> CausalGradients:
    """Gradients with respect to q, k, v and, if `to_past`, `past`, the state before the first query."""
    rows = _Rows(inputs, grad_out, outputs)
    grad_q, chunks = _query_gradients(rows, past)
    grad_k, grad_v, later = _key_gradients(rows, chunks)
    past_sums = torch.zeros_like(past.sums) if to_past and past is not None else None
    if past is not None and past_sums is not None and later is not None:
        # A past key is visible to every row, so that these powers are at most 1.
        powers = power(later.reference + past.log_scale.flatten(0, 1) * LOG2_E)
        past_sums = (powers.mT * torch.cat([later.values, -later.ones], dim=-1)).view_as(past.sums)
    return CausalGradients(grad_q, grad_k, grad_v, past_sums)


class _Rows:
    """Query-side quantities of a chunk: g, δ and the normalised exponents."""

    def __init__(self, inputs: LinearInputs, grad_out: Tensor, outputs: Outputs) -> None:
        self.inputs, self.kernel = inputs, ExpKernel(inputs)
        self._grad_out, self._outputs = grad_out, outputs
        self.before = inputs.k.shape[-2] - inputs.q.shape[-2]

    def deltas(self, part: slice) -> tuple[Tensor, Tensor]:
        """g [flat_heads rows value_dim] and δ [flat_heads rows 1]."""
        g, out = (self.inputs.flatten_heads(x, part) for x in (self._grad_out, self._outputs.out))
        return g, (g * out).sum(dim=-1, keepdim=True)

    def exponents(self, part: slice) -> Tensor:
        """s_tf − L_t, [flat_heads rows features]."""
        offset = self.inputs.flatten_heads(self._outputs.log_normaliser, part).mul(-LOG2_E)
        return self.kernel.query_exponents(self.inputs.flat_queries(part), offset)

    def positions(self, part: slice) -> slice:
        """Positions of the queries among the keys."""
        return slice(part.start + self.before, part.stop + self.before)


def _query_gradients(rows: _Rows, past: LinearState | None) -> tuple[Tensor, list[slice]]:
    """Gradient with respect to q, and the parts in which it was computed, in order.

    A chunk is halved if a row's features might overflow at the chunk's reference, which is far above the
    visible keys of that row.
    """
    kernel, inputs = rows.kernel, rows.inputs
    grad_q = torch.empty_like(inputs.q, memory_format=torch.contiguous_format)
    state = None if past is None else shifted_past(past)
    taken, left = [], parts(inputs.q.shape[-2], BACKWARD_CHUNK)[::-1]
    while left:
        part = left.pop()
        positions = rows.positions(part)
        k, v = inputs.flat_keys_and_values(positions)
        keys = kernel.real_key_exponents(k, positions)
        if state is None:
            state = empty_shifted(keys, v.shape[-1])
        key_features, here = rescaled(state, keys)
        p = power(rows.exponents(part).add_(finite(here.reference)))
        if part.stop - part.start > 1 and bool(p.amax() > 1 / TINY[p.dtype]):
            middle = (part.start + part.stop) // 2
            left += [slice(middle, part.stop), slice(part.start, middle)]
            continue
        taken.append(part)
        g, delta = rows.deltas(part)
        grad = torch.baddbmm(
            delta * here.ones.mT, g, here.values.mT, beta=-1, out=kernel.buffer("gradients", p)
        )
        grad.baddbmm_(triangle_(torch.baddbmm(delta, g, v.mT, beta=-1)), key_features)
        grad_q[..., part, :] = inputs.unflatten_heads(kernel.query_gradient(grad.mul_(p)))
        add(here, key_features, v)
        state = here
    return grad_q, taken


def _key_gradients(rows: _Rows, chunks: list[slice]) -> tuple[Tensor, Tensor, Shifted | None]:
    """Gradients with respect to k and v, backwards in time, and the state of all queries."""
    inputs = rows.inputs
    grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[1:3])
    later: Shifted | None = None
    for part in reversed(chunks):
        exponents, (g, delta) = rows.exponents(part), rows.deltas(part)
        state = empty_shifted(exponents, g.shape[-1]) if later is None else later
        p, here = rescaled(state, exponents)
        _put(rows, rows.positions(part), here, (p, g, delta), (grad_k, grad_v))
        values, ones = here.values.baddbmm_(p.mT, g), here.ones.baddbmm_(p.mT, delta)
        later = Shifted(values, ones, here.reference)
    if later is not None:
        for part in parts(rows.before, BACKWARD_CHUNK):
            _put(rows, part, later, None, (grad_k, grad_v))
    return grad_k, grad_v, later


def _put(
    rows: _Rows,
    positions: slice,
    later: Shifted,
    queries: tuple[Tensor, Tensor, Tensor] | None,
    into: tuple[Tensor, Tensor],
) -> None:
    """Write the gradients of some keys, from later queries' sums and from p, g, δ of their own part."""
    kernel, (grad_k, grad_v) = rows.kernel, into
    keys, v = rows.inputs.flat_keys_and_values(positions)
    r = power(kernel.real_key_exponents(keys, positions).add_(finite(later.reference)))
    grad = torch.bmm(v, later.values.mT, out=kernel.buffer("gradients", r)).sub_(later.ones.mT)
    grad_values = torch.bmm(r, later.values)
    if queries is not None:
        p, g, delta = queries
        grad.baddbmm_(triangle_(torch.baddbmm(delta, g, v.mT, beta=-1)).mT, p)
        grad_values.baddbmm_(triangle_(torch.bmm(p, r.mT)).mT, g)
    grad_k[..., positions, :] = kernel.key_gradient(keys, grad.mul_(r)).view_as(grad_k[..., positions, :])
    grad_v[..., positions, :] = grad_values.view_as(grad_v[..., positions, :])
