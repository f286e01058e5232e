"""Predicted time of longer calls from a few short ones.

A call has a fixed part, a part per token and, where its time grows so, a part per pair of tokens:

    t = a + b · tokens + c · tokens²,   a, b, c ≥ 0

Parts are fitted per backend to measured calls, by least squares of relative residuals. Each measured call is
predicted from all calls but itself; the scatter of these predictions, times Student's quantile, is the
half-width of the logarithm. docs/advise.md has the coverage of the intervals.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from efficient_attn.stats.estimates import OUTSIDE, WIDEST, Floats, Typical, quantile

# Calls from which rates and their scatter are fitted.
FEWEST_CALLS = 3


def extrapolated(
    times_s: Mapping[int, float], tokens: int, growth: int = 2
) -> tuple[float, float, float] | None:
    """Time at a length with its interval.

    A length with a time has that time; fewer than FEWEST_CALLS times predict nothing.
    """
    if tokens in times_s:
        return (times_s[tokens],) * 3
    if len(times_s) < FEWEST_CALLS:
        return None
    powers = np.arange(growth + 1)
    rates, scatter = _fit(np.power.outer([*times_s], powers), [*times_s.values()])
    value, calls = float(rates @ float(tokens) ** powers), len(times_s)
    factor = math.exp(min(quantile(OUTSIDE, calls - 1) * scatter, WIDEST))
    return value, value / factor, value * factor


def _fit(powers: Floats, times_s: Sequence[float]) -> tuple[Floats, float]:
    """Rates of powers of the tokens, and the scatter of each time around its prediction from the others."""
    # Shares of a call: every row sums to one where the prediction equals the measurement.
    shares = powers / np.array(times_s)[:, None]
    missed = [math.log(shares[n] @ _rates(np.delete(shares, n, axis=0))) for n in range(len(times_s))]
    return _rates(shares), math.sqrt(float(np.mean(np.square(missed))))


def _rates(shares: Floats) -> Floats:
    """Non-negative rates by least squares over all subsets of the parts."""
    units = np.abs(shares).max(axis=0)
    scaled = shares / np.where(units > 0, units, 1.0)
    best, least = np.zeros(scaled.shape[1]), math.inf
    parts = range(scaled.shape[1])
    for chosen in itertools.chain.from_iterable(itertools.combinations(parts, n + 1) for n in parts):
        rates = np.linalg.lstsq(scaled[:, chosen], np.ones(len(scaled)), rcond=None)[0]
        missed = float(np.square(scaled[:, chosen] @ rates - 1).sum())
        # A further part must reduce the residual.
        if (rates >= 0).all() and missed < least - 1e-12:
            best, least = np.zeros(scaled.shape[1]), missed
            best[list(chosen)] = rates
    return best / np.where(units > 0, units, 1.0)


def crossover(speeds: Mapping[int, Typical]) -> tuple[float | None, ...]:
    """Length above which a backend is faster, interpolated in logarithms, and its interval.

    It is faster at all longer lengths. Interval ends follow from the intervals. None: beyond all lengths.
    """
    lengths = sorted(speeds)
    values, lows, highs = np.log(np.array([speeds[tokens][:3] for tokens in lengths], float)).T
    rises = (_last_rise(np.log(lengths), logs) for logs in (values, highs, lows))
    return tuple(None if rise is None else round(math.exp(rise), 6) for rise in rises)


def _last_rise(places: Floats, values: Floats) -> float | None:
    """Place from which all values are positive, interpolated linearly, or None if the last is not."""
    behind = np.flatnonzero(values <= 0)
    if not len(behind):
        return float(places[0])
    start = int(behind[-1])
    if start == len(values) - 1:
        return None
    here, there = values[start], values[start + 1]
    return float(places[start] + (places[start + 1] - places[start]) * (here / (here - there)))
