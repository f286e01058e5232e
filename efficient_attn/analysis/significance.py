"""How sure it is that two sets of timings differ, where calls of one turn are alike.

Calls of one turn share a state of the machine, so that n of them may tell hardly more than one. How alike
they are differs from case to case, and a handful of turns cannot show that calls are independent. So every
turn counts once, by the middle of its calls: turns lie apart in time, with all other cases between them.
Whatever calls have in common, the turns' own scatter contains it.
"""

import functools
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Records that do not tell their turns are cut into so many.
QUARTERS = 4

# In comparisons of equally noisy runs so many are taken for unequally noisy.
_UNEQUAL = 0.05

# More degrees of freedom than this are a normal distribution.
_NORMAL = 1e3


def turns(samples: Sequence[float | None], sizes: Sequence[int] | None) -> list[Sequence[float | None]]:
    """The samples of each turn; four equal parts where turns are not known, or are only one."""
    known = sizes is not None and len(sizes) > 1 and all(type(size) is int and size >= 0 for size in sizes)
    if not known or sizes is None or sum(sizes) != len(samples):
        parts = min(QUARTERS, len(samples))
        sizes = [len(samples) // parts + (part < len(samples) % parts) for part in range(parts)]
    ends = np.cumsum([0, *sizes]).tolist()
    return [samples[start:end] for start, end in pairwise(ends) if end > start]


def interquartile_mean(samples: Sequence[float]) -> float:
    """Mean of what is left without the lowest and the highest quarter.

    A quarter of the calls may be disturbed, as with the median of a few; for normal noise it has 0.84 to 0.9
    of the precision of the mean, the median of five calls or more 0.64 to 0.77.
    """
    quarter = len(samples) // 4
    middle = sorted(samples)[quarter : len(samples) - quarter]
    return math.fsum(middle) / len(middle)


def noise_ratio(pairs: Sequence[tuple[Floats, Floats]]) -> float:
    """Variance of new over variance of old, on which all cases agree; 1 if it cannot be told from 1.

    A machine is busier in one run than in the other, for all cases alike. Student's test over cases of the
    logarithm of the two variances decides.
    """
    variances = [
        (float(old.var(ddof=1)), float(new.var(ddof=1)))
        for old, new in pairs
        if len(old) == len(new) and len(old) > 1
    ]
    logs = np.array([math.log(after / before) for before, after in variances if before > 0 < after])
    if len(logs) < 2:
        return 1.0
    least = quantile(_UNEQUAL / 2, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
    return math.exp(logs.mean()) if abs(logs.mean()) > least else 1.0


def student_statistic(old: Floats, new: Floats, ratio: float = 1.0) -> tuple[float, float, float]:
    """Difference of means in standard errors, one standard error, degrees of freedom.

    Student's t; `new` has `ratio` times the variance of `old`.
    """
    freedom = float(len(old) + len(new) - 2)
    squares = ((old - old.mean()) ** 2).sum() + ((new - new.mean()) ** 2).sum() / ratio
    error = math.sqrt(squares / freedom * (1 / len(old) + ratio / len(new)))
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
