"""From how many tokens on a backend is faster than another: fused exact attention, or the dense one.

What attention, a block and a stack cost is a part for every token and one for every pair of tokens. So the
difference of two medians, divided by the tokens, is taken as a straight line between two lengths; beyond the
longest the line through the last two goes on. The interval comes from drawing the raw samples of every length
again, with replacement: it holds the scatter of calls, not that of other machines or hours.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from efficient_attn.analysis.curves import YARDSTICK, Curve, partner
from efficient_attn.sweep.variants import CEILING

_RESAMPLES, _SEED = 400, 0
_OUTSIDE = (2.5, 97.5)

# A line through two lengths is not followed further than this multiple of the longest.
FURTHEST = 8


class Crossover(NamedTuple):
    """Where a backend becomes faster than another, and stays so as far as was measured.

    Attributes:
        against: The backend that it is compared with.
        lengths: Where both were measured: a crossover was looked for from the first to eight times the last.
        tokens: None if there is none.
        low: None if it may be below the shortest length.
        high: None if nothing bounds it.
        extrapolated: It lies beyond the longest length.
        always: It is faster at every length, which is why there is no crossover.
    """

    label: str
    against: str
    lengths: tuple[int, ...]
    tokens: float | None = None
    low: float | None = None
    high: float | None = None
    extrapolated: bool = False
    always: bool = False


def crossovers(all_curves: Sequence[Curve], against: str = YARDSTICK) -> list[Crossover]:
    """Every curve of times against that of one backend under the same setting, found or not."""
    compared = (
        crossover(curve, other)
        for curve in all_curves
        if curve.backend not in (against, CEILING)
        and (other := partner(curve, all_curves, against)) is not None
    )
    return [found for found in compared if found is not None]


def crossover(curve: Curve, other: Curve) -> Crossover | None:
    """Where one curve of times falls below another; None where they share fewer than two lengths."""
    pairs = [(own, its) for own in curve.measured if (its := other.at(own.tokens)) is not None]
    if len(pairs) < 2:
        return None
    looked = Crossover(curve.label, other.backend, tuple(own.tokens for own, _ in pairs))
    tokens = np.asarray(looked.lengths, dtype=float)
    lags = np.asarray([(own.value or 0.0) - (its.value or 0.0) for own, its in pairs]) / tokens
    best, furthest = float(_crossings(tokens, lags)), FURTHEST * tokens[-1]
    if not tokens[0] <= best <= furthest:
        return looked._replace(always=bool((lags < 0).all()))
    drawn = np.stack(
        [
            _medians(own.record.times_s, own.tokens, _SEED)
            - _medians(its.record.times_s, its.tokens, _SEED + 1)
            for own, its in pairs
        ],
        axis=1,
    )
    crossings = _crossings(tokens, drawn / tokens)
    # Of two crossings one is taken, not their mean: some lie at infinity.
    low, high = np.percentile(crossings, _OUTSIDE, method="nearest")
    return looked._replace(
        tokens=best,
        low=float(low) if low >= tokens[0] else None,
        high=float(high) if high <= furthest else None,
        extrapolated=bool(best > tokens[-1]),
    )


# The yardstick's serve for every backend, and all of them for sentences and for tables.
@cache
def _medians(times_s: tuple[float, ...], tokens: int, seed: int) -> np.ndarray:
    """The medians of samples drawn again: [resamples]."""
    generator = np.random.default_rng([seed, tokens])
    drawn = generator.choice(np.asarray(times_s), size=(_RESAMPLES, len(times_s)))
    return np.asarray(np.median(drawn, axis=1))


def _crossings(tokens: np.ndarray, lags: np.ndarray) -> np.ndarray:
    """Where lags [..., lengths] fall through 0 for the last time; ∓∞ if before or never."""
    slower = lags > 0
    last = lags.shape[-1] - 1 - slower[..., ::-1].argmax(axis=-1)
    start = np.minimum(last, lags.shape[-1] - 2)
    here, there = (np.take_along_axis(lags, at[..., None], axis=-1)[..., 0] for at in (start, start + 1))
    falls = here > there
    shares = here / np.where(falls, here - there, 1.0)
    crossed = np.where(falls, tokens[start] + (tokens[start + 1] - tokens[start]) * shares, np.inf)
    return np.where(slower.any(axis=-1), crossed, -np.inf)
