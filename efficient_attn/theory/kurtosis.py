"""Standard error of a measured mean squared error of random features, in closed form.

The estimate from one direction of positive features is lognormal. Beyond |x + y|² of about 2 nearly all of
its variance comes from directions that are almost never drawn, so that a measured error is too small and the
sample does not show it. The closed form does.
"""

import math

import numpy as np

from efficient_attn.theory.numbers import Floats

_ORDERS = (1, 2, 3, 4)


def standard_error(
    kind: str,
    sum_square: float,
    difference_square: float,
    *,
    a: Floats | None = None,
    num_directions: int,
    draws: int,
) -> float:
    """√((2 + (κ − 3)/m)/draws): relative standard error of a mean squared error over `draws` draws.

    κ is the kurtosis of the estimate from one direction; directions count as independent.

    Args:
        kind: `positive`, `hyperbolic` or `trigonometric`.
        a: The quadratic exponents of the dense-exponential family, one for each axis.
    """
    moments = log_moments(kind, sum_square, difference_square, a=a)
    spread = math.expm1(moments[1])
    if spread <= 1e-12:
        return 0.0
    # E[(X − 1)⁴] of E[X] = 1, in units of the largest moment so that nothing overflows.
    largest = max(moments[3], 0.0)
    fourth = sum(
        factor * math.exp(moment - largest)
        for factor, moment in zip((1, -4, 6, -3), (moments[3], moments[2], moments[1], 0.0), strict=True)
    )
    if fourth <= 0:
        return math.sqrt(2 / draws)
    log_kurtosis = largest + math.log(fourth) - 2 * math.log(spread)
    if log_kurtosis > 200:
        return math.inf
    return math.sqrt(max(2 + (math.exp(log_kurtosis) - 3) / num_directions, 0.0) / draws)


def log_moments(
    kind: str, sum_square: float, difference_square: float, *, a: Floats | None = None
) -> tuple[float, ...]:
    """log E[X^k] for k = 1 … 4, where X is the estimate from one direction over SM, so E[X] = 1."""
    if kind == "trigonometric":
        return tuple(_log_cosines(k, difference_square) for k in _ORDERS)
    if kind == "hyperbolic":
        return tuple(_log_hyperbolic(k, sum_square) for k in _ORDERS)
    if a is None:
        return tuple(k * (k - 1) / 2 * sum_square for k in _ORDERS)
    return tuple(_log_quadratic(k, sum_square, np.asarray(a)) for k in _ORDERS)


def _log_cosines(k: int, square: float) -> float:
    """X = e^(Δ²/2) cos(ω·Δ): E cos^k is the mean of e^(−j²Δ²/2) over the signs' sums j."""
    terms = [math.exp(-(j**2) * square / 2) for j in _sums(k)]
    return k * square / 2 + math.log(sum(terms) / len(terms))


def _log_hyperbolic(k: int, square: float) -> float:
    """X = e^(−z²/2) cosh(ω·z): the same with e^(j²z²/2)."""
    exponents = [j**2 * square / 2 for j in _sums(k)]
    largest = max(exponents)
    terms = [math.exp(exponent - largest) for exponent in exponents]
    return largest + math.log(sum(terms) / len(terms)) - k * square / 2


def _sums(k: int) -> list[int]:
    """Sums of k signs, over all choices."""
    sums = [0]
    for _ in range(k):
        sums = [one + sign for one in sums for sign in (1, -1)]
    return sums


def _log_quadratic(k: int, square: float, a: Floats) -> float:
    """X = Π √(1 − 4a_l) exp(2a_l ω_l² + √(1 − 4a_l) ω_l z_l − z_l²/2), |z|² spread evenly over the axes."""
    each = square / len(a)
    narrow = 1 - 4 * a
    terms = k / 2 * np.log(narrow) - np.log(1 - 4 * k * a) / 2
    return float((terms + k**2 * narrow * each / (2 * (1 - 4 * k * a)) - k * each / 2).sum())
