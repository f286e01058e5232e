"""The forward pass of causal linear attention with exponential features, chunk by chunk and in place.

Features are unshifted while all exponents are moderate: base-two exponents of Gaussian queries and keys of
64 entries, at the default scale, lie within ±30. Each chunk is range-checked before this path is used. From
the first chunk with a larger exponent on, key features are relative to the largest exponent of all past
keys, feature by feature, so that the state stays in the range of floats. A row whose visible keys lie far
below that reference, set by a later key of its chunk, is recomputed by itself.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast
from efficient_attn.ops.linear.backward import Outputs
from efficient_attn.ops.linear.fast.exponentials import LOG2_E, ExpKernel, power
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.state import TINY, LinearState, finite, sees, triangle_

# Tokens per chunk: larger chunks need fewer calls, but more pairs and more memory.
CHUNK = 80
# Rows recomputed per step: each needs chunk · features numbers.
_ROWS = 16
# Exponents up to this size, and values within 2^±16 (or all zero), keep sums of 2^30 products of two features
# and a value within the range of floats, 2^±126 in float32, and every denominator far from its lower end.
_MODERATE = {torch.float32: 40.0, torch.float64: 400.0}
_VALUES = 2.0**16


class Unshifted(NamedTuple):
    """Sums of unshifted features over the past keys.

    Attributes:
        values: [flat_heads features value_dim].
        ones: [flat_heads features 1].
    """

    values: Tensor
    ones: Tensor


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


def causal_exponential(inputs: LinearInputs, past: LinearState | None, into: Outputs) -> None:
    """Write the output of every query; the queries are the last positions, after the keys of `past`."""
    kernel, seen = ExpKernel(inputs), None
    if inputs.key_mask is not None:
        seen = (inputs.key_mask.cumsum(dim=-1) > 0)[:, None, None, :, None]
        if past is not None:
            seen = seen | sees(past).unsqueeze(2)
    before, length = inputs.k.shape[-2] - inputs.q.shape[-2], inputs.q.shape[-2]
    state: Shifted | Unshifted = empty_unshifted(kernel) if past is None else shifted_past(past)
    into.negative.zero_()
    for start in range(0, length, CHUNK):
        part = slice(start, min(start + CHUNK, length))
        positions = slice(part.start + before, part.stop + before)
        some = None if seen is None else seen[..., positions, :]
        *rows, state = _read_chunk(kernel, part, positions, state, some)
        sums, values, logarithm = (
            x.unflatten(0, inputs.k.shape[:2]).unflatten(2, (inputs.group, -1)) for x in rows
        )
        out, logarithms = (inputs.grouped(x)[..., part, :] for x in into[:2])
        torch.div(values, sums, out=out)
        logarithms.copy_(logarithm)
        if some is not None:
            out.masked_fill_(~some, 0.0)
            logarithms.masked_fill_(~some, torch.inf)


def shifted_past(past: LinearState) -> Shifted:
    """The state of the keys before the first query."""
    sums, reference = past.sums.flatten(0, 1), past.log_scale.flatten(0, 1)
    return Shifted(sums[..., :-1], sums[..., -1:], reference * LOG2_E)


def empty_shifted(exponents: Tensor, value_dim: int) -> Shifted:
    """The state of no rows, for exponents [flat_heads rows features]."""
    flat_heads, _, features = exponents.shape
    sums = exponents.new_zeros(flat_heads, features, value_dim + 1)
    return Shifted(sums[..., :-1], sums[..., -1:], exponents.new_full((flat_heads, 1, features), -torch.inf))


def rescaled(state: Shifted, keys: Tensor) -> tuple[Tensor, Shifted]:
    """Features of some keys, from their exponents, and the state, both rescaled to a common reference."""
    reference = torch.maximum(state.reference, keys.amax(dim=-2, keepdim=True))
    factor = power(state.reference - finite(reference)).mT
    key_features = power(keys.sub_(finite(reference)))
    return key_features, Shifted(state.values * factor, state.ones * factor, reference)


def add(state: Shifted, key_features: Tensor, v: Tensor) -> None:
    """Add keys at the reference of the state, in place."""
    state.values.baddbmm_(key_features.mT, v)
    state.ones.add_(key_features.sum(dim=-2).unsqueeze(-1))


def _read_chunk(
    kernel: ExpKernel, part: slice, positions: slice, state: Shifted | Unshifted, seen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Shifted | Unshifted]:
    """Denominators, numerators and log denominators of a chunk's rows, and the state after it."""
    v = kernel.inputs.flat_values(positions)
    keys = kernel.key_exponents(kernel.inputs.flat_keys(positions))
    queries = kernel.query_exponents(kernel.inputs.flatten_heads(kernel.inputs.q, part))
    if isinstance(state, Unshifted):
        if moderate(queries, keys, v):
            sums, values = read_unshifted(kernel, positions, state, queries.exp2_(), keys, v)
            return sums, values, sums.log(), state
        state = Shifted(*shifted(state))
    keys = kernel.fill_masked_(keys, positions, -torch.inf)
    if seen is not None:
        shape = *kernel.inputs.k.shape[:2], kernel.inputs.group
        seen = seen.expand(*shape, -1, -1).flatten(2, 3).flatten(0, 1)
    return _read_shifted(kernel, part, positions, state, (queries, keys, v), seen)


def _read_shifted(
    kernel: ExpKernel,
    part: slice,
    positions: slice,
    state: Shifted,
    chunk: tuple[Tensor, Tensor, Tensor],
    seen: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Shifted]:
    """Denominators, numerators and log denominators of a chunk's rows, and the state after it."""
    queries, keys, v = chunk
    key_features, here = rescaled(state, keys)
    queries.add_(finite(here.reference))
    top = queries.amax(dim=-1, keepdim=True)
    weights = power(queries.sub_(top))
    scores = triangle_(torch.bmm(weights, key_features.mT))
    sums = scores.sum(dim=-1, keepdim=True).baddbmm_(weights, here.ones)
    out = torch.bmm(scores, v).baddbmm_(weights, here.values)
    add(here, key_features, v)
    weak = sums < TINY[sums.dtype]
    if seen is not None:
        weak &= seen
    if bool(weak.any()):
        _repair(kernel, part, positions, state, weak.squeeze(-1).nonzero(), (out, sums, top))
    return sums, out, top.add_(sums.log2()).div_(LOG2_E), here


def _repair(
    kernel: ExpKernel,
    part: slice,
    positions: slice,
    state: Shifted,
    weak: Tensor,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Recompute rows [flat_head, row], each relative to its own visible keys."""
    queries = kernel.query_exponents(kernel.inputs.flatten_heads(kernel.inputs.q, part))
    keys = kernel.real_key_exponents(kernel.inputs.flat_keys(positions), positions)
    v = kernel.inputs.flat_values(positions)
    length = keys.shape[-2]
    later = torch.arange(length, device=keys.device) > (weak[:, 1] % length)[:, None]
    for some, hidden in zip(weak.split(_ROWS), later.split(_ROWS), strict=True):
        flat_heads, rows = some.unbind(dim=1)
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
        for whole, found in zip(into, (out, sums, top), strict=True):
            whole[flat_heads, rows] = found.squeeze(-2)


def empty_unshifted(kernel: ExpKernel) -> Unshifted:
    """The sums over no keys."""
    inputs = kernel.inputs
    flat_heads, features = inputs.k.shape[0] * inputs.k.shape[1], kernel.features
    like = upcast(inputs.q[:0])
    return Unshifted(
        like.new_zeros(flat_heads, features, inputs.v.shape[-1]), like.new_zeros(flat_heads, features, 1)
    )


def moderate(queries: Tensor, keys: Tensor, v: Tensor) -> bool:
    """Whether features with these exponents need no shift; False for any NaN."""
    limit, largest = _MODERATE[queries.dtype], _size(v) if v.numel() else 0.0
    fits = _size(queries) <= limit and _size(keys) <= limit
    return fits and (largest == 0 or 1 / _VALUES <= largest <= _VALUES)


def _size(x: Tensor) -> float:
    low, high = torch.aminmax(x)
    return max(-low.item(), high.item())


def read_unshifted(
    kernel: ExpKernel, positions: slice, state: Unshifted, weights: Tensor, keys: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Denominators and numerators of a chunk's rows; the chunk's keys are added to the state in place.

    Args:
        weights: Features of the query rows, [flat_heads group·tokens features].
        keys: Exponents of the chunk's keys, [flat_heads tokens features].
    """
    flat_heads, length, features = keys.shape
    # The state's feature sums precede the chunk's keys, so that one product reads both.
    read = kernel.scratch("sums and keys", keys, (flat_heads, 1 + length, features))
    read[:, :1] = state.ones.mT
    key_features = kernel.fill_masked_(torch.exp2(keys, out=read[:, 1:]), positions, 0.0)
    scores = triangle_(torch.bmm(weights, read.mT), before=1)
    out = torch.bmm(scores[..., 1:], v).baddbmm_(weights, state.values)
    state.values.baddbmm_(key_features.mT, v)
    state.ones.add_(key_features.sum(dim=-2).unsqueeze(-1))
    return scores.sum(dim=-1, keepdim=True), out


def shifted(state: Unshifted) -> tuple[Tensor, Tensor, Tensor]:
    """Values, ones and reference of the equal shifted state, whose ones are 1, or 0 without a key."""
    some = state.ones > 0
    ones = torch.where(some, state.ones, 1.0)
    reference = ones.log2().masked_fill_(~some, -torch.inf)
    return state.values / ones, some.to(ones.dtype), reference.mT
