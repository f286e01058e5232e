"""Speeds within one run, which measures rounds until each is decided.

A run looks at its speeds after 4, 8, 16 and 32 rounds. The interval of a speed has a level of 1 − 0.05/4 at
each look, so that all four together hold the truth as often as one of 95 % (Bonferroni). A speed is decided
at the first look at which it is faster, slower or the same within 10 %, keeps the interval of that look, and
is measured no further.

The interval is Student's for the mean of the logarithms over rounds:

    t_{n−1} √(A / B) s / √n,   A = 1 + 2 Σ_k (1 − k/n) ρ^k,   B = (n − A) / (n − 1)

One round among four must not decide: rounds further than three standard deviations from the median count as
three. The deviation is 1.48 times the median absolute deviation, of the series or of the run, the larger.

Four rounds show no correlation ρ of neighbouring rounds, but all series of a run together do. Under a
first-order autoregression the deviations d from the mean of n rounds have expectations with
E Σ d_t d_{t+1} = R(ρ, n) E Σ d_t²; the pooled estimate solves Σ (Σ d_t d_{t+1} − R(ρ, n) Σ d_t²) = 0 over all
series. One standard error is added, by the jackknife over baselines. Coverage: results/simulations.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from efficient_attn.measure.clock import LOOKS
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import is_yardstick
from efficient_attn.stats import estimates
from efficient_attn.stats.estimates import CORRELATION, FEWEST_ROUNDS, OPEN, WIDEST, Curve, Floats, Typical

_TAIL = estimates.OUTSIDE / len(LOOKS)

# Standard deviations that a round counts at most, in an interval and in the correlation.
_FARTHEST, _FARTHEST_LAGGED = 3.0, 1.5

# Standard deviation of Gaussian samples over their median absolute deviation.
_GAUSSIAN = 1.4826

# Series from which the correlation is estimated; with fewer it is CORRELATION.
_FEWEST_SERIES = 20

_CORRELATIONS = np.linspace(0.0, 0.8, 81)


class SpeedUp(NamedTuple):
    """Speed-ups of a backend over exact attention in the same setting.

    Attributes:
        case: Case of the backend at the longest common length.
        last: Speed-up at that length.
        ratios: Speed-up at every common length, above 1 if the backend is faster.
    """

    label: str
    case: Case
    last: Typical
    ratios: Mapping[int, Typical]


def speed_ups(all_curves: Sequence[Curve]) -> list[SpeedUp]:
    """Speed-ups of all curves of times over exact attention in the same setting."""
    pairs = _pairs(all_curves)
    compared: dict[str, dict[int, Typical]] = {}
    for (label, tokens), ratio in zip(pairs, decided([*pairs.values()]), strict=True):
        compared.setdefault(label, {})[tokens] = ratio
    return [
        SpeedUp(label, pairs[label, max(ratios)][0].case, ratios[max(ratios)], ratios)
        for label, ratios in compared.items()
    ]


def open_cases(records: Sequence[Record]) -> set[str]:
    """Keys of the cases, baselines too, whose speeds a look has left open."""
    left: set[str] = set()
    for group in estimates.grouped(records, "of", "layers"):
        pairs = [*_pairs(estimates.curves(group, "time_s")).values()]
        for pair, ratio in zip(pairs, decided(pairs), strict=True):
            looked = ratio.samples >= FEWEST_ROUNDS
            left |= {record.case.key for record in pair if looked and ratio.outcome == OPEN}
    return left


def _pairs(all_curves: Sequence[Curve]) -> dict[tuple[str, int], tuple[Record, Record]]:
    """Times of each backend and of exact attention in the same setting, by label and length."""
    # The label names the execution.
    fields = (*estimates.MAY_DIFFER, "execution")
    cases = {curve.label: curve.points[0].record.case for curve in all_curves}
    settings = {label: tuple(getattr(case, field) for field in fields) for label, case in cases.items()}
    pairs: dict[tuple[str, int], tuple[Record, Record]] = {}
    for curve in all_curves:
        exact = [
            match
            for match in all_curves
            if is_yardstick(cases[match.label]) and settings[match.label] == settings[curve.label]
        ]
        if len(exact) != 1 or exact[0] is curve:
            continue
        baseline = {point.tokens: point.record for point in exact[0].measured}
        for point in curve.measured:
            if point.tokens in baseline:
                pairs[curve.label, point.tokens] = point.record, baseline[point.tokens]
    return pairs


def decided(pairs: Sequence[tuple[Record, Record]]) -> list[Typical]:
    """Speed-ups of all pairs (record, baseline) of a run, each at the look that decides it, or the last."""
    logs = [np.log(estimates.round_ratios(*pair)) for pair in pairs]
    medians = [estimates.time_ratio(*pair).median for pair in pairs]
    # Without known rounds all calls are one.
    ratios = [Typical(x, None, None, len(rounds) or 1) for x, rounds in zip(medians, logs, strict=True)]
    baselines = [baseline.case.key for _, baseline in pairs]
    for look in LOOKS:
        seen = [n for n, rounds in enumerate(logs) if len(rounds) >= FEWEST_ROUNDS]
        due = [n for n in seen if len(logs[n]) >= look and ratios[n].outcome == OPEN]
        if not due:
            break
        rounds = {n: logs[n][:look] for n in seen}
        usual = float(np.median([_deviation(series) for series in rounds.values()]))
        correlation = _correlation(rounds.values(), [baselines[n] for n in seen], usual)
        for n in due:
            ratios[n] = _at_look(rounds[n], correlation, usual)
    return ratios


def _at_look(rounds: Floats, correlation: float, usual: float) -> Typical:
    bounded = _bounded(rounds, _FARTHEST, usual)
    half = min(estimates.half_width(bounded, correlation, _TAIL), WIDEST)
    centre, mean = float(np.median(rounds)), float(bounded.mean())
    low, high = min(mean - half, centre), max(mean + half, centre)
    return Typical(math.exp(centre), math.exp(low), math.exp(high), len(rounds))


def _deviation(rounds: Floats) -> float:
    """Standard deviation of Gaussian rounds with the same median absolute deviation."""
    return _GAUSSIAN * float(np.median(np.abs(rounds - np.median(rounds))))


def _bounded(rounds: Floats, farthest: float, usual: float) -> Floats:
    """Rounds, moved to at most so many deviations from their median."""
    centre, reach = np.median(rounds), farthest * max(_deviation(rounds), usual)
    # Most rounds of a coarse clock are equal.
    return np.clip(rounds, centre - reach, centre + reach) if reach else rounds


def _correlation(series: Iterable[Floats], baselines: Sequence[Hashable], usual: float) -> float:
    """Pooled correlation of neighbouring rounds, one standard error added."""
    if len(baselines) < _FEWEST_SERIES:
        return CORRELATION
    # Left side of the estimating equation at every possible correlation, by baseline.
    parts: dict[Hashable, Floats] = dict.fromkeys(baselines, np.zeros(len(_CORRELATIONS)))
    for rounds, baseline in zip(series, baselines, strict=True):
        bounded = _bounded(rounds, _FARTHEST_LAGGED, usual)
        d = bounded - bounded.mean()
        parts[baseline] = parts[baseline] + d[1:] @ d[:-1] - (d @ d) * _expected(len(d))
    whole = np.sum([*parts.values()], axis=0)
    left_out = np.array([_root(whole - part) for part in parts.values()])
    error = math.sqrt((len(parts) - 1) * float(left_out.var()))
    return min(_root(whole) + error, float(_CORRELATIONS[-1]))


@cache
def _expected(count: int) -> Floats:
    """R(ρ, n) at every possible correlation: expected Σ d_t d_{t+1} over expected Σ d_t²."""
    lags = np.abs(np.subtract.outer(np.arange(count), np.arange(count)))
    centred = np.eye(count) - 1 / count
    covariances = [centred @ value**lags @ centred for value in _CORRELATIONS]
    return np.array([np.trace(matrix, offset=1) / np.trace(matrix) for matrix in covariances])


def _root(equation: Floats) -> float:
    """The first correlation at which the falling left side is not positive."""
    below = np.flatnonzero(equation <= 0)
    return float(_CORRELATIONS[below[0] if len(below) else -1])
