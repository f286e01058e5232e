"""Medians of raw samples with confidence intervals."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# One in this many samples of the median lies above the interval, and one below: together 5 %.
_ONE_IN = 40

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
    """The largest m for which m or fewer of `count` samples lie below the median once in 40; or -1."""
    # P(m) / P(m − 1) = (count − m + 1) / m
    m = np.arange(1, count // 2 + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((count - m + 1) / m))]) - count * math.log(2)
    return int(np.searchsorted(np.cumsum(np.exp(logs)), 1 / _ONE_IN, side="right")) - 1
