"""Features of a chunk's queries and keys relative to scales of their own, and the sums of a chunk's keys.

Scales are whole numbers, so that their sums and differences have no rounding, even far from 0.

All tensors are in chunks, [flat_heads chunks rows …].
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.linear.features import Features
from efficient_attn.ops.linear.state import LinearState

# Stands for −inf where a scale is subtracted: no exponent of a finite input is as low.
_LOWEST = -1e30
# Smaller scales mean that there is no key.
UNSEEN = -1e29
# Half the logarithm of the largest sum of products of a query's and a key's weights: sums use the whole range
# of floats, within which the supports of a query's and a key's features may differ.
_LARGEST = {torch.float32: 40.0, torch.float64: 300.0}


class ScaledKeys(NamedTuple):
    """Keys as weights · exp(log_scale + reference).

    Attributes:
        weights: Exponentials, or the values of other features, [… size features].
        log_scale: Scale of each key, [… size 1]; −inf for a masked key.
        reference: Largest exponent of the chunk's keys, feature by feature, [… 1 features]; −inf: no key;
            None: features that have values.
    """

    weights: Tensor
    log_scale: Tensor
    reference: Tensor | None


class ScaledQueries(NamedTuple):
    """Queries as weights · exp(log_scale − reference of the keys).

    Attributes:
        weights: [… rows features].
        log_scale: [… rows 1]; None: 0.
    """

    weights: Tensor
    log_scale: Tensor | None


def floor(scale: Tensor) -> Tensor:
    """The scale with a finite number in place of −inf, so that it can be subtracted."""
    return scale.clamp_min(_LOWEST)


def scaled_keys(features: Features) -> ScaledKeys:
    """Keys at the largest exponents of their chunk, each at a scale of its own."""
    if features.values is not None:
        return ScaledKeys(features.values, features.log_scale, None)
    reference = features.log_scale.detach().amax(dim=-2, keepdim=True)
    exponents = features.log_scale - floor(reference)
    return ScaledKeys(*_scaled(exponents), reference)


def scaled_queries(features: Features, keys: ScaledKeys) -> ScaledQueries:
    """Queries of the same chunks as the keys."""
    if keys.reference is None:
        assert features.values is not None
        return ScaledQueries(features.values, None)
    exponents = features.log_scale + floor(keys.reference)
    return ScaledQueries(*_scaled(exponents))


def _scaled(exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Weights exp(exponents − scale) and the scale of each row, at which sums of products are the largest."""
    largest = _LARGEST[exponents.dtype] - math.ceil(math.log(exponents.shape[-1]) / 2)
    top = exponents.detach().amax(dim=-1, keepdim=True).round()
    # The factor e^largest has no rounding of a large exponent; weights without it leave the range of floats.
    roots = torch.add(floor(top) / -2, exponents, alpha=0.5).exp()
    return torch.addcmul(roots.new_zeros(()), roots, roots, value=math.exp(largest)), top - largest


def in_digits(sums: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Positive sums near 1 and their scale, so that their logarithm has no rounding of a large exponent."""
    largest = _LARGEST[sums.dtype]
    shift = sums.detach().log().round().clamp(-largest, largest)
    return sums / shift.exp(), scale + shift


def states(keys: ScaledKeys, values: Tensor) -> LinearState:
    """The state of each chunk's keys and of their values with ones, [… size value_dim+1]."""
    if keys.reference is not None:
        return LinearState(keys.weights.mT @ (values * keys.log_scale.exp()), keys.reference)
    largest = keys.log_scale.detach().amax(dim=-2, keepdim=True)
    return LinearState(keys.weights.mT @ (values * (keys.log_scale - floor(largest)).exp()), largest)


def visible_scale(keys: ScaledKeys, rows: int) -> Tensor:
    """Scale of the keys of a chunk up to each row's own, [… rows 1]."""
    scale = keys.log_scale.detach().cummax(dim=-2).values
    if keys.reference is not None:
        scale = scale + _LARGEST[scale.dtype]
    group = rows // scale.shape[-2]
    return scale.repeat(1, 1, group, 1) if group > 1 else scale
