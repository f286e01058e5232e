"""The backward pass of causal linear attention with exponential features, chunk by chunk and in place.

With p_tf = 2^(s_tf − L_t), L_t the logarithm of row t's denominator, and r_jf = 2^(u_jf), the weight of key j
in row t is Σ_f p_tf r_jf. With δ_t = g_t·out_t, the gradients of the exponents s of queries and u of keys are

    ∂s_tf = p_tf Σ_{j≤t} (g_t·v_j − δ_t) r_jf,
    ∂u_jf = r_jf Σ_{t≥j} (g_t·v_j − δ_t) p_tf,   ∂v_j = Σ_f r_jf Σ_{t≥j} p_tf g_t:

computed forwards in time with the state of keys, then backwards with the state of queries,
Σ_t p_tf [g_t, δ_t].
"""

import torch
from torch import Tensor

from efficient_attn.ops.linear.backward import CausalGradients
from efficient_attn.ops.linear.fast.causal import Shifted, add, empty_shifted, rescaled, shifted_past
from efficient_attn.ops.linear.fast.exponentials import LOG2_E, ExpKernel, power
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.state import TINY, LinearState, finite, triangle_

# Tokens per chunk: their exponents and gradients stay in cache.
CHUNK = 96


def causal_exponential_gradients(
    inputs: LinearInputs,
    past: LinearState | None,
    grad_out: Tensor,
    out: Tensor,
    logarithm: Tensor,
    *,
    to_past: bool,
) -> CausalGradients:
    """Gradients with respect to q, k, v and, if `to_past`, `past`, the state before the first query."""
    rows = _Rows(inputs, grad_out, out, logarithm)
    grad_q, pieces = _query_gradients(rows, past)
    grad_k, grad_v, later = _key_gradients(rows, pieces)
    past_sums = _past_gradient(past, later) if to_past and past is not None else None
    return CausalGradients(grad_q, grad_k, grad_v, past_sums)


def _past_gradient(past: LinearState, later: Shifted | None) -> Tensor:
    """Gradient with respect to the sums of the state before the first query."""
    if later is None:
        return torch.zeros_like(past.sums)
    # A past key is visible to every row, so that these powers are at most 1.
    powers = power(later.reference + past.log_scale.flatten(0, 1) * LOG2_E)
    return (powers.mT * torch.cat([later.values, -later.ones], dim=-1)).view_as(past.sums)


class _Rows:
    """Query-side quantities of a chunk: g, δ and the normalised exponents."""

    def __init__(self, inputs: LinearInputs, grad_out: Tensor, out: Tensor, logarithm: Tensor) -> None:
        self.inputs, self.kernel = inputs, ExpKernel(inputs)
        self._results = grad_out, out, logarithm
        self.before = inputs.k.shape[-2] - inputs.q.shape[-2]

    def deltas(self, part: slice) -> tuple[Tensor, Tensor]:
        """g [flat_heads rows value_dim] and δ [flat_heads rows 1]."""
        g, out = (self.inputs.flatten_heads(x, part) for x in self._results[:2])
        return g, (g * out).sum(dim=-1, keepdim=True)

    def exponents(self, part: slice) -> Tensor:
        """s_tf − L_t, [flat_heads rows features]."""
        offset = self.inputs.flatten_heads(self._results[2], part).mul(-LOG2_E)
        return self.kernel.query_exponents(self.inputs.flatten_heads(self.inputs.q, part), offset)

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
    taken, left = [], _pieces(0, inputs.q.shape[-2])[::-1]
    while left:
        part = left.pop()
        positions, v = rows.positions(part), inputs.flat_values(rows.positions(part))
        keys = kernel.real_key_exponents(inputs.flat_keys(positions), positions)
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


def _key_gradients(rows: _Rows, pieces: list[slice]) -> tuple[Tensor, Tensor, Shifted | None]:
    """Gradients with respect to k and v, backwards in time, and the state of all queries."""
    inputs = rows.inputs
    grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[1:3])
    later: Shifted | None = None
    for part in reversed(pieces):
        later = _piece_key_gradients(rows, part, later, (grad_k, grad_v))
    if later is not None:
        for part in _pieces(0, rows.before):
            _put(rows, part, later, None, (grad_k, grad_v))
    return grad_k, grad_v, later


def _piece_key_gradients(
    rows: _Rows, part: slice, later: Shifted | None, into: tuple[Tensor, Tensor]
) -> Shifted:
    """Write the gradients of a part's keys and values; return the state of queries from this part on."""
    exponents, (g, delta) = rows.exponents(part), rows.deltas(part)
    p, here = rescaled(empty_shifted(exponents, g.shape[-1]) if later is None else later, exponents)
    _put(rows, rows.positions(part), here, (p, g, delta), into)
    return Shifted(here.values.baddbmm_(p.mT, g), here.ones.baddbmm_(p.mT, delta), here.reference)


def _put(
    rows: _Rows,
    positions: slice,
    later: Shifted,
    queries: tuple[Tensor, Tensor, Tensor] | None,
    into: tuple[Tensor, Tensor],
) -> None:
    """Write the gradients of some keys, from later queries' sums and from p, g, δ of their own part."""
    kernel, (grad_k, grad_v) = rows.kernel, into
    keys, v = rows.inputs.flat_keys(positions), rows.inputs.flat_values(positions)
    r = power(kernel.real_key_exponents(keys, positions).add_(finite(later.reference)))
    grad = torch.bmm(v, later.values.mT, out=kernel.buffer("gradients", r)).sub_(later.ones.mT)
    grad_values = torch.bmm(r, later.values)
    if queries is not None:
        p, g, delta = queries
        grad.baddbmm_(triangle_(torch.baddbmm(delta, g, v.mT, beta=-1)).mT, p)
        grad_values.baddbmm_(triangle_(torch.bmm(p, r.mT)).mT, g)
    grad_k[..., positions, :] = kernel.key_gradient(keys, grad.mul_(r)).view_as(grad_k[..., positions, :])
    grad_v[..., positions, :] = grad_values.view_as(grad_v[..., positions, :])


def _pieces(start: int, stop: int) -> list[slice]:
    return [slice(i, min(i + CHUNK, stop)) for i in range(start, stop, CHUNK)]
