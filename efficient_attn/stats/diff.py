"""Comparison of runs case by case: regressions and improvements of every quantity.

A difference of a scattered quantity counts if it exceeds its threshold and is significant after correction
for the number of cases: a whole comparison of equal runs reports a regression once in a hundred times, and
an improvement as rarely. Reproducible numbers are compared exactly.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from efficient_attn.runner.quantity import KINDS, QUANTITIES, Quantity
from efficient_attn.runner.record import Case, Record, replace
from efficient_attn.stats import significance
from efficient_attn.stats.curves import Namer, namer
from efficient_attn.stats.scatter import (
    Noise,
    Run,
    Side,
    Tested,
    records_of,
    seed_scatter,
    tested,
    times,
    turn_middles,
)

REGRESSION, IMPROVEMENT, UNCHANGED = "regression", "improvement", "unchanged"
CHANGED, UNCLEAR, UNCOMPARABLE = "changed", "unclear", "not comparable"

# Share of comparisons of equal runs that may report a regression, and as many an improvement.
FALSE_ALARMS = 0.01

# Trainings from several seeds are repetitions of one measurement.
_OVER_SEEDS = ("recall",)

# Widest interval of a log ratio; beyond, the ratio leaves the range of floats.
_WIDEST = 100.0

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
        """The changes with this verdict."""
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
    """Every case that both sides have, and the names of the others; of several runs each is one sample.

    Args:
        thresholds: By quantity or by kind of record, the relative change that matters.
    """
    before, after = _by_case(old), _by_case(new)
    name = namer([_case(side) for side in (*before.values(), *after.values())])
    pairs = [(before[key], after[key]) for key in before if key in after]
    noise = _noise(pairs)
    found = [one for pair in pairs for one in _compared(*pair, name, noise)]
    changes = tuple(_decided(found, thresholds or {}))
    return Comparison(
        changes=changes,
        missing=_only_in(before, after, name),
        added=_only_in(after, before, name),
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
    known = _known(before) & _known(after)
    for quantity in QUANTITIES.values():
        named = replace(change, quantity=quantity.name)
        if quantity.type == "text":
            texts = [sorted({str(getattr(one, quantity.name)) for one in records_of(side)}) for side in sides]
            if texts[0] != texts[1]:
                remark = " → ".join(map(", ".join, texts))
                yield replace(named, verdict=CHANGED, remark=remark), None
        elif quantity.field in known:
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


def _known(side: Side) -> set[str]:
    """Names of the fields present in a side's records."""
    return {name for record in records_of(side) for name in record.measured}


def _with_test(change: Change, quantity: Quantity, old: Side, new: Side, noise: Noise) -> _Open:
    """The test, or none where it is not meaningful: other conditions, rounding, run-queue wait."""
    found = tested(quantity, old, new, noise)
    if found is None:
        return replace(change, verdict=UNCOMPARABLE, remark="no value is a usable number"), None
    change = _with_ratio(change, found)
    records = records_of((*old, *new))
    methods = {record.memory_method for record in records}
    if quantity.name.endswith("peak_bytes") and len(methods) > 1:
        remark = f"counted by {' and by '.join(sorted(map(str, methods)))}"
        return replace(change, verdict=UNCOMPARABLE, remark=remark), None
    precision = _PRECISION.get(records[0].case.dtype, 0.0)
    if quantity.rounding and max(found.old, found.new) < (_ROUNDING * precision) ** quantity.rounding:
        return change, None
    slower, waited = max((found.new, _waited(new)), (found.old, _waited(old)))
    if quantity.name == "time_s" and waited and slower * (1 - waited) <= min(found.old, found.new):
        remark = f"threads waited for a processor up to {waited:.0%} of the slower time, which may explain it"
        return replace(change, remark=remark), found._replace(more=1.0, less=1.0)
    return change, found


def _waited(side: Side) -> float:
    """Upper bound on the share of run-queue wait in the calls, mean over runs."""
    shares = [
        min(1.0, max(0.0, record.waited_s / (math.fsum(times(record.times_s or ())) or math.inf)))
        if record.case.device == "cpu" and record.waited_s
        else 0.0
        for record in records_of(side)
    ]
    return math.fsum(shares) / len(shares)


def _with_ratio(change: Change, found: Tested) -> Change:
    """Both values and their ratio, with an interval if available."""
    change = replace(change, old=found.old, new=found.new, over=found.over)
    if not found.old:
        return replace(change, ratio=1.0 if not found.new else None)
    ratio = found.new / found.old
    if found.half_width is None:
        return replace(change, ratio=ratio)
    factor = math.exp(min(found.half_width, _WIDEST))
    return replace(change, ratio=ratio, low=ratio / factor, high=ratio * factor)


def _decided(found: Sequence[_Open], thresholds: Mapping[str, float]) -> Iterator[Change]:
    """The changes with their verdicts; all tests of one direction are adjusted together."""
    tests = [test for _, test in found if test is not None]
    more = iter(significance.holm([test.more for test in tests if test.more is not None]))
    less = iter(significance.holm([test.less for test in tests if test.less is not None]))
    for change, test in found:
        if test is None:
            yield change
        else:
            p = (None, None) if test.more is None else (next(more), next(less))
            yield _judged(change, test, thresholds, *p)


def _judged(
    change: Change, test: Tested, thresholds: Mapping[str, float], more: float | None, less: float | None
) -> Change:
    quantity = QUANTITIES[change.quantity]
    threshold = thresholds.get(quantity.name, thresholds.get(change.kind, quantity.threshold))
    p = more if test.new >= test.old else less
    grew = test.new > test.old * (1 + threshold)
    if not grew and not test.old > test.new * (1 + threshold):
        return replace(change, p=p, remark=None)
    if quantity.better is None:
        return replace(change, verdict=CHANGED)
    # A mean over draws whose values no record keeps decides where it was asked for.
    untested = p is None and change.over is not None
    asked = quantity.scatter == "draws" and quantity.name in thresholds
    if (untested and not asked) or (p is not None and p > FALSE_ALARMS):
        return replace(change, p=p, verdict=UNCLEAR)
    return replace(change, p=p, verdict=REGRESSION if grew == (quantity.better == "less") else IMPROVEMENT)
