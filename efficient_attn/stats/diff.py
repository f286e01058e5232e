"""Comparison of runs case by case: regressions and improvements of every quantity.

A difference of a scattered quantity counts if it exceeds its threshold and is significant after correction
for the number of cases: a whole comparison of equal runs reports a regression once in a hundred times, and
an improvement as rarely. Reproducible numbers are compared exactly.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from efficient_attn.measure.quantities import KINDS, QUANTITIES, Quantity
from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.stats import significance
from efficient_attn.stats.estimates import Namer, namer
from efficient_attn.stats.scatter import (
    Noise,
    Run,
    Side,
    Tested,
    records_of,
    round_means,
    seed_scatter,
    tested,
    times,
)

REGRESSION, IMPROVEMENT, UNCHANGED = "regression", "improvement", "unchanged"
CHANGED, UNCLEAR, UNCOMPARABLE = "changed", "unclear", "not comparable"

# Share of comparisons of equal runs that may report a regression, and as many an improvement.
FALSE_ALARMS = 0.01

# Trainings from several seeds are repetitions of one measurement.
_OVER_SEEDS = ("recall",)

# Machine precision by dtype; errors below a multiple of it are rounding.
_PRECISION = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}
_ROUNDING = 16

_Cases = Mapping[str, Side]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Change of one quantity of one case.

    Attributes:
        name: The label, and the fields other than tokens that distinguish the cases of these runs.
        quantity: `time_s`, `peak_bytes`, … or `status`.
        old: Geometric mean over rounds for times, else the mean; None: no value.
        ratio: New over old, with a 95 % interval.
        p: One-sided p-value in the direction of the change, adjusted for all cases.
        over: Unit of the test: `rounds`, `runs`, `draws` or `seeds`; None: no repetitions.
        verdict: `regression`, `improvement`, `unchanged`, `changed`, `unclear` or `not comparable`.
        remark: Explanation that the numbers do not show.
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
    over: str | None = None
    verdict: str = UNCHANGED
    remark: str | None = None


# A change, and the test that decides it; None: it is decided.
_Open = tuple[Change, Tested | None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences between the runs of two sides.

    Attributes:
        changes: In the order of the old run.
        missing: Names of cases that only the old side has.
        added: Names of cases that only the new side has.
        correlation: Correlation of successive rounds that the intervals allow for.
        runs: Number of old and of new runs.
    """

    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    correlation: float = 0.0
    runs: tuple[int, int] = (1, 1)

    def of(self, verdict: str) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.verdict == verdict)


def names() -> tuple[str, ...]:
    """Names of --fail-on: kinds of records, then quantities."""
    return (*KINDS, *QUANTITIES)


def compare_runs(
    old: Sequence[Sequence[Record]],
    new: Sequence[Sequence[Record]],
    *,
    thresholds: Mapping[str, float] | None = None,
) -> Comparison:
    """Compare cases present on both sides. Each run is one sample.

    Args:
        thresholds: By quantity or by kind of record, the relative change that matters.
    """
    before, after = _by_case(old), _by_case(new)
    name = namer([_case(side) for side in (*before.values(), *after.values())])
    pairs = [(before[key], after[key]) for key in before if key in after]
    noise = _noise(pairs)
    tests = [test for pair in pairs for test in _compared(*pair, name, noise)]
    return Comparison(
        changes=tuple(_decided(tests, thresholds or {})),
        missing=_only_in(before, after, name),
        added=_only_in(after, before, name),
        correlation=noise.correlation,
        runs=(len(old), len(new)),
    )


def _by_case(runs: Sequence[Sequence[Record]]) -> _Cases:
    """Records of each case, run by run, without labels and training seeds."""
    cases: dict[str, list[Run]] = {}
    for records in runs:
        # The last record of equal cases counts.
        in_run: dict[str, dict[int, Record]] = {}
        for record in records:
            seed = 0 if record.case.kind in _OVER_SEEDS else record.case.seed
            key = replace(record.case, label="", seed=seed).key
            in_run.setdefault(key, {})[record.case.seed] = record
        for key, by_seed in in_run.items():
            cases.setdefault(key, []).append(tuple(by_seed.values()))
    return cases


def _case(side: Side) -> Case:
    """The case of a side, with the label of its first record."""
    first = side[0][0].case
    return replace(first, seed=0) if first.kind in _OVER_SEEDS else first


def _only_in(cases: _Cases, compared: _Cases, name: Namer) -> tuple[str, ...]:
    alone = [_case(side) for key, side in cases.items() if key not in compared]
    return tuple(f"{name(case)}, {case.tokens} tokens, {case.kind}" for case in alone)


def _noise(pairs: Sequence[tuple[Side, Side]]) -> Noise:
    """Properties of the scatter that all cases of a comparison show together."""
    seeds = {
        quantity.name: seed_scatter(quantity, (side for pair in pairs for side in pair))
        for quantity in QUANTITIES.values()
        if quantity.scatter == "seeds"
    }
    timed = [
        (round_means(old[0][0]), round_means(new[0][0]))
        for old, new in pairs
        if len(old) == len(new) == 1
        and all(record.status == "ok" and record.case.kind == "time" for record in records_of((*old, *new)))
    ]
    rounds = [side for pair in timed for side in pair]
    return Noise(significance.noise_ratio(timed), significance.correlation(rounds), seeds)


def _compared(old: Side, new: Side, name: Namer, noise: Noise) -> Iterator[_Open]:
    """All quantities that both sides have, after a change of status."""
    case = _case(old)
    change = Change(name=name(case), kind=case.kind, tokens=case.tokens, quantity="status")
    status = _status_change(change, old, new)
    sides = [[[r for r in run if r.status == "ok"] for run in side] for side in (old, new)]
    before, after = ([run for run in side if run] for side in sides)
    if status or not (before and after):
        yield status or change, None
    if not (before and after):
        return
    common = _measured(before) & _measured(after)
    for quantity in QUANTITIES.values():
        named = replace(change, quantity=quantity.name)
        if quantity.type == "text":
            texts = [
                sorted({str(getattr(record, quantity.name)) for record in records_of(side)}) for side in sides
            ]
            if texts[0] != texts[1]:
                remark = " → ".join(map(", ".join, texts))
                yield replace(named, verdict=CHANGED, remark=remark), None
        elif quantity.field in common:
            yield _with_test(named, quantity, before, after, noise)


def _status_change(change: Change, old: Side, new: Side) -> Change | None:
    """Change of the success rate of a case: always, sometimes or never."""
    sides = records_of(old), records_of(new)
    failed = [[record for record in side if record.status != "ok"] for side in sides]
    if not any(failed):
        return None
    shares = [len(bad) / len(side) for bad, side in zip(failed, sides, strict=True)]
    # Always, sometimes or never: how often does not count.
    worse = [math.ceil(share) + math.floor(share) for share in shares]
    statuses = [bad[0].status if bad else "ok" for bad in failed]
    if worse[0] == worse[1] and statuses[0] == statuses[1]:
        return change
    verdict = UNCHANGED if worse[0] == worse[1] else REGRESSION if worse[0] < worse[1] else IMPROVEMENT
    reason = (failed[1] or failed[0])[0].reason
    remark = " → ".join(statuses) + (f": {reason}" if reason else "")
    return replace(change, verdict=UNCLEAR if "skipped" in statuses else verdict, remark=remark)


def _measured(side: Side) -> set[str]:
    return {name for record in records_of(side) for name in record.measured}


def _with_test(change: Change, quantity: Quantity, old: Side, new: Side, noise: Noise) -> _Open:
    """The test, or None for unequal methods, rounding and run-queue wait."""
    test = tested(quantity, old, new, noise)
    if test is None:
        return replace(change, verdict=UNCOMPARABLE, remark="no value is a usable number"), None
    change = _with_ratio(change, test)
    records = records_of((*old, *new))
    precision = _PRECISION.get(records[0].case.dtype, 0.0)
    if quantity.rounding and max(test.old, test.new) < (_ROUNDING * precision) ** quantity.rounding:
        return change, None
    slower, waited = max((test.new, _waited(new)), (test.old, _waited(old)))
    if quantity.name == "time_s" and waited and slower * (1 - waited) <= min(test.old, test.new):
        remark = f"threads waited for a processor up to {waited:.0%} of the slower time, which may explain it"
        return replace(change, remark=remark), test._replace(increase=1.0, decrease=1.0)
    return change, test


def _waited(side: Side) -> float:
    """Upper bound on the share of run-queue wait, mean over runs; times on one thread exclude it."""
    shares = [
        min(1.0, max(0.0, record.waited_s / (math.fsum(times(record.times_s or ())) or math.inf)))
        if record.case.device == "cpu" and record.case.threads > 1 and record.waited_s
        else 0.0
        for record in records_of(side)
    ]
    return math.fsum(shares) / len(shares)


def _with_ratio(change: Change, test: Tested) -> Change:
    """Copy with both values and their ratio, with an interval if available."""
    change = replace(change, old=test.old, new=test.new, over=test.over)
    if not test.old:
        return replace(change, ratio=1.0 if not test.new else None)
    ratio = test.new / test.old
    if test.half_width is None:
        return replace(change, ratio=ratio)
    factor = math.exp(min(test.half_width, significance.WIDEST))
    return replace(change, ratio=ratio, low=ratio / factor, high=ratio * factor)


def _decided(tests: Sequence[_Open], thresholds: Mapping[str, float]) -> Iterator[Change]:
    """Changes with verdicts, from tests that are adjusted together."""
    scattered = [test for _, test in tests if test is not None and test.increase is not None]
    increases = iter(significance.holm([test.increase or 0.0 for test in scattered]))
    decreases = iter(significance.holm([test.decrease or 0.0 for test in scattered]))
    for change, test in tests:
        if test is None:
            yield change
            continue
        p = None
        if test.increase is not None:
            increase, decrease = next(increases), next(decreases)
            p = increase if test.new >= test.old else decrease
        yield _judged(change, test, thresholds, p)


def _judged(change: Change, test: Tested, thresholds: Mapping[str, float], p: float | None) -> Change:
    quantity = QUANTITIES[change.quantity]
    threshold = thresholds.get(quantity.name, thresholds.get(change.kind, quantity.threshold))
    grew = test.new > test.old * (1 + threshold)
    if not grew and not test.old > test.new * (1 + threshold):
        return replace(change, p=p, remark=None)
    if quantity.better is None:
        return replace(change, verdict=CHANGED)
    # A mean over draws whose values no record keeps decides where its threshold is set.
    untested = p is None and change.over is not None
    decisive = quantity.scatter == "draws" and quantity.name in thresholds
    if (untested and not decisive) or (p is not None and p > FALSE_ALARMS):
        return replace(change, p=p, verdict=UNCLEAR)
    return replace(change, p=p, verdict=REGRESSION if grew == (quantity.better == "less") else IMPROVEMENT)
