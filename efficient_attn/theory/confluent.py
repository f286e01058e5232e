"""The confluent hypergeometric functions that orthogonal directions lead to, in logarithms."""

from functools import cache

import numpy as np

from efficient_attn.theory.numbers import Floats, in_parts, log_factorials, log_power_series, log_rising

# Up to here the power series of `pair_excess` loses less than two digits to cancellation.
_SMALL = 1.0
# A series is cut where each further term is at most half of the one before, this many terms later.
_HALVINGS = 64


def log_confluent(argument: Floats, head_dim: int) -> Floats:
    """log 1F1(d; d/2; w) for w ≥ 0: a sum of d/2 + 1 terms for even d, a series for odd d.

    For even d Kummer's transformation e^w 1F1(−d/2; d/2; −w) ends by itself: all its terms are positive,
    C(d/2, k) w^k / (d/2)_k. For odd d the series at w itself is positive and converges.
    """
    if head_dim % 2 == 0:
        half = head_dim // 2
        factorials = log_factorials(half)
        log_binomials = factorials[-1] - factorials - factorials[::-1]
        return argument + log_power_series(argument, log_binomials - log_rising(half, half))
    last = int(4 * np.max(argument, initial=0.0)) + _HALVINGS
    coefficients = log_rising(head_dim, last) - log_rising(head_dim / 2, last) - log_factorials(last)
    return log_power_series(argument, coefficients)


def decaying_confluent(argument: Floats, head_dim: int) -> Floats:
    """1F1(d; d/2; −w) for w ≥ 0, between −1 and 1, to an absolute error of a few roundings.

    e^(−w) 1F1(−d/2; d/2; w) has terms of both signs, but each at most w^k e^(−w) / k!, which add up to 1.
    """
    half = head_dim / 2
    last = (
        head_dim // 2 if head_dim % 2 == 0 else int(2 * np.max(argument, initial=0.0)) + head_dim + _HALVINGS
    )
    factors = -half + np.arange(last)
    signs = np.concatenate([[1.0], np.cumprod(np.sign(factors))])
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.abs(factors)))])
    logs = logs - log_rising(half, last) - log_factorials(last)

    def series(part: Floats) -> Floats:
        log_part = np.log(np.maximum(part, np.finfo(np.float64).tiny))
        powers = np.arange(last + 1) * log_part[..., None]
        return (signs * np.exp(logs + powers - part[..., None])).sum(axis=-1)

    return in_parts(series, argument, last + 1)


def log_bessel(argument: Floats, head_dim: int) -> Floats:
    """log 0F1(; d/2; x) for x ≥ 0: the mean of exp(2√x times one entry of a random unit vector)."""
    last = int(np.sqrt(2 * np.max(argument, initial=0.0))) + _HALVINGS
    return log_power_series(argument, -log_rising(head_dim / 2, last) - log_factorials(last))


def pair_excess(argument: Floats, head_dim: int) -> Floats:
    """e^(−2w) 1F1(d; d/2; w) − 1 without cancellation near 0, for w < 0 in units of e^(2|w|).

    The unit is the size it reaches there. The function solves w c″ + (3w + d/2) c′ + 2w c = 0, so the
    coefficients of its power series obey a recurrence; c₀ = 1, c₁ = 0.
    """
    small = np.abs(argument) <= _SMALL
    negative = np.maximum(-argument, 0.0)
    near = np.polynomial.polynomial.polyval(np.where(small, argument, 0.0), _excess_coefficients(head_dim))
    positive = np.where(argument > _SMALL, argument, 0.0)
    far = np.expm1(log_confluent(positive, head_dim) - 2 * positive)
    mirrored = decaying_confluent(np.where(small, 0.0, negative), head_dim) - np.exp(-2 * negative)
    return np.where(small, near * np.exp(-2 * negative), np.where(argument > 0, far, mirrored))


@cache
def _excess_coefficients(head_dim: int) -> Floats:
    coefficients = [1.0, 0.0]
    for n in range(1, _HALVINGS):
        after = -(3 * n * coefficients[n] + 2 * coefficients[n - 1]) / ((n + 1) * (n + head_dim / 2))
        coefficients.append(after)
    return np.array([0.0, *coefficients[1:]])
