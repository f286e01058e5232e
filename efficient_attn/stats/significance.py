"""Student's t: quantiles for intervals of means, and their width for correlated rounds."""

import functools
import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Tail probability on either side of a 95 % interval.
OUTSIDE = 0.025

# Widest interval of a logarithm; beyond, the ratio leaves the range of floats.
WIDEST = 100.0

# Degrees of freedom above which Student's t is treated as normal.
_NORMAL = 1e3

_NODES = np.polynomial.legendre.leggauss(128)


def half_width(samples: Floats, correlation: float = 0.0) -> float:
    """Half-width of the 95 % interval of a mean of at least two samples.

    Neighbouring samples may be correlated, as in a first-order autoregression: the mean then varies more than
    for independent samples, and the sample variance is smaller.
    """
    count = len(samples)
    lags = np.arange(1, count)
    variance = 1 + 2 * float(((1 - lags / count) * correlation**lags).sum())
    inflation = math.sqrt(variance * (count - 1) / (count - variance))
    error = float(samples.std(ddof=1)) * inflation / math.sqrt(count)
    return quantile(OUTSIDE, count - 1) * error


def upper_tail(value: float, freedom: float) -> float:
    """Probability that Student's t exceeds `value`."""
    if value < 0:
        return 1 - upper_tail(-value, freedom)
    if freedom > _NORMAL:
        return math.erfc(value / math.sqrt(2)) / 2
    # With t = √f tan θ the density is proportional to cos^(f−1) θ, on a bounded interval.
    log_norm = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    start = math.atan(value / math.sqrt(freedom))
    nodes, weights = _NODES
    angles = start + (math.pi / 2 - start) * (nodes + 1) / 2
    heights = np.exp(log_norm + (freedom - 1) * np.log(np.cos(angles)))
    return float(heights @ weights) * (math.pi / 2 - start) / 2


@functools.cache
def quantile(tail: float, freedom: float) -> float:
    """The value that Student's t exceeds with probability `tail`, by bisection."""
    low, high = 0.0, 1.0
    while upper_tail(high, freedom) > tail:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if upper_tail(middle, freedom) > tail else (low, middle)
    return high
