"""Two runs compared case by case: what became slower, larger, less accurate, or stopped working.

A difference of times or errors counts if it is large enough to matter and too large to be chance, in the
light of how many cases are looked at: a whole comparison of equal runs is meant to see a regression once in a
hundred times, and an improvement as rarely. Bytes do not scatter and are compared as they are.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from efficient_attn.analysis import significance
from efficient_attn.analysis.curves import Namer, namer
from efficient_attn.sweep.records import SCHEMA, Case, Record

REGRESSION, IMPROVEMENT, UNCHANGED = "regression", "improvement", "unchanged"
UNCLEAR, UNCOMPARABLE = "unclear", "not comparable"

# How much more counts, as a share of the old value.
THRESHOLDS: Mapping[str, float] = {"time": 0.05, "memory": 0.0, "error": 0.05, "recall": 0.0, "count": 0.0}

# Of comparisons of equal runs so many may see a regression anywhere, and so many an improvement.
FALSE_ALARMS = 0.01

# Of an interval around a ratio, on either side.
_OUTSIDE = 0.025

# With fewer samples complete separation would not convince a rank test among a thousand others.
_FEWEST_FOR_RANKS = 16

# How two tests of one difference share what may go wrong.
_LEVEL_OF_RANKS, _LEVEL_OF_QUARTERS = 0.9, 0.1

# What does not scatter, by kind.
_EXACT = {
    "memory": ("peak_bytes", "parameter_bytes", "state_bytes"),
    "count": ("flops", "sequential_operations", "path_length"),
}
_ERRORS = ("output_relative_error", "output_mse", "weights_relative_error", "kernel_mse")

# What describes a measurement no further: how it is called, how its file is written.
_NO_PART_OF_IT: Mapping[str, Any] = {"label": "", "schema": SCHEMA}

# An inflation is taken from the quarters of two runs.
_FREEDOM = 2 * (significance.QUARTERS - 1)

# Fewer ratios say nothing of the machine.
_FEWEST_FOR_DRIFT = 5

# Beyond these, ratios and their intervals leave the range of floats.
_SMALLEST, _LARGEST, _WIDEST = 1e-100, 1e100, 100.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """One quantity of one case in both runs.

    Attributes:
        name: The label, and whatever else tells the cases of these runs apart beside tokens.
        quantity: `time_s`, `peak_bytes`, … or `status`.
        old: Median of times, mean of errors; None where there is no number.
        ratio: New over old, with an interval that holds with 95 %.
        p: Probability of so large a difference by chance, in the direction seen, in the light of all cases.
        verdict: `regression`, `improvement`, `unchanged`, `unclear` or `not comparable`.
        remark: What the numbers do not say.
    """

    name: str
    kind: str
    tokens: int
    quantity: str
    old: float | None = None
    new: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    verdict: str = UNCHANGED
    remark: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two runs differ in.

    Attributes:
        changes: In the order of the old run.
        missing: Names of cases that only the old run has.
        added: Names of cases that only the new run has.
        drift: Median ratio of all times; None for fewer than five.
    """

    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    drift: float | None

    def of(self, verdict: str) -> tuple[Change, ...]:
        """The changes with this verdict."""
        return tuple(change for change in self.changes if change.verdict == verdict)


class _Test(NamedTuple):
    """A change, and how likely so much more, and so much less, is by chance; None where nothing is."""

    change: Change
    more: float | None = None
    less: float | None = None


def compare(
    old: Iterable[Record], new: Iterable[Record], *, thresholds: Mapping[str, float] = THRESHOLDS
) -> Comparison:
    """Every case that both runs have, and what only one of them has.

    Args:
        thresholds: By kind, how much more counts, as a share of the old value.
    """
    before, after = _by_case(old), _by_case(new)
    name = namer([record.case for record in (*before.values(), *after.values())])
    pairs = [(before[key], after[key]) for key in before if key in after]
    known = _prior(pairs)
    tests = [test for pair in pairs for test in _compared(*pair, name(pair[0].case), known)]
    changes = tuple(_decided(tests, {**THRESHOLDS, **thresholds}))
    ratios = [change.ratio for change in changes if change.quantity == "time_s" and change.ratio is not None]
    return Comparison(
        changes=changes,
        missing=tuple(_full_name(before[key].case, name) for key in before if key not in after),
        added=tuple(_full_name(after[key].case, name) for key in after if key not in before),
        drift=float(np.median(ratios)) if len(ratios) >= _FEWEST_FOR_DRIFT else None,
    )


def _by_case(records: Iterable[Record]) -> dict[str, Record]:
    """Of equal cases the last record counts."""
    return {json.dumps({**vars(record.case), **_NO_PART_OF_IT}, sort_keys=True): record for record in records}


def _full_name(case: Case, name: Namer) -> str:
    return f"{name(case)}, {case.tokens} tokens, {case.kind}"


def _compared(old: Record, new: Record, name: str, known: significance.Prior) -> list[_Test]:
    change = Change(name=name, kind=old.case.kind, tokens=old.case.tokens, quantity="status")
    if (old.status, new.status) != ("ok", "ok"):
        return [_Test(_status_change(change, old, new))]
    if change.kind == "time":
        return [_time_test(replace(change, quantity="time_s"), _times(old), _times(new), known)]
    if change.kind in _EXACT:
        return [_Test(one) for one in _exact_changes(change, old, new)]
    return [
        _error_test(replace(change, quantity=quantity), old, new)
        for quantity in _ERRORS
        if _numbers([getattr(old, quantity)]) and _numbers([getattr(new, quantity)])
    ]


def _status_change(change: Change, old: Record, new: Record) -> Change:
    if old.status == new.status:
        return change
    verdict = UNCHANGED
    if "skipped" in (old.status, new.status):
        verdict = UNCLEAR
    elif "ok" in (old.status, new.status):
        verdict = REGRESSION if old.status == "ok" else IMPROVEMENT
    reason = new.reason if new.status != "ok" else old.reason
    remark = f"{old.status} → {new.status}" + (f": {reason}" if reason else "")
    return replace(change, verdict=verdict, remark=remark)


def _prior(pairs: Iterable[tuple[Record, Record]]) -> significance.Prior:
    timed = [(_times(old), _times(new)) for old, new in pairs if old.status == new.status == "ok"]
    return significance.prior([_inflation(*times) for times in timed if _can_be_ranked(*times)], _FREEDOM)


def _inflation(old: Sequence[float], new: Sequence[float]) -> float:
    """Of both runs; each is ranked by itself, so that a difference between them has no part in it."""
    return (significance.inflation(old) + significance.inflation(new)) / 2


def _can_be_ranked(old: Sequence[float], new: Sequence[float]) -> bool:
    return min(len(old), len(new)) >= _FEWEST_FOR_RANKS


def _time_test(
    change: Change, old: Sequence[float], new: Sequence[float], known: significance.Prior
) -> _Test:
    if min(len(old), len(new)) < 2:
        return _Test(replace(change, verdict=UNCOMPARABLE, remark="fewer than two calls were timed"))
    before, after = float(np.median(old)), float(np.median(new))
    quarters = (significance.quarter_medians(old), significance.quarter_medians(new))
    statistic, error, freedom = significance.student_statistic(*quarters)
    change = _with_ratio(change, before, after, error * significance.quantile(_OUTSIDE, freedom))
    by_quarters = _tails(statistic, freedom)
    if not _can_be_ranked(old, new):
        return _Test(change, *by_quarters)
    inflation, freedom = significance.moderated(_inflation(old, new), _FREEDOM, known)
    by_ranks = _tails(significance.rank_statistic(old, new) / math.sqrt(inflation), freedom)
    # Ranks find small differences of many calls, quarters large ones of calls that are much alike: a rank
    # statistic ends where no call of one run is among those of the other. Each has its part of the level.
    pairs = zip(by_quarters, by_ranks, strict=True)
    return _Test(change, *(min(one / _LEVEL_OF_QUARTERS, other / _LEVEL_OF_RANKS) for one, other in pairs))


def _exact_changes(change: Change, old: Record, new: Record) -> Iterator[Change]:
    """What was counted is exact, so that any difference is real and only the threshold decides."""
    for quantity in _EXACT[change.kind]:
        before, after = _numbers([getattr(old, quantity)]), _numbers([getattr(new, quantity)])
        if not before or not after:
            continue
        counted = _with_ratio(replace(change, quantity=quantity), before[0], after[0], 0.0)
        if quantity == "peak_bytes" and old.memory_method != new.memory_method:
            remark = f"counted by {old.memory_method}, then by {new.memory_method}"
            counted = replace(counted, verdict=UNCOMPARABLE, remark=remark)
        yield counted


def _error_test(change: Change, old: Record, new: Record) -> _Test:
    """Welch's test of the means over draws; equal draws are the same features on the same inputs."""
    quantity = change.quantity
    draws_old = _numbers(getattr(old, f"{quantity}_draws") or [getattr(old, quantity)])
    draws_new = _numbers(getattr(new, f"{quantity}_draws") or [getattr(new, quantity)])
    if not draws_old or not draws_new:
        return _Test(replace(change, verdict=UNCOMPARABLE, remark="no draw has a number"))
    before, after = float(np.mean(draws_old)), float(np.mean(draws_new))
    if draws_old == draws_new:
        return _Test(_with_ratio(change, before, after, 0.0))
    if min(len(draws_old), len(draws_new)) < 2:
        change = _with_ratio(change, before, after, None)
        return _Test(replace(change, remark="one draw, and so no spread to compare with"))
    statistic, freedom = significance.welch_statistic(draws_old, draws_new)
    relative = [np.std(x, ddof=1) / math.sqrt(len(x)) / (np.mean(x) or 1.0) for x in (draws_old, draws_new)]
    half_width = math.hypot(*relative) * significance.quantile(_OUTSIDE, freedom)
    return _Test(_with_ratio(change, before, after, half_width), *_tails(statistic, freedom))


def _with_ratio(change: Change, old: float, new: float, half_width: float | None) -> Change:
    """Both values and new over old; the interval reaches `half_width` of a logarithm to either side."""
    change = replace(change, old=old, new=new)
    if not old:
        return replace(change, ratio=1.0 if not new else None)
    ratio = new / old
    if half_width is None:
        return replace(change, ratio=ratio)
    factor = math.exp(min(half_width, _WIDEST))
    return replace(change, ratio=ratio, low=ratio / factor, high=ratio * factor)


def _tails(statistic: float, freedom: float) -> tuple[float, float]:
    """How likely so much more, and so much less, is by chance."""
    return significance.upper_tail(statistic, freedom), significance.upper_tail(-statistic, freedom)


def _decided(tests: Sequence[_Test], thresholds: Mapping[str, float]) -> Iterator[Change]:
    """The changes with their verdicts; all tests of one direction are adjusted together."""
    more = iter(significance.holm([test.more for test in tests if test.more is not None]))
    less = iter(significance.holm([test.less for test in tests if test.less is not None]))
    for test in tests:
        if test.more is None:
            yield _judged(test.change, thresholds[test.change.kind], None, None)
        else:
            yield _judged(test.change, thresholds[test.change.kind], next(more), next(less))


def _judged(change: Change, threshold: float, more: float | None, less: float | None) -> Change:
    if change.verdict != UNCHANGED or change.old is None or change.new is None:
        return change
    worse = change.new > change.old * (1 + threshold)
    better = change.old > change.new * (1 + threshold)
    p = more if change.new >= change.old else less
    if not worse and not better:
        return replace(change, p=p)
    # One draw, or not clear enough in so many cases, decides nothing; what was counted decides by itself.
    if change.kind not in _EXACT and (p is None or p > FALSE_ALARMS):
        return replace(change, p=p, verdict=UNCLEAR)
    return replace(change, p=p, verdict=REGRESSION if worse else IMPROVEMENT)


def _times(record: Record) -> list[float]:
    return [time_s for time_s in _numbers(record.times_s or ()) if time_s > 0]


def _numbers(values: Iterable[float | None]) -> list[float]:
    """What can be reckoned with: a file may hold numbers that no measurement gives."""
    return [
        float(value) for value in values if value is not None and (value == 0 or _SMALLEST < value < _LARGEST)
    ]
