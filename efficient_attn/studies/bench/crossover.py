"""Speed-ups over exact attention, and crossovers: numbers of tokens above which a backend is faster.

The cost of attention, a block and an encoder has one part per token and one per pair of tokens. The
difference of two times, divided by the tokens, is therefore interpolated linearly between two lengths, and
extrapolated by the line through the last two.

Both times of a round are measured within a moment of each other, so the difference is computed per round, and
a round is one sample. The interval holds every length at which the line does not differ significantly from
zero (Fieller's method, for a line instead of a ratio).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import CEILING, YARDSTICK
from efficient_attn.stats.curves import Curve, Point, partner
from efficient_attn.stats.estimates import SHIFT_HALF_WIDTH, Typical, half_width, paired, time_ratio

# Limit of extrapolation, as a multiple of the longest length.
FURTHEST = 8


class Gain(NamedTuple):
    """Comparison of a backend with the baseline.

    Attributes:
        tokens: Longest length at which both were measured.
        ratio: Speed-up at that length, with an interval: above 1 the backend is faster.
        records: Times of the backend and of the baseline at that length.
    """

    label: str
    tokens: int
    ratio: Typical
    records: tuple[Record, Record]


class Crossover(NamedTuple):
    """Length above which a backend is faster than exact attention, measured or extrapolated.

    Attributes:
        lengths: Lengths at which both were measured; crossovers are sought up to eight times the last one.
        tokens: The crossover; None if there is none, or no interval for it.
        low: Lower end of the interval; None if it may be below the shortest length.
        high: Upper end of the interval; None if unbounded.
        extrapolated: Whether the crossover is beyond the longest length.
        always: Whether the backend is clearly faster at every length.
        never: Whether the backend is clearly slower at every length, without a crossover beyond.
    """

    label: str
    lengths: tuple[int, ...]
    tokens: float | None = None
    low: float | None = None
    high: float | None = None
    extrapolated: bool = False
    always: bool = False
    never: bool = False


class _Lag(NamedTuple):
    """Difference of the times per token at a length, and the half-width of its interval."""

    value: float
    half: float | None


def common_points(curve: Curve, baseline: Curve) -> list[tuple[Point, Point]]:
    """Points of both curves at every length at which both were measured."""
    return [(point, exact) for point in curve.measured if (exact := baseline.at(point.tokens)) is not None]


def gains(all_curves: Sequence[Curve]) -> list[Gain]:
    """Every backend against the baseline of its setting, at the longest common length."""
    comparisons = []
    for curve in all_curves:
        exact = partner(curve, all_curves, YARDSTICK)
        common = [] if exact is None or exact is curve else common_points(curve, exact)
        if common:
            point, baseline = common[-1]
            times = point.record, baseline.record
            comparisons.append(Gain(curve.label, point.tokens, time_ratio(*times), times))
    return comparisons


def crossovers(all_curves: Sequence[Curve]) -> list[Crossover]:
    """Crossovers of all curves of times with exact attention in the same setting."""
    compared = (
        _crossover(curve, exact)
        for curve in all_curves
        if curve.backend not in (YARDSTICK, CEILING)
        and (exact := partner(curve, all_curves, YARDSTICK)) is not None
    )
    return [crossover for crossover in compared if crossover is not None]


def _crossover(curve: Curve, baseline: Curve) -> Crossover | None:
    """Crossover of two curves of times; None if they share fewer than two lengths."""
    pairs = common_points(curve, baseline)
    if len(pairs) < 2:
        return None
    lags = [_lag(*pair) for pair in pairs]
    looked = Crossover(curve.label, tuple(point.tokens for point, _ in pairs))
    tokens = np.asarray(looked.lengths, dtype=float)
    best, furthest = _crossing(tokens, [lag.value for lag in lags]), FURTHEST * tokens[-1]
    sides = [time_ratio(point.record, exact.record).side_of_one for point, exact in pairs]
    if not tokens[0] <= best <= furthest or any(lag.half is None for lag in lags):
        return looked._replace(
            always=all(side == 1 for side in sides), never=all(side == -1 for side in sides)
        )
    low, high = _undecided(tokens, lags, best)
    return looked._replace(
        tokens=best,
        low=low if low > tokens[0] else None,
        high=high if high < furthest else None,
        extrapolated=bool(best > tokens[-1]),
    )


def _lag(point: Point, baseline: Point) -> _Lag:
    times, baseline_times = paired(point.record, baseline.record)
    if not len(times):
        return _Lag(((point.value or 0.0) - (baseline.value or 0.0)) / point.tokens, None)
    lags = (times - baseline_times) / point.tokens
    half, shift = half_width(lags), SHIFT_HALF_WIDTH * math.hypot(np.median(times), np.median(baseline_times))
    return _Lag(float(np.median(lags)), None if half is None else math.hypot(half, shift / point.tokens))


def _crossing(tokens: np.ndarray, lags: Sequence[float]) -> float:
    """Last zero of the line through the lags; ∓∞ if it is always negative or positive."""
    behind = np.flatnonzero(np.asarray(lags) > 0)
    if not len(behind):
        return -math.inf
    start = min(int(behind[-1]), len(lags) - 2)
    here, there = lags[start], lags[start + 1]
    if here <= there:
        return math.inf
    return float(tokens[start] + (tokens[start + 1] - tokens[start]) * (here / (here - there)))


def _undecided(tokens: np.ndarray, lags: Sequence[_Lag], best: float) -> tuple[float, float]:
    """The first and the last length at which the line does not differ significantly from 0."""
    edges = [best]
    for start in range(len(lags) - 1):
        step = tokens[start + 1] - tokens[start]
        last = start == len(lags) - 2
        furthest = (FURTHEST * tokens[-1] - tokens[start]) / step if last else 1.0
        edges += [tokens[start] + step * at for at in _near_zero(lags[start], lags[start + 1], furthest)]
    return float(min(edges)), float(max(edges))


def _near_zero(here: _Lag, there: _Lag, furthest: float) -> list[float]:
    """First and last w in [0, furthest] where |(1−w)·here + w·there| is within its half interval.

    The half intervals of the ends, h and k, are independent: that of the line is √((1−w)²h² + w²k²).
    """
    # Scaling by the largest number keeps the squares from overflow and underflow.
    unit = max(abs(here.value), abs(there.value), here.half or 0.0, there.half or 0.0) or 1.0
    d, e, h, k = (x / unit for x in (here.value, there.value, here.half or 0.0, there.half or 0.0))
    square = (e - d) ** 2 - h**2 - k**2
    linear, constant = 2 * d * (e - d) + 2 * h**2, d**2 - h**2
    roots = [float(root.real) for root in np.roots([square, linear, constant]) if not root.imag]
    ends = [at for at in (0.0, furthest) if (square * at + linear) * at + constant <= 0]
    return ends + [root for root in roots if 0 <= root <= furthest]
