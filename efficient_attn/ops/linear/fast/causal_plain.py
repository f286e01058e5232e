"""Causal chunks of exponential features whose exponents are moderate: no maximum, no reference, no guard.

Those of base two of Gaussian queries and keys of 64 entries, at the usual scale, lie within ±30. Every chunk
is looked at before it is taken so.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import wide
from efficient_attn.ops.linear.fast.exponentials import Powers
from efficient_attn.ops.linear.state import triangle_

# Exponents up to this size, and values within 2^±16 (or all zero), keep sums of 2^30 products of two features
# and a value within the range of floats, 2^±126 in float32, and every denominator far from its lower end.
_MODERATE = {torch.float32: 40.0, torch.float64: 400.0}
_VALUES = 2.0**16


class Plain(NamedTuple):
    """Sums over all keys so far of features as they are.

    Attributes:
        values: [lists features value_dim].
        ones: [lists features 1].
    """

    values: Tensor
    ones: Tensor


def no_keys(powers: Powers) -> Plain:
    """The sums before any key."""
    tokens = powers.tokens
    lists, features = tokens.k.shape[0] * tokens.k.shape[1], powers.features
    like = wide(tokens.q[:0])
    return Plain(like.new_zeros(lists, features, tokens.v.shape[-1]), like.new_zeros(lists, features, 1))


def moderate(queries: Tensor, keys: Tensor, v: Tensor) -> bool:
    """Whether features with these exponents may be taken as they are; not where anything is NaN."""
    limit, largest = _MODERATE[queries.dtype], _size(v) if v.numel() else 0.0
    fits = _size(queries) <= limit and _size(keys) <= limit
    return fits and (largest == 0 or 1 / _VALUES <= largest <= _VALUES)


def _size(x: Tensor) -> float:
    low, high = torch.aminmax(x)
    return max(-low.item(), high.item())


def read_plain(
    powers: Powers, positions: slice, state: Plain, weights: Tensor, keys: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Denominators and numerators of a chunk's rows; the chunk's keys are added to the state in place.

    Args:
        weights: Features of the query rows, [lists group·tokens features].
        keys: Exponents of the chunk's keys, [lists tokens features].
    """
    lists, tokens, features = keys.shape
    # The sums of the features go before those of the chunk's keys: one product reads both.
    read = powers.rooms("sums and keys", keys, (lists, 1 + tokens, features))
    read[:, :1] = state.ones.mT
    numbers = powers.hide_(torch.exp2(keys, out=read[:, 1:]), positions, 0.0)
    scores = triangle_(torch.bmm(weights, read.mT), before=1)
    out = torch.bmm(scores[..., 1:], v).baddbmm_(weights, state.values)
    state.values.baddbmm_(numbers.mT, v)
    state.ones.add_(numbers.sum(dim=-2).unsqueeze(-1))
    return scores.sum(dim=-1, keepdim=True), out


def relative(state: Plain) -> tuple[Tensor, Tensor, Tensor]:
    """Values, ones and reference of the same sums: every feature's ones are 1, or 0 without a key."""
    some = state.ones > 0
    ones = torch.where(some, state.ones, 1.0)
    reference = ones.log2().masked_fill_(~some, -torch.inf)
    return state.values / ones, some.to(ones.dtype), reference.mT
