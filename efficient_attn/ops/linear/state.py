"""State algebra of linear attention: a running sum that merges, for every feature map.

Σ_j φ(q)·φ(k_j) v_j / Σ_j φ(q)·φ(k_j) depends on the keys only through the state Σ_j φ(k_j) [v_j, 1].
Three operations suffice: `summarise` keys into a state, `merge` states, `read` a state by queries.
Features may be as large as exp(1000), so a state is stored relative to its largest key, feature by
feature, and a query adds that scale back before its own largest weight becomes one.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.linear.features import Features

# Smaller exponents become −inf: products of two such weights would be denormal numbers, which are six to
# ten times slower and negligible.
LOWEST = {torch.float32: -42.0, torch.float64: -350.0}
# A row of a causal chunk whose weights all lie this far below the chunk's largest key is recomputed in a
# smaller chunk, with a reference closer to its visible keys.
TINY = {torch.float32: 1e-8, torch.float64: 1e-100}


class LinearState(NamedTuple):
    """Sums over the past keys; states merge in any grouping.

    Attributes:
        sums: Σ_j φ(k_j) [v_j, 1] · exp(−log_scale), [batch kv_heads features value_dim+1].
        log_scale: Largest logarithmic scale of the keys, [batch kv_heads 1 features|1]; −inf: no key.
    """

    sums: Tensor
    log_scale: Tensor


class Chunk(NamedTuple):
    """Output rows of a causal chunk, their normalisers, and the state after the chunk.

    Attributes:
        out: [batch kv_heads rows value_dim].
        log_normaliser: Logarithm of |Σ_j φ(q)·φ(k_j)|, [batch kv_heads rows 1]; +inf: no key.
        negative: Whether that sum is negative, bool, the same shape.
        state: State after the chunk.
        lengths: Numbers of tokens of the parts in which the chunk was computed.
    """

    out: Tensor
    log_normaliser: Tensor
    negative: Tensor
    state: LinearState
    lengths: list[int]


def empty_state(keys: Features, value_dim: int) -> LinearState:
    """The state of no keys."""
    features = keys.log_scale if keys.values is None else keys.values
    heads = keys.log_scale.shape[:-2]
    sums = keys.log_scale.new_zeros(*heads, features.shape[-1], value_dim + 1)
    return LinearState(sums, keys.log_scale.new_full((*heads, 1, keys.log_scale.shape[-1]), -torch.inf))


def summarise(keys: Features, v: Tensor) -> LinearState:
    """The state of keys and their values [batch kv_heads tokens value_dim]."""
    reference = keys.log_scale.detach().amax(dim=-2, keepdim=True)
    scale = exponential(keys.log_scale - finite(reference))
    if keys.values is None:
        return LinearState(scale.mT @ with_ones(v), reference)
    # The common scale of a token multiplies its value, which is shorter than its features.
    return LinearState(keys.values.mT @ (with_ones(v) * scale), reference)


def merge(one: LinearState, other: LinearState) -> LinearState:
    """The state after the tokens of both; chunks may be merged in any grouping."""
    reference = torch.maximum(one.log_scale, other.log_scale)
    sums = [rescaling(state, reference).mT * state.sums for state in (one, other)]
    return LinearState(sums[0] + sums[1], reference)


def read(state: LinearState, queries: Features) -> Tensor:
    """Attention of queries to all keys of a state, [batch kv_heads rows value_dim]."""
    weights, _ = query_weights(queries, state.log_scale)
    return divide(weights @ state.sums, sees(state))


def query_weights(queries: Features, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of each feature of a state at `reference` in a query row, and its logarithmic scale.

    The largest weight of a positive row is 1, so that its denominator is at least 1 wherever
    every feature's largest key is visible. The scale of a signed row cancels and is omitted.
    """
    if queries.values is not None:
        return queries.values, reference
    exponents = queries.log_scale + reference
    top = exponents.detach().amax(dim=-1, keepdim=True)
    return exponential(exponents - finite(top)), top


def causal_chunk(past: LinearState, queries: Features, keys: Features, v: Tensor) -> Chunk:
    """Attention of each token to the past and to the chunk's tokens up to itself.

    All rows of the chunk share one reference. It cancels in exact arithmetic even if it comes from a later
    key, and it is safe for a row whose weights are not tiny relative to it; otherwise the halves of the
    chunk are computed one after the other, down to single tokens.
    """
    here = merge(past, summarise(keys, v))
    weights, scale = query_weights(queries, here.log_scale)
    before = rescaling(past, here.log_scale)
    sums = triangle(_scores(weights, keys, here.log_scale)) @ with_ones(v) + weights @ (before.mT * past.sums)
    seen = _visible(past, keys, rows=sums.shape[-2])
    tokens = v.shape[-2]
    if tokens > 1 and bool((seen & (_mass(sums, keys, here, before) < TINY[sums.dtype])).any()):
        return _in_halves(past, queries, keys, v)
    out, logarithm = divide(sums, seen), log_sum(sums, scale, seen)
    return Chunk(out, logarithm, sums[..., -1:] < 0, here, [tokens])


def _scores(weights: Tensor, keys: Features, reference: Tensor) -> Tensor:
    """Weights of the keys in each row, [… rows tokens]."""
    scale = exponential(keys.log_scale - finite(reference))
    return weights @ scale.mT if keys.values is None else (weights @ keys.values.mT) * scale.mT


def _in_halves(past: LinearState, queries: Features, keys: Features, v: Tensor) -> Chunk:
    tokens, half = v.shape[-2], v.shape[-2] // 2
    group = queries.log_scale.shape[-2] // tokens
    early, late = slice(0, half), slice(half, tokens)
    one = causal_chunk(past, cut(queries, early, group), cut(keys, early, 1), v[..., early, :])
    other = causal_chunk(one.state, cut(queries, late, group), cut(keys, late, 1), v[..., late, :])
    return Chunk(
        join_rows(one.out, other.out, group),
        join_rows(one.log_normaliser, other.log_normaliser, group),
        join_rows(one.negative, other.negative, group),
        other.state,
        one.lengths + other.lengths,
    )


def triangle(scores: Tensor) -> Tensor:
    """Scores [… group·tokens tokens] with the scores of later keys set to zero."""
    tokens = scores.shape[-1]
    return scores.unflatten(-2, (scores.shape[-2] // tokens, tokens)).tril().flatten(-3, -2)


def triangle_(scores: Tensor, *, before: int = 0) -> Tensor:
    """`triangle` in place, except in the first `before` columns."""
    tokens = scores.shape[-1] - before
    scores.unflatten(-2, (scores.shape[-2] // tokens, tokens)).tril_(before)
    return scores


def cut(features: Features, part: slice, group: int) -> Features:
    """Features of some tokens, from rows that hold each token once per head of a group."""
    values = None if features.values is None else cut_rows(features.values, part, group)
    return Features(cut_rows(features.log_scale, part, group), values)


def cut_rows(x: Tensor, part: slice, group: int) -> Tensor:
    """The rows [… group·part dim] of some tokens out of [… group·tokens dim]."""
    return x.unflatten(-2, (group, x.shape[-2] // group))[..., part, :].flatten(-3, -2)


def join_rows(one: Tensor, other: Tensor, group: int) -> Tensor:
    """The inverse of cutting rows [… group·tokens dim] into two consecutive parts."""
    parts = [x.unflatten(-2, (group, x.shape[-2] // group)) for x in (one, other)]
    return torch.cat(parts, dim=-2).flatten(-3, -2)


def _visible(past: LinearState, keys: Features, *, rows: int) -> Tensor:
    """Whether a row has any visible key, bool [… rows 1]."""
    real = (keys.log_scale > -torch.inf).any(dim=-1, keepdim=True)
    seen = (real.cumsum(dim=-2) > 0) | sees(past)
    return seen.repeat(*[1] * (seen.ndim - 2), rows // seen.shape[-2], 1)


def _mass(sums: Tensor, keys: Features, here: LinearState, before: Tensor) -> Tensor:
    """Sum of a row's weights relative to the chunk's reference, [… rows|tokens 1]."""
    if keys.values is None:
        return sums[..., -1:].detach()
    scale = (keys.log_scale.detach() - finite(here.log_scale)).exp().cumsum(dim=-2) + before
    return scale.repeat(*[1] * (scale.ndim - 2), sums.shape[-2] // scale.shape[-2], 1)


def divide(sums: Tensor, seen: Tensor) -> Tensor:
    """Numerators over the denominator in the last column; zeros for a fully-masked row."""
    return torch.where(seen, sums[..., :-1] / torch.where(seen, sums[..., -1:], 1.0), 0.0)


def log_sum(sums: Tensor, reference: Tensor, seen: Tensor) -> Tensor:
    """Logarithm of the absolute row denominators at a reference; +inf for a fully-masked row."""
    return (reference + sums[..., -1:].detach().abs().log()).masked_fill(~seen, torch.inf)


def sees(state: LinearState) -> Tensor:
    """Whether the state has any key, bool [… 1 1]."""
    return (state.log_scale > -torch.inf).any(dim=-1, keepdim=True)


def rescaling(state: LinearState, reference: Tensor) -> Tensor:
    """Rescaling factor from a state's own scale to a larger one, [… 1 features|1]; 0 for an empty state."""
    return exponential(state.log_scale - finite(reference))


def exponential(exponents: Tensor) -> Tensor:
    """exp, with results below `LOWEST` flushed to zero."""
    return F.threshold(exponents, LOWEST[exponents.dtype], -torch.inf).exp_()


def finite(reference: Tensor) -> Tensor:
    """The reference with 0 in place of −inf, so that it can be subtracted."""
    return reference.masked_fill(reference == -torch.inf, 0.0)


def with_ones(v: Tensor) -> Tensor:
    """Values with an extra column of ones, whose sum is the denominator."""
    return F.pad(v, (0, 1), value=1.0)
