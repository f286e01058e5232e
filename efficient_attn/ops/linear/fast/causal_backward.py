"""The backward pass of causal linear attention with exponential features, chunk by chunk and in place.

With p_tf = 2^(s_tf − L_t), L_t the logarithm of row t's denominator, and r_jf = 2^(u_jf), the weight of key j
in row t is Σ_f p_tf r_jf. From g_t and δ_t = g_t·out_t follow, by exponents s of queries and u of keys,

    ∂s_tf = p_tf Σ_{j≤t} (g_t·v_j − δ_t) r_jf,
    ∂u_jf = r_jf Σ_{t≥j} (g_t·v_j − δ_t) p_tf,   ∂v_j = Σ_f r_jf Σ_{t≥j} p_tf g_t:

forwards in time with the state of keys, then backwards with one of queries, Σ_t p_tf [g_t, δ_t].
"""

import torch
from torch import Tensor

from efficient_attn.ops.linear.fast.causal import State, add, begin, nothing, step
from efficient_attn.ops.linear.fast.exponentials import LOG2_E, Powers, power
from efficient_attn.ops.linear.inputs import Tokens
from efficient_attn.ops.linear.state import TINY, LinearState, finite, triangle_

# Tokens at once: their exponents and derivatives stay in cache.
CHUNK = 96


def causal_exponential_gradients(
    tokens: Tokens, past: LinearState | None, gradient: Tensor, out: Tensor, logarithm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives by q, k and v; `past` is the state of the keys before the first query, if any."""
    rows = _Rows(tokens, gradient, out, logarithm)
    by_q, pieces = _by_queries(rows, past)
    return by_q, *_by_keys(rows, pieces)


class _Rows:
    """What belongs to the queries of a chunk: g, δ and the normalised exponents."""

    def __init__(self, tokens: Tokens, gradient: Tensor, out: Tensor, logarithm: Tensor) -> None:
        self.tokens, self.powers = tokens, Powers(tokens)
        self._results = gradient, out, logarithm
        self.before = tokens.k.shape[-2] - tokens.q.shape[-2]

    def slopes(self, part: slice) -> tuple[Tensor, Tensor]:
        """g [lists rows value_dim] and δ [lists rows 1]."""
        g, out = (self.tokens.lists(x, part) for x in self._results[:2])
        return g, (g * out).sum(dim=-1, keepdim=True)

    def exponents(self, part: slice) -> Tensor:
        """s_tf − L_t, [lists rows features]."""
        offset = self.tokens.lists(self._results[2], part).mul(-LOG2_E)
        return self.powers.of_queries(self.tokens.lists(self.tokens.q, part), offset)

    def positions(self, part: slice) -> slice:
        """Where the queries stand among the keys."""
        return slice(part.start + self.before, part.stop + self.before)


def _by_queries(rows: _Rows, past: LinearState | None) -> tuple[Tensor, list[slice]]:
    """Derivative by q, and the pieces that were taken, in order.

    A piece is halved if a row's features are so large at the piece's reference that they might overflow:
    that row sees keys only far below it.
    """
    powers, tokens = rows.powers, rows.tokens
    by_q = torch.empty_like(tokens.q, memory_format=torch.contiguous_format)
    state = None if past is None else begin(past)
    taken, left = [], _pieces(0, tokens.q.shape[-2])[::-1]
    while left:
        part = left.pop()
        positions, v = rows.positions(part), tokens.value_lists(rows.positions(part))
        keys = powers.of_real_keys(tokens.key_lists(positions), positions)
        if state is None:
            state = nothing(keys, v.shape[-1])
        numbers, here = step(state, keys)
        p = power(rows.exponents(part).add_(finite(here.reference)))
        if part.stop - part.start > 1 and bool(p.amax() > 1 / TINY[p.dtype]):
            middle = (part.start + part.stop) // 2
            left += [slice(middle, part.stop), slice(part.start, middle)]
            continue
        taken.append(part)
        g, slope = rows.slopes(part)
        by = torch.baddbmm(
            slope * here.ones.mT, g, here.values.mT, beta=-1, out=powers.room("derivatives", p)
        )
        by.baddbmm_(triangle_(torch.baddbmm(slope, g, v.mT, beta=-1)), numbers)
        by_q[..., part, :] = tokens.unlist(powers.by_queries(by.mul_(p)))
        add(here, numbers, v)
        state = here
    return by_q, taken


def _by_keys(rows: _Rows, pieces: list[slice]) -> tuple[Tensor, Tensor]:
    """Derivatives by k and v, backwards in time with the state of the queries."""
    tokens = rows.tokens
    by_k, by_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tokens[1:3])
    later: State | None = None
    for part in reversed(pieces):
        later = _by_keys_of_a_piece(rows, part, later, (by_k, by_v))
    if later is not None:
        for part in _pieces(0, rows.before):
            _put(rows, part, later, None, (by_k, by_v))
    return by_k, by_v


def _by_keys_of_a_piece(rows: _Rows, part: slice, later: State | None, into: tuple[Tensor, Tensor]) -> State:
    """Write the derivatives by a piece's keys and values; the state of queries from this piece on."""
    exponents, (g, slope) = rows.exponents(part), rows.slopes(part)
    p, here = step(nothing(exponents, g.shape[-1]) if later is None else later, exponents)
    _put(rows, rows.positions(part), here, (p, g, slope), into)
    return State(here.values.baddbmm_(p.mT, g), here.ones.baddbmm_(p.mT, slope), here.reference)


def _put(
    rows: _Rows,
    positions: slice,
    later: State,
    queries: tuple[Tensor, Tensor, Tensor] | None,
    into: tuple[Tensor, Tensor],
) -> None:
    """Write derivatives by some keys, from later queries' sums and from p, g, δ of their own piece."""
    powers, (by_k, by_v) = rows.powers, into
    keys, v = rows.tokens.key_lists(positions), rows.tokens.value_lists(positions)
    r = power(powers.of_real_keys(keys, positions).add_(finite(later.reference)))
    by = torch.bmm(v, later.values.mT, out=powers.room("derivatives", r)).sub_(later.ones.mT)
    by_values = torch.bmm(r, later.values)
    if queries is not None:
        p, g, slope = queries
        by.baddbmm_(triangle_(torch.baddbmm(slope, g, v.mT, beta=-1)).mT, p)
        by_values.baddbmm_(triangle_(torch.bmm(p, r.mT)).mT, g)
    by_k[..., positions, :] = powers.by_keys(keys, by.mul_(r)).view_as(by_k[..., positions, :])
    by_v[..., positions, :] = by_values.view_as(by_v[..., positions, :])


def _pieces(start: int, stop: int) -> list[slice]:
    return [slice(i, min(i + CHUNK, stop)) for i in range(start, stop, CHUNK)]
