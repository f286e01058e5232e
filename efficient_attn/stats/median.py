"""Medians of raw samples with confidence intervals."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# One in this many samples of the median lies above the interval, and one below: together 5 %.
_ONE_IN = 40

# Range of the sum over binomial(count, ½) below its centre, in square roots of the count: 20 standard
# deviations, beyond which the probability is 0 in a double.
_ROOTS = 10

# All of five samples lie on one side of the median with probability 1/16, more than 5 %.
FEWEST_FOR_95 = 6


class Middle(NamedTuple):
    """The median of samples, with a confidence interval for the population median."""

    median: float
    low: float
    high: float
    samples: int


def middle(samples: Sequence[float]) -> Middle:
    """The median, and the closest pair of order statistics that brackets the true one with 95 % confidence.

    The number of samples below the true median is binomial(samples, ½) for any distribution. Fewer than six
    samples cannot reach 95 %: the interval is then their range.
    """
    ordered = np.sort(np.asarray(samples, dtype=float))
    count = len(ordered)
    outside = max(_certainly_outside(count), 0)
    low, high = ordered[outside], ordered[count - 1 - outside]
    lower, upper = ordered[(count - 1) // 2], ordered[count // 2]
    # (lower + upper) / 2 could overflow.
    median = lower + (upper - lower) / 2
    return Middle(float(median), float(low), float(high), count)


@functools.lru_cache(maxsize=4096)
def _certainly_outside(count: int) -> int:
    """The largest m for which m or fewer of `count` samples lie below the median once in 40; or -1.

    Time and memory grow with the square root of the count.
    """
    most = count // 2
    below = np.arange(most, max(most - _ROOTS * (math.isqrt(count) + 1), 0) - 1, -1)
    highest = math.lgamma(count + 1) - math.lgamma(most + 1) - math.lgamma(count - most + 1)
    # P(m − 1) / P(m) = m / (count − m + 1)
    steps = np.cumsum(np.log(below[:-1]) - np.log(count - below[:-1] + 1))
    logs = highest - count * math.log(2) + np.concatenate([[0.0], steps])
    at_most = np.cumsum(np.exp(logs)[::-1])
    return int(below[-1]) + int(np.searchsorted(at_most, 1 / _ONE_IN, side="right")) - 1
