"""How sure it is that two sets of timings differ, where neighbouring calls are alike.

Calls of one turn share a state of the machine, so n calls tell less than n independent ones. How much less is
estimated by the Kruskal–Wallis statistic of the four quarters of a run: divided by its degrees of freedom it
is 1 for independent calls and about the number of calls in a quarter where these are copies of each other.
One case says little about it, so all cases of a comparison are taken together, as Smyth 2004 ("Linear models
and empirical Bayes methods") does for variances: the less they differ in it, the more each learns from all.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# A benchmark takes every time in four turns; what was taken in more is cut into four all the same.
QUARTERS = 4

# A statistic of nearly 0 would rule the mean of logarithms.
_LEAST = 0.05

# By how many standard errors the cases have to differ before they are believed to.
_DOUBT = 2.0

# More degrees of freedom than this are a normal distribution.
_NORMAL = 1e3


class Prior(NamedTuple):
    """What all cases tell about one: its inflation, worth so many degrees of freedom."""

    inflation: float
    freedom: float


def rank_statistic(old: Sequence[float], new: Sequence[float]) -> float:
    """Mann–Whitney's U in standard deviations, with ties and continuity; positive where `new` is larger."""
    count_old, count_new = len(old), len(new)
    ranks, ties = _ranks(np.concatenate([old, new]))
    excess = ranks[count_old:].sum() - count_new * (count_old + count_new + 1) / 2
    total = count_old + count_new
    variance = count_old * count_new / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:
        return 0.0
    return float(np.sign(excess) * max(abs(excess) - 0.5, 0) / math.sqrt(variance))


def inflation(samples: Sequence[float]) -> float:
    """How many times more the quarters of a run differ than those of independent calls would.

    It has QUARTERS − 1 degrees of freedom.
    """
    count = len(samples)
    ranks, ties = _ranks(np.asarray(samples, dtype=float))
    variance = count * (count + 1) / 12 * (1 - ties / (count**3 - count))
    quarters = np.array_split(ranks, QUARTERS)
    between = sum(len(part) * (part.mean() - (count + 1) / 2) ** 2 for part in quarters)
    return float(between / variance / (QUARTERS - 1)) if variance > 0 else 1.0


def prior(inflations: Sequence[float], freedom: int) -> Prior:
    """Inflation and degrees of freedom of the F-like law that the cases' inflations are drawn from.

    The logarithm of an estimate with f degrees of freedom has mean ψ(f/2) − log(f/2) and variance ψ'(f/2)
    around its own; what it varies more is how the cases differ.
    """
    if len(inflations) < 2:
        return Prior(1.0, 0.0)
    logs = np.log(np.maximum(inflations, _LEAST)) - _digamma(freedom / 2) + math.log(freedom / 2)
    chance = _trigamma(freedom / 2)
    more = float(logs.var(ddof=1)) - chance
    # The standard error of a variance, were there nothing but chance.
    if more <= _DOUBT * math.sqrt((_third_of_digamma(freedom / 2) + 2 * chance**2) / len(logs)):
        return Prior(float(np.exp(logs.mean())), math.inf)
    half = _inverse_trigamma(more)
    return Prior(float(np.exp(logs.mean() + _digamma(half) - math.log(half))), 2 * half)


def moderated(own: float, freedom: int, known: Prior) -> tuple[float, float]:
    """The inflation of one case in the light of all, at least 1, and its degrees of freedom."""
    if math.isinf(known.freedom):
        return max(1.0, known.inflation), math.inf
    total = freedom + known.freedom
    mixed = (freedom * own + known.freedom * known.inflation) / total
    # Where the cases differ so much that one tells more of itself than all others do, they may not excuse it.
    return max(1.0, mixed, own if known.freedom < freedom else 0.0), total


def quarter_medians(samples: Sequence[float]) -> Floats:
    """Logarithms of the medians of up to four consecutive parts."""
    parts = np.array_split(np.asarray(samples, dtype=float), min(QUARTERS, len(samples)))
    return np.log([np.median(part) for part in parts])


def student_statistic(old: Floats, new: Floats) -> tuple[float, float, float]:
    """Difference of means in standard errors (equal variances), one standard error, degrees of freedom."""
    freedom = float(len(old) + len(new) - 2)
    squares = ((old - old.mean()) ** 2).sum() + ((new - new.mean()) ** 2).sum()
    error = math.sqrt(squares / freedom * (1 / len(old) + 1 / len(new)))
    difference = float(new.mean() - old.mean())
    if error > 0:
        return difference / error, error, freedom
    return (math.copysign(math.inf, difference) if difference else 0.0), 0.0, freedom


def welch_statistic(old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    """Difference of means in standard errors and its degrees of freedom, variances unequal (Welch 1947)."""
    one, other = (float(np.var(samples, ddof=1)) / len(samples) for samples in (old, new))
    difference = float(np.mean(new) - np.mean(old))
    if not one + other:
        return (math.copysign(math.inf, difference) if difference else 0.0), 1.0
    freedom = (one + other) ** 2 / (one**2 / (len(old) - 1) + other**2 / (len(new) - 1))
    return difference / math.sqrt(one + other), freedom


def upper_tail(value: float, freedom: float) -> float:
    """Probability that Student's t is larger than `value`."""
    if value < 0:
        return 1 - upper_tail(-value, freedom)
    if freedom > _NORMAL:
        return math.erfc(value / math.sqrt(2)) / 2
    # With t = √f tan θ the density is proportional to cos^(f−1) θ, on a bounded interval.
    log_norm = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    start = math.atan(value / math.sqrt(freedom))
    nodes, weights = _NODES
    angles = start + (math.pi / 2 - start) * (nodes + 1) / 2
    heights = np.exp(log_norm + (freedom - 1) * np.log(np.cos(angles)))
    return float(heights @ weights) * (math.pi / 2 - start) / 2


@functools.cache
def quantile(tail: float, freedom: float) -> float:
    """The value that Student's t exceeds with probability `tail`, by bisection."""
    low, high = 0.0, 1.0
    while upper_tail(high, freedom) > tail:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if upper_tail(middle, freedom) > tail else (low, middle)
    return high


def holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted so that all those under α hold together with probability 1 − α (Holm 1979)."""
    adjusted = [0.0] * len(values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - place) * values[index]))
        adjusted[index] = largest
    return adjusted


_NODES = np.polynomial.legendre.leggauss(128)


def _ranks(samples: Floats) -> tuple[Floats, float]:
    """Ranks from 1, equal samples sharing theirs; and the sum of t³ − t over groups of t equal ones."""
    _, place, counts = np.unique(samples, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place], float((counts.astype(float) ** 3 - counts).sum())


def _digamma(x: float) -> float:
    """ψ(x) = ψ(x + 1) − 1/x, up to where the asymptotic series holds."""
    if x < 10:
        return _digamma(x + 1) - 1 / x
    return math.log(x) - 1 / (2 * x) - 1 / (12 * x**2) + 1 / (120 * x**4) - 1 / (252 * x**6)


def _trigamma(x: float) -> float:
    """ψ'(x) = ψ'(x + 1) + 1/x², up to where the asymptotic series holds."""
    if x < 10:
        return _trigamma(x + 1) + 1 / x**2
    return 1 / x + 1 / (2 * x**2) + 1 / (6 * x**3) - 1 / (30 * x**5) + 1 / (42 * x**7)


def _third_of_digamma(x: float) -> float:
    """ψ‴(x) = ψ‴(x + 1) + 6/x⁴, up to where the asymptotic series holds."""
    if x < 10:
        return _third_of_digamma(x + 1) + 6 / x**4
    return 2 / x**3 + 3 / x**4 + 2 / x**5 - 1 / x**7


def _inverse_trigamma(value: float) -> float:
    """x with ψ'(x) = value, by bisection of logarithms: ψ' falls."""
    low, high = 1e-3, _NORMAL
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _trigamma(middle) > value else (low, middle)
    return high
