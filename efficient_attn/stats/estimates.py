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


def percentiles(record: Record) -> dict[str, float]:
    """Percentiles p20, p50 and p80 over all calls, each the nearest sample."""
    times_s = sorted(record.times_s or ())
    return {f"p{share}": times_s[round(share / 100 * (len(times_s) - 1))] for share in (20, 50, 80)}


def tokens_per_s(record: Record) -> float | None:
    """Tokens of the batch over the time of a call."""
    return per_second(record.case.batch * record.case.tokens, record)


def per_second(amount: float, record: Record) -> float | None:
    """Amount over the time of a call; None for a time of zero."""
    time_s = call_time(record).median
    return amount / time_s if time_s > _SHORTEST_S else None


def on_device(record: Record) -> Record:
    """Copy with `device_times_s` as `times_s`."""
    return replace(record, times_s=record.device_times_s, device_times_s=None)


def time_ratio(record: Record, baseline: Record) -> Typical:
    """Speed-up over a baseline: median ratio of times over common rounds.

    Effects on both times of a round cancel. A value above 1 means that `record` is faster.
    """
    times, baseline_times = paired(record, baseline)
    if not len(times):
        # A file may hold times of zero.
        return Typical(call_time(baseline).median / (call_time(record).median or 1.0), None, None, 0)
    return _typical(baseline_times / times, math.sqrt(2) * SHIFT_HALF_WIDTH)


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


def paired(record: Record, baseline: Record) -> tuple[Floats, Floats]:
    """Times of common rounds, as rounds are missing at the end only."""
    first, second = round_times(record), round_times(baseline)
    common = min(len(first), len(second))
    return first[:common], second[:common]


def half_width(samples: Floats) -> float | None:
    """Half-width of the 95 % interval; None for fewer than four rounds."""
    if len(samples) < FEWEST_ROUNDS:
        return None
    return float(samples.std(ddof=1)) * _standard_deviations(len(samples))


@cache
def _standard_deviations(rounds: int) -> float:
    """Half-width of the interval, in sample standard deviations of this many rounds."""
    inflation, _ = correlated(rounds, CORRELATION)
    return quantile(_OUTSIDE, rounds - 1) * inflation / math.sqrt(rounds)


def _typical(rounds: Floats, shift: float) -> Typical:
    """Median with an interval symmetric in the logarithm, at least `shift` wide."""
    centre, half = median(rounds.tolist()), half_width(np.log(rounds))
    if half is None:
        return Typical(centre, None, None, len(rounds))
    factor = math.exp(min(math.hypot(half, shift), _WIDEST))
    return Typical(centre, centre / factor, centre * factor, len(rounds))
