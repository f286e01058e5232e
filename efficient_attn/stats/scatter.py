"""Samples of a case in two runs, and the test for their scatter.

A sample is a repetition that differs by chance alone: a round of timed calls, a draw of random features, a
training seed, or, if one side has several runs, a run.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from efficient_attn.measure.quantities import QUANTITIES, Quantity
from efficient_attn.measure.record import Record
from efficient_attn.stats import significance

# The records of one case in one run, several if seeds are repetitions; and the records of all runs of a side.
Run = Sequence[Record]
Side = Sequence[Run]

# Bounds beyond which ratios and their intervals leave the range of floats.
_SMALLEST, _LARGEST = 1e-100, 1e100

# More rounds than this are averaged in as many blocks.
_MOST_ROUNDS = 64


class Noise(NamedTuple):
    """Noise parameters that all cases of a comparison share.

    Attributes:
        ratio: Variance of the new run's times over the variance of the old run's.
        correlation: Correlation of successive rounds.
        seeds: Standard deviation over seeds, by quantity.
    """

    ratio: float = 1.0
    correlation: float = 0.0
    seeds: Mapping[str, float] = MappingProxyType({})


class Tested(NamedTuple):
    """Values of both sides, with p-values of their difference.

    Attributes:
        half_width: Half-width of the 95 % interval of the ratio's logarithm; None: no interval.
        increase: One-sided p-value of an increase; `decrease` of a decrease; None: no test.
        over: Unit of the test: `rounds`, `runs`, `draws` or `seeds`; None: no repetitions.
    """

    old: float
    new: float
    half_width: float | None = None
    increase: float | None = None
    decrease: float | None = None
    over: str | None = None


def records_of(side: Side) -> list[Record]:
    return [record for run in side for record in run]


def numbers(values: Iterable[float | None]) -> list[float]:
    """Values within the range of measurements."""
    return [
        float(value) for value in values if value is not None and (value == 0 or _SMALLEST < value < _LARGEST)
    ]


def times(samples: Iterable[float | None]) -> list[float]:
    """The positive samples."""
    return [time_s for time_s in numbers(samples) if time_s > 0]


def round_means(record: Record, field: str = "times_s") -> significance.Floats:
    """Interquartile mean of the logarithms of each round of timed calls [rounds]."""
    samples = np.array(getattr(record, field) or (), dtype=float)
    sizes = record.round_sizes or ()
    valid = sizes and all(type(size) is int and size >= 0 for size in sizes)
    if not valid or sum(sizes) != len(samples):
        # Without valid sizes all samples count as a single round.
        sizes = (len(samples),)
    usable = (samples > _SMALLEST) & (samples < _LARGEST)
    counts = np.bincount(np.repeat(np.arange(len(sizes)), sizes)[usable], minlength=len(sizes))
    means = significance.interquartile_means(np.log(samples[usable]), counts)
    if len(means) <= _MOST_ROUNDS:
        return means
    return np.array([block.mean() for block in np.array_split(means, _MOST_ROUNDS)])


def tested(quantity: Quantity, old: Side, new: Side, noise: Noise) -> Tested | None:
    """Test that fits the scatter of a quantity; None without usable numbers."""
    if quantity.scatter == "rounds":
        return _times_tested(quantity, old, new, noise)
    return _values_tested(quantity, old, new, noise)


def _times_tested(quantity: Quantity, old: Side, new: Side, noise: Noise) -> Tested | None:
    """Student's test of log times over rounds, seeds or runs."""
    sides = [[_rounds_of_run(run, quantity) for run in side] for side in (old, new)]
    sides = [[rounds for rounds in side if rounds] for side in sides]
    if not all(sides):
        return None
    over = "runs"
    before, after = (np.array([np.mean([rounds.mean() for rounds in run]) for run in side]) for side in sides)
    if max(map(len, sides)) == 1:
        over = "seeds"
        before, after = (np.array([rounds.mean() for rounds in run]) for (run,) in sides)
        if max(len(before), len(after)) == 1:
            over = "rounds"
            before, after = (run[0] for (run,) in sides)
    values = math.exp(before.mean()), math.exp(after.mean())
    if over != "rounds":
        return _with_p_values(values, significance.two_sample_statistic(before, after), over)
    fewest = min(len(before), len(after))
    if fewest < 2:
        return Tested(*values, over=over)
    statistic, error, freedom = significance.student_statistic(before, after, noise.ratio)
    inflation, share = significance.correlated(fewest, noise.correlation)
    return _with_p_values(values, (statistic / inflation, error * inflation, freedom * share), over)


def _rounds_of_run(run: Run, quantity: Quantity) -> list[significance.Floats]:
    """Logarithms of times in each round, for each record of a run."""
    if run[0].case.kind == "recall":
        # Consecutive steps of a training share the state of the machine and count as one round.
        steps = [np.log(times(record.times_s or ())) for record in run]
        return [significance.interquartile_means(logs, [len(logs)]) for logs in steps if len(logs)]
    rounds = [round_means(record, quantity.samples or quantity.field) for record in run]
    return [means for means in rounds if len(means)]


def _values_tested(quantity: Quantity, old: Side, new: Side, noise: Noise) -> Tested | None:
    """Test of means over draws, seeds or runs; compare single values directly."""
    sides = [[units for run in side if (units := _repetitions(quantity, run))] for side in (old, new)]
    if not all(sides):
        return None
    # Means over runs of each repetition, or the means of unequal runs.
    before, after = (
        np.array([np.mean(run) for run in side])
        if len({len(run) for run in side}) > 1
        else np.array(np.mean(side, axis=0))
        for side in sides
    )
    values = float(before.mean()), float(after.mean())
    if all(run == sides[0][0] for side in sides for run in side):
        return Tested(*values, 0.0)
    least = min(values) or 1.0
    over = "seeds" if max(len(run) for side in (old, new) for run in side) > 1 else quantity.scatter
    tests: list[Tested] = []
    if over is not None and quantity.scatter is not None and min(len(before), len(after)) > 1:
        least_scatter = noise.seeds.get(quantity.name, 0.0) if over == "seeds" else 0.0
        statistic = significance.two_sample_statistic(before, after, least=least_scatter)
        tests.append(_with_p_values(values, statistic, over, least=least))
    means = [np.array([np.mean(run) for run in side]) for side in sides]
    if any(len(set(side)) > 1 for side in means):
        statistic = significance.two_sample_statistic(*means)
        tests.append(_with_p_values(values, statistic, "runs", least=least))
    if tests:
        # Both tests must be significant: over draws, and over runs.
        return max(tests, key=lambda test: min(test.increase or 0.0, test.decrease or 0.0))
    # The mean of draws of which no record keeps the values may differ by chance.
    if quantity.scatter == "draws" and quantity.samples is None and _several_draws(old, new):
        return Tested(*values, over="draws")
    return Tested(*values)


def _repetitions(quantity: Quantity, run: Run) -> list[float]:
    """Values of a run per seed, or per draw of its only seed."""
    values = [samples for record in run if (samples := _samples(quantity, record))]
    return [float(np.mean(samples)) for samples in values] if len(run) > 1 else (values or [[]])[0]


def _samples(quantity: Quantity, record: Record) -> list[float]:
    """Values of a record."""
    value = getattr(record, quantity.field)
    # Samples without a mean are invalid.
    if not numbers([value]):
        return []
    raw = getattr(record, quantity.samples or "", None) or ()
    samples = numbers(raw)
    return _by_seed(record, samples) if raw and len(samples) == len(raw) else numbers([value])


def _by_seed(record: Record, draws: list[float]) -> list[float]:
    """Means over texts: draws of a model are listed text by text."""
    texts = record.texts or 1 if record.case.kind == "swap" else 1
    if len(draws) % texts:
        return draws
    return [float(mean) for mean in np.reshape(draws, (texts, -1)).mean(axis=0)]


def _several_draws(old: Side, new: Side) -> bool:
    fields = [quantity.samples for quantity in QUANTITIES.values() if quantity.scatter == "draws"]
    return any(
        len(_by_seed(record, numbers(getattr(record, field) or ()))) > 1
        for record in records_of((*old, *new))
        for field in filter(None, fields)
    )


def seed_scatter(quantity: Quantity, sides: Iterable[Side]) -> float:
    """Standard deviation over seeds, pooled over all cases."""
    squares, freedom = 0.0, 0
    for side in sides:
        for run in side:
            if len(run) > 1 and len(values := _repetitions(quantity, run)) > 1:
                squares += float(np.var(values)) * len(values)
                freedom += len(values) - 1
    return math.sqrt(squares / freedom) if freedom else 0.0


def _with_p_values(
    values: tuple[float, float], test: tuple[float, float, float], over: str, *, least: float = 1.0
) -> Tested:
    """Test of a difference of logarithms, or of values from `least` on."""
    statistic, error, freedom = test
    half_width = error / least * significance.quantile(significance.OUTSIDE, freedom)
    increase, decrease = (significance.upper_tail(sign * statistic, freedom) for sign in (1, -1))
    return Tested(*values, half_width, increase, decrease, over)
