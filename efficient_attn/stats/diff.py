"""Comparison of runs case by case: regressions and improvements of every quantity.

A difference of a scattered quantity counts if it exceeds its threshold and is significant after correction
for the number of cases: a whole comparison of equal runs reports a regression once in a hundred times, and
an improvement as rarely. Reproducible numbers are compared exactly.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from efficient_attn.runner.quantity import KINDS, QUANTITIES
from efficient_attn.runner.record import Case, Record, replace
from efficient_attn.stats import significance
from efficient_attn.stats.change import (
    CHANGED,
    IMPROVEMENT,
    REGRESSION,
    UNCHANGED,
    UNCLEAR,
    Change,
    Test,
    compared,
)
from efficient_attn.stats.curves import Namer, namer
from efficient_attn.stats.scatter import Noise, Run, Side, records_of, seed_scatter, turn_middles

# Share of comparisons of equal runs that may report a regression, and as many an improvement.
FALSE_ALARMS = 0.01

# Trainings from several seeds are repetitions of one measurement.
_OVER_SEEDS = ("recall", "train")

# Fewest ratios from which a drift of the machine is estimated.
_FEWEST_FOR_DRIFT = 5

_Cases = Mapping[str, Side]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences between the runs of two sides.

    Attributes:
        changes: In the order of the old run.
        missing: Names of cases that only the old side has.
        added: Names of cases that only the new side has.
        drift: Median ratio of all times; None for fewer than five.
        correlation: Correlation of successive rounds that the intervals allow for.
        runs: Number of old and of new runs.
    """

    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    drift: float | None
    correlation: float = 0.0
    runs: tuple[int, int] = (1, 1)

    def of(self, verdict: str) -> tuple[Change, ...]:
        """The changes with this verdict."""
        return tuple(change for change in self.changes if change.verdict == verdict)


def names() -> tuple[str, ...]:
    """Names of --fail-on: kinds of records, then quantities."""
    return (*KINDS, *QUANTITIES)


def compare(
    old: Iterable[Record], new: Iterable[Record], *, thresholds: Mapping[str, float] | None = None
) -> Comparison:
    """Every case that two runs have, and the names of the others.

    Args:
        thresholds: By quantity or by kind of record, the relative change that matters.
    """
    return compare_runs([tuple(old)], [tuple(new)], thresholds=thresholds)


def compare_runs(
    old: Sequence[Sequence[Record]],
    new: Sequence[Sequence[Record]],
    *,
    thresholds: Mapping[str, float] | None = None,
) -> Comparison:
    """The same for several runs on a side, where a run is one sample."""
    before, after = _by_case(old), _by_case(new)
    name = namer([_case(side) for side in (*before.values(), *after.values())])
    pairs = [(before[key], after[key]) for key in before if key in after]
    noise = _noise(pairs)
    tests = [
        test for one, other in pairs for test in compared(_case(one), one, other, name(_case(one)), noise)
    ]
    changes = tuple(_decided(tests, thresholds or {}))
    ratios = [change.ratio for change in changes if change.quantity == "time_s" and change.ratio is not None]
    return Comparison(
        changes=changes,
        missing=_only_in(before, after, name),
        added=_only_in(after, before, name),
        drift=float(np.median(ratios)) if len(ratios) >= _FEWEST_FOR_DRIFT else None,
        correlation=noise.correlation,
        runs=(len(old), len(new)),
    )


def _by_case(runs: Sequence[Sequence[Record]]) -> _Cases:
    """The records of each case, run by run; labels and seeds of trainings are no part of a case here."""
    found: dict[str, list[Run]] = {}
    for records in runs:
        # The last record of equal cases counts.
        in_run: dict[str, dict[int, Record]] = {}
        for record in records:
            seed = 0 if record.case.kind in _OVER_SEEDS else record.case.seed
            key = replace(record.case, label="", seed=seed).key
            in_run.setdefault(key, {})[record.case.seed] = record
        for key, by_seed in in_run.items():
            found.setdefault(key, []).append(tuple(by_seed.values()))
    return found


def _case(side: Side) -> Case:
    """The case of a side, with the label of its first record."""
    first = side[0][0].case
    return replace(first, seed=0) if first.kind in _OVER_SEEDS else first


def _only_in(cases: _Cases, others: _Cases, name: Namer) -> tuple[str, ...]:
    alone = [_case(side) for key, side in cases.items() if key not in others]
    return tuple(f"{name(case)}, {case.tokens} tokens, {case.kind}" for case in alone)


def _noise(pairs: Sequence[tuple[Side, Side]]) -> Noise:
    """Properties of the scatter that all cases of a comparison show together."""
    seeds = {
        quantity.name: seed_scatter(quantity, (side for pair in pairs for side in pair))
        for quantity in QUANTITIES.values()
        if quantity.scatter == "seeds"
    }
    timed = [
        tuple(turn_middles(side[0][0]) for side in pair)
        for pair in pairs
        if all(len(side) == 1 and _is_timed(side) for side in pair)
    ]
    ratio = significance.noise_ratio([(old, new) for old, new in timed])
    return Noise(ratio, significance.correlation([one for pair in timed for one in pair]), seeds)


def _is_timed(side: Side) -> bool:
    return all(record.status == "ok" and record.case.kind == "time" for record in records_of(side))


def _decided(tests: Sequence[Test], thresholds: Mapping[str, float]) -> Iterator[Change]:
    """The changes with their verdicts; all tests of one direction are adjusted together."""
    more = iter(significance.holm([test.more for test in tests if test.more is not None]))
    less = iter(significance.holm([test.less for test in tests if test.less is not None]))
    for test in tests:
        p = (None, None) if test.more is None else (next(more), next(less))
        yield test.change if test.rounding else _judged(test.change, thresholds, *p)


def _judged(
    change: Change, thresholds: Mapping[str, float], more: float | None, less: float | None
) -> Change:
    if change.verdict != UNCHANGED or change.old is None or change.new is None:
        return change
    quantity = QUANTITIES[change.quantity]
    threshold = thresholds.get(quantity.name, thresholds.get(change.kind, quantity.threshold))
    p = more if change.new >= change.old else less
    grew = change.new > change.old * (1 + threshold)
    if not grew and not change.old > change.new * (1 + threshold):
        return replace(change, p=p, remark=None)
    if quantity.better is None:
        return replace(change, verdict=CHANGED)
    # A number whose repetitions nobody kept decides where it was asked for.
    untested = p is None and change.over is not None
    asked = quantity.scatter == "draws" and quantity.name in thresholds
    if (untested and not asked) or (p is not None and p > FALSE_ALARMS):
        return replace(change, p=p, verdict=UNCLEAR)
    return replace(change, p=p, verdict=REGRESSION if grew == (quantity.better == "less") else IMPROVEMENT)
