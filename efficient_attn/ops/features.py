"""Feature maps: those whose inner products estimate exp(x·y), and those of other kernels.

A feature map meets linear attention in one value: features with their logarithmic scale kept
apart, feature = values · exp(log_scale). Each map comes with its pullback, so that a backward pass
can make the features of a few tokens anew instead of keeping those of all.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.shapes import Directions, Vectors


class Features(NamedTuple):
    """Features of queries or keys, values · exp(log_scale).

    Attributes:
        log_scale: [… tokens features] of a positive map, [… tokens 1] of a signed one.
        values: [… tokens features] of a signed map; None stands for ones.
    """

    log_scale: Tensor
    values: Tensor | None


class FeatureMap(NamedTuple):
    """A map and how derivatives go back through it.

    Attributes:
        features: Takes (x, directions), returns the features of x.
        pullback: Takes (x, features, derivatives by log_scale and values, directions), returns
            the derivative by x.
        signed: Whether features may be negative.
        per_direction: How many features each direction gives.
        exponents: Where a feature is exp(w·x − |x|²/2 + constant), takes the directions, returns the
            w of every feature; None for other maps.
    """

    features: Callable[[Tensor, Tensor], Features]
    pullback: Callable[[Tensor, Features, Features, Tensor], Tensor]
    signed: bool
    per_direction: int
    exponents: Callable[[Tensor], Tensor] | None = None


def half_square(x: Vectors) -> Tensor:
    """|x|²/2, [… tokens 1]."""
    return x.square().sum(dim=-1, keepdim=True) / 2


def positive_features(x: Vectors, directions: Directions) -> Features:
    """exp(w·x − |x|²/2) / √m for each of m directions w (Choromanski et al. 2021, eq. 5)."""
    return Features(x @ directions.mT - (half_square(x) + math.log(directions.shape[-2]) / 2), None)


def _positive_pullback(x: Tensor, features: Features, by: Features, directions: Tensor) -> Tensor:
    return by.log_scale @ directions - x * by.log_scale.sum(dim=-1, keepdim=True)


def hyperbolic_features(x: Vectors, directions: Directions) -> Features:
    """exp(−|x|²/2) / √2m · [exp(w·x), exp(−w·x)] for m directions w (Choromanski et al. 2021, lemma 1)."""
    products = x @ directions.mT
    constant = half_square(x) + math.log(2 * directions.shape[-2]) / 2
    return Features(torch.cat([products - constant, -products - constant], dim=-1), None)


def _hyperbolic_pullback(x: Tensor, features: Features, by: Features, directions: Tensor) -> Tensor:
    by_plus, by_minus = by.log_scale.chunk(2, dim=-1)
    return (by_plus - by_minus) @ directions - x * by.log_scale.sum(dim=-1, keepdim=True)


def trigonometric_features(x: Vectors, directions: Directions) -> Features:
    """exp(|x|²/2) / √m · [cos(w·x), sin(w·x)] for each of m directions w (Choromanski et al. 2021, eq. 4)."""
    angles = x @ directions.mT
    values = torch.cat([angles.cos(), angles.sin()], dim=-1) / math.sqrt(directions.shape[-2])
    return Features(half_square(x), values)


def _trigonometric_pullback(x: Tensor, features: Features, by: Features, directions: Tensor) -> Tensor:
    assert features.values is not None and by.values is not None
    cos, sin = features.values.chunk(2, dim=-1)
    by_cos, by_sin = by.values.chunk(2, dim=-1)
    return (cos * by_sin - sin * by_cos) @ directions + x * by.log_scale


def _each_direction(directions: Tensor) -> Tensor:
    return directions


def _both_ways(directions: Tensor) -> Tensor:
    return torch.cat([directions, -directions], dim=-2)


MAPS = {
    "positive": FeatureMap(
        positive_features, _positive_pullback, signed=False, per_direction=1, exponents=_each_direction
    ),
    "hyperbolic": FeatureMap(
        hyperbolic_features, _hyperbolic_pullback, signed=False, per_direction=2, exponents=_both_ways
    ),
    "trigonometric": FeatureMap(
        trigonometric_features, _trigonometric_pullback, signed=True, per_direction=2
    ),
}
