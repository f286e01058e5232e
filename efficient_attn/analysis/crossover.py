"""From how many tokens on a backend is faster than exact attention.

Between two lengths the logarithm of the ratio of medians is taken as a straight line in the logarithm of
tokens; beyond the longest length the line through the last two goes on. The interval comes from drawing the
raw samples of every length again, with replacement: it holds the scatter of calls, not that of other
machines or hours.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from efficient_attn.analysis.curves import Curve
from efficient_attn.analysis.summary import yardstick

_RESAMPLES, _SEED = 400, 0
_OUTSIDE = (2.5, 97.5)

# A line through two lengths is not followed further than this multiple of the longest.
_FURTHEST = 8


class Crossover(NamedTuple):
    """Where a backend becomes faster, and stays so as far as was measured.

    Attributes:
        low: None if it may be below the shortest length.
        high: None if nothing bounds it.
        extrapolated: It lies beyond the longest length.
    """

    label: str
    tokens: float
    low: float | None
    high: float | None
    extrapolated: bool


def crossovers(all_curves: Sequence[Curve]) -> list[Crossover]:
    """The crossovers with the yardstick, of the curves of times that have one."""
    exact = yardstick(all_curves)
    if exact is None:
        return []
    found = (_crossover(curve, exact) for curve in all_curves if curve is not exact)
    return [crossover for crossover in found if crossover is not None]


def _crossover(curve: Curve, exact: Curve) -> Crossover | None:
    pairs = [(own, its) for own in curve.measured if (its := exact.at(own.tokens)) is not None]
    if len(pairs) < 2:
        return None
    logs = np.log([own.tokens for own, _ in pairs])
    ratios = np.log([(own.value or 1.0) / (its.value or 1.0) for own, its in pairs])
    best, furthest = _crossing(logs, ratios), float(logs[-1]) + math.log(_FURTHEST)
    if not logs[0] <= best <= furthest:
        return None
    drawn = np.stack(
        [
            _medians(own.record.times_s, own.tokens, _SEED)
            - _medians(its.record.times_s, its.tokens, _SEED + 1)
            for own, its in pairs
        ],
        axis=1,
    )
    crossings = [_crossing(logs, row) for row in drawn]
    # Of two crossings one is taken, not their mean: some lie at infinity.
    low, high = np.percentile(crossings, _OUTSIDE, method="nearest")
    return Crossover(
        label=curve.label,
        tokens=math.exp(best),
        low=math.exp(low) if low >= logs[0] else None,
        high=math.exp(high) if high <= furthest else None,
        extrapolated=bool(best > logs[-1]),
    )


# The yardstick's serve for every backend, and all of them for sentences and for tables.
@cache
def _medians(times_s: tuple[float, ...], tokens: int, seed: int) -> np.ndarray:
    """Logarithms of the medians of samples drawn again: [resamples]."""
    generator = np.random.default_rng([seed, tokens])
    drawn = generator.choice(np.asarray(times_s), size=(_RESAMPLES, len(times_s)))
    return np.asarray(np.log(np.median(drawn, axis=1)))


def _crossing(logs: np.ndarray, ratios: np.ndarray) -> float:
    """Where the logarithm of the ratio falls through 0 for the last time; ∓∞ if before or never."""
    slower = np.flatnonzero(ratios > 0)
    if not len(slower):
        return -math.inf
    start = min(int(slower[-1]), len(logs) - 2)
    fall = ratios[start] - ratios[start + 1]
    if fall <= 0:
        return math.inf
    return float(logs[start] + (logs[start + 1] - logs[start]) * ratios[start] / fall)
