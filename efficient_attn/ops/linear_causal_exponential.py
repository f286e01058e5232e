"""The forward pass of causal linear attention with exponential features, chunk by chunk and in place.

Everything is a power of two, which is three times as fast as one of e: with w' = w / ln 2,
φ_f(x) = 2^(x·w'_f + b'). A chunk's key features are kept relative to the largest exponent that any key so
far has had, feature by feature, so that the state never leaves the range of floats. A row that sees keys
only far below that reference, because a later key of its chunk set it, is computed again by itself.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops import linear
from efficient_attn.ops.groups import fold
from efficient_attn.ops.linear import LinearState, finite
from efficient_attn.ops.linear_gradient import Outputs
from efficient_attn.ops.linear_tokens import Tokens
from efficient_attn.ops.precision import wide

CHUNK = 64
# Rows that are computed by themselves at once: each needs chunk · features numbers.
_ROWS = 16

_LOG2_E = math.log2(math.e)


class _Chunk(NamedTuple):
    """Exponents of base 2 and values of one chunk; batch and key heads are one dimension.

    Attributes:
        queries: [lists group·tokens features].
        keys: [lists tokens features]; −inf for a masked key.
        v: [lists tokens value_dim].
    """

    queries: Tensor
    keys: Tensor
    v: Tensor


class _State(NamedTuple):
    """Sums over all keys so far, relative to 2^reference.

    Attributes:
        values: [lists features value_dim].
        ones: [lists features 1].
        reference: [lists 1 features]; −inf: no key.
    """

    values: Tensor
    ones: Tensor
    reference: Tensor


def causal_exponential(tokens: Tokens, past: LinearState, into: Outputs) -> None:
    """Write the output of every query, which are the last positions of the keys, after those of `past`."""
    reader = _Reader(tokens)
    before, length = tokens.k.shape[-2] - tokens.q.shape[-2], tokens.q.shape[-2]
    state = _State(
        past.sums[..., :-1].flatten(0, 1),
        past.sums[..., -1:].flatten(0, 1),
        past.log_scale.flatten(0, 1) * _LOG2_E,
    )
    for start in range(0, length, CHUNK):
        part = slice(start, min(start + CHUNK, length))
        out, logarithm, state = _read_chunk(reader, part, before, state)
        rows = Outputs(out, logarithm, torch.zeros_like(logarithm, dtype=torch.bool))
        into.put(part, Outputs(*(x.unflatten(0, tokens.k.shape[:2]) for x in rows)))


def _read_chunk(reader: "_Reader", part: slice, before: int, state: _State) -> tuple[Tensor, Tensor, _State]:
    """Outputs and log denominators of a chunk's rows, and the state after it."""
    queries, keys, v = reader.chunk(part, before)
    reference = torch.maximum(state.reference, keys.amax(dim=-2, keepdim=True))
    shown = finite(reference)
    numbers = power(keys.sub_(shown))
    fade = power(state.reference - shown).mT
    values, ones = state.values * fade, state.ones * fade
    top = queries.add_(shown).amax(dim=-1, keepdim=True)
    weights = power(queries.sub_(top))
    scores = linear.triangle_(torch.bmm(weights, numbers.mT))
    sums = scores.sum(dim=-1, keepdim=True).baddbmm_(weights, ones)
    out = torch.bmm(scores, v).baddbmm_(weights, values)
    values.baddbmm_(numbers.mT, v)
    ones.add_(numbers.sum(dim=-2).unsqueeze(-1))
    seen = reader.seen(part, before, rows=out.shape[-2])
    weak = sums < linear.TINY[sums.dtype]
    if seen is not None:
        weak &= seen
    if bool(weak.any()):
        _repair(reader, part, before, state, weak.squeeze(-1).nonzero(), (out, sums, top))
    logarithm = top.add_(sums.log2()).div_(_LOG2_E)
    out.div_(sums)
    if seen is not None:
        out.masked_fill_(~seen, 0.0)
        logarithm.masked_fill_(~seen, torch.inf)
    return out, logarithm, _State(values, ones, reference)


def _repair(
    reader: "_Reader",
    part: slice,
    before: int,
    state: _State,
    weak: Tensor,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Compute rows [list, row] again, each relative to the keys that it sees itself."""
    queries, keys, v = reader.chunk(part, before)
    tokens = keys.shape[-2]
    later = torch.arange(tokens, device=keys.device) > (weak[:, 1] % tokens)[:, None]
    for some, hidden in zip(weak.split(_ROWS), later.split(_ROWS), strict=True):
        lists, rows = some.unbind(dim=1)
        exponents = keys[lists].masked_fill_(hidden.unsqueeze(-1), -torch.inf)
        past = state.reference[lists]
        reference = finite(torch.maximum(past, exponents.amax(dim=-2, keepdim=True)))
        weights = queries[lists, rows].unsqueeze(-2) + reference
        top = weights.amax(dim=-1, keepdim=True)
        weights = power(weights.sub_(top))
        scores = torch.bmm(weights, power(exponents.sub_(reference)).mT)
        faded = weights * power(past - reference)
        sums = scores.sum(dim=-1, keepdim=True) + torch.bmm(faded, state.ones[lists])
        out = torch.bmm(scores, v[lists]) + torch.bmm(faded, state.values[lists])
        for whole, found in zip(into, (out, sums, top), strict=True):
            whole[lists, rows] = found.squeeze(-2)


def power(exponents: Tensor) -> Tensor:
    """2^exponents in place; 0, like any that is too small to matter and slow to compute with, for −inf."""
    lowest = linear.LOWEST[exponents.dtype] * _LOG2_E
    return F.threshold(exponents, lowest, -torch.inf, inplace=True).exp2_()


class _Reader:
    """Makes the exponents of chunks, in buffers that it uses again."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens, self._lists = tokens, tokens.k.shape[:2]
        w = tokens.exponents()
        factor = math.sqrt(abs(tokens.scale)) * _LOG2_E
        self._w = (w.mT * factor).expand(*self._lists, -1, -1).flatten(0, 1)
        self._constant = -math.log2(w.shape[-2]) / 2
        self._weights = None
        if tokens.log_weights is not None:
            weights = tokens.log_weights.to(w.dtype) * _LOG2_E
            self._weights = weights.expand(*self._lists, -1, -1).flatten(0, 1)
        self._buffers: dict[str, Tensor] = {}

    def chunk(self, part: slice, before: int) -> _Chunk:
        """The chunk of some queries and of the keys at the same positions."""
        tokens, positions = self._tokens, slice(part.start + before, part.stop + before)
        keys, v = tokens.keys(positions).flatten(0, 1), tokens.values(positions).flatten(0, 1)
        lengths = torch.linalg.vector_norm(keys, dim=-1, keepdim=True)
        below = lengths.square_().mul_(-abs(tokens.scale) / 2 * _LOG2_E).add_(self._constant)
        exponents = torch.baddbmm(below, keys, self._w, out=self._buffer("keys", keys))
        if self._weights is not None:
            exponents.add_(self._weights)
        real = self._real(positions)
        if real is not None:
            exponents.masked_fill_(~real, -torch.inf)
        rows = fold(wide(tokens.q[..., part, :]), self._lists[1]).flatten(0, 1)
        queries = torch.bmm(rows, self._w, out=self._buffer("queries", rows))
        return _Chunk(queries if tokens.scale > 0 else queries.neg_(), exponents, v)

    def seen(self, part: slice, before: int, *, rows: int) -> Tensor | None:
        """Whether a row sees any key, [lists rows 1]; None: all do."""
        real = self._real(slice(0, part.stop + before))
        if real is None:
            return None
        seen = (real.cumsum(dim=-2) > 0)[:, part.start + before :]
        return seen.repeat(1, rows // seen.shape[-2], 1)

    def _real(self, positions: slice) -> Tensor | None:
        """Which keys are tokens, [lists positions 1]; None: all are."""
        mask = self._tokens.key_mask
        if mask is None:
            return None
        return mask[:, None, positions, None].expand(-1, self._lists[1], -1, -1).flatten(0, 1)

    def _buffer(self, name: str, rows: Tensor) -> Tensor:
        """Room for one number per row and feature."""
        shape = (*rows.shape[:-1], self._w.shape[-1])
        kept = self._buffers.get(name)
        if kept is None or kept.shape != shape:
            kept = self._buffers[name] = rows.new_empty(shape)
        return kept
