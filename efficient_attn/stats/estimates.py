"""Medians, times and ratios of times with 95 % intervals.

Calls of one round share a state of the machine, so a thousand calls may carry hardly more information than
one. Each round therefore counts once, by the median of its calls, and Student's t over rounds gives the
interval. Neighbouring rounds may be correlated, which a handful of rounds cannot show: the interval is wide
enough for a first-order autoregression with a correlation of 0.7, and conservative for independent rounds.

Rounds do not show the shift that all calls of a case share in one run, such as that of where its memory lies.
A shift of 3 %, one standard deviation, is added to the rounds: the log half-width h becomes
√(h² + (1.96 · 0.03)²), and of a ratio, with a shift in both times, √(h² + 2 (1.96 · 0.03)²).
"""

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from statistics import NormalDist, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from efficient_attn.measure.record import Record, replace
from efficient_attn.stats.significance import correlated, quantile

Floats = NDArray[np.float64]

# Three rounds would need six standard deviations on either side, four need four.
FEWEST_ROUNDS = 4

# Assumed correlation of neighbouring rounds.
CORRELATION = 0.7

# Tail probability on either side of an interval.
_OUTSIDE = 0.025

# Assumed standard deviation of the shift of a case from run to run, relative to its time.
RUN_SHIFT = 0.03

# Half-width of the 95 % interval from the shift alone.
SHIFT_HALF_WIDTH = RUN_SHIFT * NormalDist().inv_cdf(1 - _OUTSIDE)

# Bounds on plausible times; products of others leave the range of floats.
_SHORTEST_S, _LONGEST_S, _WIDEST = 1e-90, 1e90, 100.0

# All of five samples lie on one side of the median with probability 1/16, more than 5 %.
FEWEST_FOR_95 = 6


class Middle(NamedTuple):
    """Median of samples, with a confidence interval for the population median."""

    median: float
    low: float
    high: float
    samples: int


class Typical(NamedTuple):
    """Median over rounds with a 95 % interval, if there are enough.

    Attributes:
        samples: Number of calls, or of rounds where rounds are the samples.
    """

    median: float
    low: float | None
    high: float | None
    samples: int

    @property
    def side_of_one(self) -> int:
        """1 for an interval above 1, −1 below, else 0."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 1) - int(self.high < 1)


def middle(samples: Sequence[float]) -> Middle:
    """Median, and the closest order statistics with 95 % confidence.

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


@lru_cache(maxsize=4096)
def _certainly_outside(count: int) -> int:
    """Samples outside of the interval on each side; −1 without 95 %."""
    # P(m) / P(m − 1) = (count − m + 1) / m
    m = np.arange(1, count // 2 + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((count - m + 1) / m))]) - count * math.log(2)
    return int(np.searchsorted(np.cumsum(np.exp(logs)), _OUTSIDE, side="right")) - 1


def call_time(record: Record) -> Typical:
    """Time of a call: median over rounds of each round's median."""
    times_s, rounds = record.times_s or (), round_times(record)
    if not len(rounds):
        return Typical(middle(times_s).median, None, None, len(times_s))
    return _typical(rounds, SHIFT_HALF_WIDTH)._replace(samples=len(times_s))


def on_device(record: Record) -> Record:
    """Copy with `device_times_s` as `times_s`."""
    return replace(record, times_s=record.device_times_s, device_times_s=None)


def time_ratio(record: Record, baseline: Record) -> Typical:
    """Speed-up over a baseline: median ratio of times over common rounds.

    Effects on both times of a round cancel. A value above 1 means that `record` is faster.
    """
    times, baseline_times = round_times(record), round_times(baseline)
    # Rounds are missing at the end only.
    common = min(len(times), len(baseline_times))
    if not common:
        # A file may hold times of zero.
        return Typical(call_time(baseline).median / (call_time(record).median or 1.0), None, None, 0)
    return _typical(baseline_times[:common] / times[:common], math.sqrt(2) * SHIFT_HALF_WIDTH)


def round_times(record: Record) -> Floats:
    """Median of each round's calls [rounds]; empty if rounds are unknown."""
    times_s, sizes = record.times_s or (), record.round_sizes or ()
    if not sizes or not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) != len(times_s):
        return np.empty(0)
    # Times that were not finite are null in a file.
    times = np.array(times_s, dtype=float)
    if not ((times > _SHORTEST_S) & (times < _LONGEST_S)).all():
        return np.empty(0)
    if len(set(sizes)) == 1 and sizes[0]:
        return np.asarray(np.median(times.reshape(len(sizes), sizes[0]), axis=1))
    ends = accumulate(sizes, initial=0)
    return np.array([median(times_s[start:end]) for start, end in pairwise(ends) if end > start])


@cache
def _standard_deviations(rounds: int) -> float:
    """Half-width of the interval, in sample standard deviations of this many rounds."""
    inflation, _ = correlated(rounds, CORRELATION)
    return quantile(_OUTSIDE, rounds - 1) * inflation / math.sqrt(rounds)


def _typical(rounds: Floats, shift: float) -> Typical:
    """Median with an interval symmetric in the logarithm, at least `shift` wide, from enough rounds."""
    centre = median(rounds.tolist())
    if len(rounds) < FEWEST_ROUNDS:
        return Typical(centre, None, None, len(rounds))
    half = float(np.log(rounds).std(ddof=1)) * _standard_deviations(len(rounds))
    factor = math.exp(min(math.hypot(half, shift), _WIDEST))
    return Typical(centre, centre / factor, centre * factor, len(rounds))


def last_rise(places: Floats, values: Floats) -> float | None:
    """Place from which all values are positive, interpolated linearly; None if the last one is not."""
    behind = np.flatnonzero(values <= 0)
    if not len(behind):
        return float(places[0])
    start = int(behind[-1])
    if start == len(values) - 1:
        return None
    here, there = values[start], values[start + 1]
    return float(places[start] + (places[start + 1] - places[start]) * (here / (here - there)))
