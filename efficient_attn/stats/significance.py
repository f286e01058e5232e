"""Significance of differences between timings with correlated calls.

Calls of one round share a state of the machine, so that n calls may carry hardly more information than one.
The correlation differs between cases, and a handful of rounds cannot show that calls are independent.
Therefore each round counts once, by the interquartile mean of its calls: rounds are separated in time by all
other cases, and their scatter includes every effect common to their calls.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Tail probability on either side of a 95 % interval.
OUTSIDE = 0.025

# Widest interval of a logarithm; beyond, the ratio leaves the range of floats.
WIDEST = 100.0

# Significance level of the test for unequal noise.
_UNEQUAL = 0.05

# Fewest pairs of successive rounds, over all cases, that can show a correlation; level of its test.
_FEWEST_STEPS, _ALIKE = 20, 0.2
_CORRELATIONS = np.linspace(0.0, 0.98, 99)

# Degrees of freedom above which Student's t is treated as normal.
_NORMAL = 1e3


def interquartile_means(samples: Floats, sizes: Sequence[int] | NDArray[np.int64]) -> Floats:
    """Mean of the middle half of each round [nonempty rounds].

    Up to a quarter of the calls may be outliers. For normal noise its precision relative to the mean is 0.84
    to 0.9; that of a median of five or more is 0.64 to 0.77.

    Args:
        samples: Samples of all rounds, one round after another.
        sizes: Number of samples in each round.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    starts, means = np.cumsum(sizes) - sizes, np.empty(len(sizes))
    # Rounds of one size together: 10 000 rounds take no longer than their samples.
    for size in np.unique(sizes[sizes > 0]).tolist():
        same = sizes == size
        rounds = np.sort(samples[starts[same, None] + np.arange(size)], axis=1)
        means[same] = rounds[:, size // 4 : size - size // 4].mean(axis=1)
    return means[sizes > 0]


def noise_ratio(pairs: Sequence[tuple[Floats, Floats]]) -> float:
    """Ratio of variances, new over old; 1 if not significant.

    Background load differs between runs, but affects all cases alike. The test is Student's, over cases, of
    the logarithm of the ratio.
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
    """Difference of means in standard errors, the standard error, and the degrees of freedom.

    Student's t; `new` has `ratio` times the variance of `old`.
    """
    freedom = float(len(old) + len(new) - 2)
    squares = ((old - old.mean()) ** 2).sum() + ((new - new.mean()) ** 2).sum() / ratio
    error = math.sqrt(squares / freedom * (1 / len(old) + ratio / len(new)))
    difference = float(new.mean() - old.mean())
    return _in_errors(difference, error), error, freedom


def _in_errors(difference: float, error: float) -> float:
    if error > 0:
        return difference / error
    return math.copysign(math.inf, difference) if difference else 0.0


def two_sample_statistic(old: Floats, new: Floats, *, least: float = 0.0) -> tuple[float, float, float]:
    """Difference of means in standard errors, the standard error, and the degrees of freedom.

    Welch's t (1947), with unequal variances; a side with one sample takes the variance of the other side.

    Args:
        least: Lower bound on the standard deviation of either side.
    """
    difference, counts = float(new.mean() - old.mean()), (len(old), len(new))
    if max(counts) < 2:
        return 0.0, math.inf, 1.0
    longer = old if len(old) > 1 else new
    sides = [side if len(side) > 1 else longer for side in (old, new)]
    parts = [
        max(float(side.var(ddof=1)), least**2) / count for side, count in zip(sides, counts, strict=True)
    ]
    error = math.sqrt(sum(parts))
    if not error:
        freedom = max(min(counts) - 1.0, 1.0)
    elif min(counts) < 2:
        freedom = max(counts) - 1.0
    else:
        freedom = error**4 / sum(part**2 / (count - 1) for part, count in zip(parts, counts, strict=True))
    return _in_errors(difference, error), error, freedom


def correlation(series: Sequence[Floats]) -> float:
    """Correlation of successive rounds, or 0 if not significant.

    Von Neumann's ratio (1941), the mean square of successive differences over the variance, has the mean 2
    for independent normal samples, whatever their number. Student's test over series has a level of 20 %,
    since a missed correlation costs more than a spurious one; a significant one is raised by two standard
    errors. A few short series show nothing.
    """
    long = [rounds for rounds in series if len(rounds) > 2 and rounds.var() > 0]
    if sum(len(rounds) - 1 for rounds in long) < _FEWEST_STEPS or len(long) < 2:
        return 0.0
    steps = np.array([(np.diff(rounds) ** 2).sum() / 2 for rounds in long])
    squares = np.array([rounds.var() * len(rounds) for rounds in long])
    shares = 1 - steps / squares
    error = float(shares.std(ddof=1)) / math.sqrt(len(shares))
    if shares.mean() <= error * quantile(_ALIKE, len(shares) - 1):
        return 0.0
    # The mean of ratios is 0 for independent samples; for others only the ratio of means has a known value:
    # that of a first-order autoregression, by its correlation.
    count = int(np.median([len(rounds) for rounds in long]))
    seen = 1 - float(steps.sum() / squares.sum()) + 2 * error
    expected = [
        1 - (1 - value) * (count - 1) / (count - _variance_factor(count, value)) for value in _CORRELATIONS
    ]
    return float(np.interp(seen, expected, _CORRELATIONS))


def _variance_factor(count: int, value: float) -> float:
    """Variance of an autoregression's mean, over independent samples."""
    lags = np.arange(1, count)
    return 1 + 2 * float(((1 - lags / count) * value**lags).sum())


def correlated(count: int, value: float) -> tuple[float, float]:
    """Factor on a mean's standard error, and on its degrees of freedom.

    For `count` samples of a first-order autoregression, the mean varies more than for independent samples,
    and the sample variance is smaller and less certain.
    """
    if not value:
        return 1.0, 1.0
    # With C the correlations and H = I − 11ᵀ/n, the sample variance has the mean tr(HC) and twice tr(HCHC) as
    # its variance, both relative; tr(HCHC) = tr(C²) − 2/n |C1|² + (1ᵀC1)²/n².
    lags, places = np.arange(1, count), np.arange(count)
    sums = (1 + value - value ** (places + 1.0) - value ** (count - places * 1.0)) / (1 - value)
    mean = float(sums.sum()) / count
    scatter = count - mean
    squares = count + 2 * float(((count - lags) * value ** (2.0 * lags)).sum())
    freedom = scatter**2 / (squares - 2 / count * float(sums @ sums) + mean**2)
    factor = math.sqrt(_variance_factor(count, value) * (count - 1) / scatter)
    return factor, freedom / (count - 1)


def upper_tail(value: float, freedom: float) -> float:
    """Probability that Student's t exceeds `value`."""
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
    """Adjusted p-values (Holm 1979) for a familywise error rate."""
    adjusted = [0.0] * len(values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - place) * values[index]))
        adjusted[index] = largest
    return adjusted


_NODES = np.polynomial.legendre.leggauss(128)
