"""The middle of raw samples, and how far it can be trusted."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Of so many samples of the median one lies above the interval, and one below: together 5 %.
_ONE_IN = 40

# Of five samples all lie on one side of the median once in sixteen.
FEWEST_FOR_95 = 6


class Middle(NamedTuple):
    """The median of samples, with an interval for the median of what they were drawn from."""

    median: float
    low: float
    high: float
    samples: int


def middle(samples: Sequence[float]) -> Middle:
    """The median, and the closest pair of samples that brackets the true one with 95 % confidence.

    The number of samples below the true median is binomial(samples, ½), whatever their distribution. Fewer
    than six samples cannot reach 95 %: then the interval is from the smallest to the largest.
    """
    ordered = np.sort(np.asarray(samples, dtype=float))
    count = len(ordered)
    outside = max(_certainly_outside(count), 0)
    low, high = ordered[outside], ordered[count - 1 - outside]
    lower, upper = ordered[(count - 1) // 2], ordered[count // 2]
    # Half the sum would overflow where the samples nearly do.
    median = lower + (upper - lower) / 2
    return Middle(float(median), float(low), float(high), count)


def _certainly_outside(count: int) -> int:
    """The largest m for which m or fewer of `count` samples lie under the median once in 40; or -1.

    In integers, since 2^count does not fit a float beyond a thousand samples.
    """
    ways = term = 1
    below = 0
    while ways * _ONE_IN <= 2**count:
        below += 1
        term = term * (count - below + 1) // below
        ways += term
    return below - 1
