"""Two runs compared case by case: what became slower, larger, less accurate, or stopped working.

A difference of times or errors counts if it is large enough to matter and too large to be chance, in the
light of how many cases are looked at: a whole comparison of equal runs is meant to see a regression once in a
hundred times, and an improvement as rarely. Bytes do not scatter and are compared as they are.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from efficient_attn.analysis import significance
from efficient_attn.analysis.change import (
    EXACT,
    IMPROVEMENT,
    REGRESSION,
    UNCHANGED,
    UNCLEAR,
    Change,
    Test,
    compared,
    turn_middles,
)
from efficient_attn.analysis.curves import Namer, namer
from efficient_attn.sweep.records import SCHEMA, Case, Record

# How much more counts, as a share of the old value.
THRESHOLDS: Mapping[str, float] = {
    "time": 0.05,
    "memory": 0.0,
    "error": 0.05,
    "recall": 0.0,
    "count": 0.0,
    "swap": 0.05,
}

# Of comparisons of equal runs so many may see a regression anywhere, and so many an improvement.
FALSE_ALARMS = 0.01

# What describes a measurement no further: how it is called, how its file is written.
_NO_PART_OF_IT: Mapping[str, Any] = {"label": "", "schema": SCHEMA}

# Fewer ratios say nothing of the machine.
_FEWEST_FOR_DRIFT = 5


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
    noise_ratio = _noise_ratio(pairs)
    tests = [test for pair in pairs for test in compared(*pair, name(pair[0].case), noise_ratio)]
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


def _noise_ratio(pairs: Iterable[tuple[Record, Record]]) -> float:
    timed = [pair for pair in pairs if all(one.status == "ok" and one.case.kind == "time" for one in pair)]
    return significance.noise_ratio([(turn_middles(old), turn_middles(new)) for old, new in timed])


def _decided(tests: Sequence[Test], thresholds: Mapping[str, float]) -> Iterator[Change]:
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
    if change.kind not in EXACT and (p is None or p > FALSE_ALARMS):
        return replace(change, p=p, verdict=UNCLEAR)
    return replace(change, p=p, verdict=REGRESSION if worse else IMPROVEMENT)
