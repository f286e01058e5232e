"""Changes of one case between two runs: all of its quantities, with p-values."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from efficient_attn.runner.quantity import QUANTITIES, Quantity
from efficient_attn.runner.record import Case, Record, replace
from efficient_attn.stats.scatter import (
    Noise,
    Side,
    Tested,
    as_they_are,
    numbers,
    records_of,
    test_times,
    test_values,
    times,
)

REGRESSION, IMPROVEMENT, UNCHANGED = "regression", "improvement", "unchanged"
CHANGED, UNCLEAR, UNCOMPARABLE = "changed", "unclear", "not comparable"

# Widest interval of a log ratio; beyond, the ratio leaves the range of floats.
_WIDEST = 100.0

# Machine precision by dtype; errors below a multiple of it are rounding.
_PRECISION = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}
_ROUNDING = 16


@dataclass(frozen=True, kw_only=True)
class Change:
    """Change of one quantity of one case.

    Attributes:
        name: The label, and the fields other than tokens that distinguish the cases of these runs.
        quantity: `time_s`, `peak_bytes`, … or `status`.
        old: Geometric mean over rounds for times, else the mean; None: no value.
        ratio: New over old, with a 95 % interval.
        p: One-sided p-value in the direction of the change, adjusted for all cases.
        over: Unit of the test: `rounds`, `runs`, `draws`, `windows` or `seeds`; None: no repetitions.
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


class Test(NamedTuple):
    """A change, and the one-sided p-values of an increase and a decrease; None: no test.

    Attributes:
        rounding: Whether both values are rounding errors.
    """

    change: Change
    more: float | None = None
    less: float | None = None
    rounding: bool = False


def compared(case: Case, old: Side, new: Side, name: str, noise: Noise) -> list[Test]:
    """All quantities that both sides have, after a change of status."""
    change = Change(name=name, kind=case.kind, tokens=case.tokens, quantity="status")
    tests = [Test(status)] if (status := _status_change(change, old, new)) else []
    sides = [[[r for r in run if r.status == "ok"] for run in side] for side in (old, new)]
    sides = [[run for run in side if run] for side in sides]
    if all(sides):
        before, after = _to_common_step(case, *sides)
        known = _known(before) & _known(after)
        for quantity in QUANTITIES.values():
            if quantity.field in known and quantity.type != "text":
                named = replace(change, quantity=quantity.name)
                tests.append(_quantity_test(named, quantity, before, after, noise))
        tests += map(Test, _text_changes(change, before, after))
    return tests or [Test(change)]


def _status_change(change: Change, old: Side, new: Side) -> Change | None:
    """Change of the success rate of a case: always, sometimes or never."""
    before, after = records_of(old), records_of(new)
    failed = [[record for record in side if record.status != "ok"] for side in (before, after)]
    if not any(failed):
        return None
    ended = [
        2 if not bad else int(len(bad) < len(side)) for bad, side in zip(failed, (before, after), strict=True)
    ]
    statuses = [bad[0].status if bad else "ok" for bad in failed]
    if ended[0] == ended[1] and statuses[0] == statuses[1]:
        return change
    verdict = UNCHANGED if ended[0] == ended[1] else REGRESSION if ended[0] > ended[1] else IMPROVEMENT
    if "skipped" in statuses:
        verdict = UNCLEAR
    reason = (failed[1] or failed[0])[0].reason
    remark = " → ".join(statuses) + (f": {reason}" if reason else "")
    if max(len(before), len(after)) > 1:
        counts = [
            f"{len(side) - len(bad)} of {len(side)}"
            for bad, side in zip(failed, (before, after), strict=True)
        ]
        remark = f"ok in {' → '.join(counts)}; {remark}"
    return replace(change, verdict=verdict, remark=remark)


def _known(side: Side) -> set[str]:
    """Names of the fields present in a side's records."""
    return {name for record in records_of(side) for name in record.measured}


def _quantity_test(change: Change, quantity: Quantity, old: Side, new: Side, noise: Noise) -> Test:
    if quantity.entry == "worst":
        return _worst_entry(change, quantity, old, new)
    if quantity.scatter == "rounds":
        found = test_times(old, new, noise)
    else:
        found = test_values(quantity, old, new, noise)
    if found is None:
        return Test(replace(change, verdict=UNCOMPARABLE, remark="no value is a usable number"))
    return _decidable(_with_ratio(change, found), quantity, found, old, new)


def _decidable(change: Change, quantity: Quantity, found: Tested, old: Side, new: Side) -> Test:
    """The test, or none where it is not meaningful: rounding, other counting methods, run-queue wait."""
    methods = {record.memory_method for record in records_of((*old, *new))}
    if quantity.name.endswith("peak_bytes") and len(methods) > 1:
        remark = f"counted by {' and by '.join(sorted(map(str, methods)))}"
        return Test(replace(change, verdict=UNCOMPARABLE, remark=remark))
    precision = _PRECISION.get(records_of(old)[0].case.dtype, 0.0)
    if quantity.rounding and max(found.old, found.new) < (_ROUNDING * precision) ** quantity.rounding:
        return Test(replace(change, remark=None), rounding=True)
    slower, waited = max((found.new, _waited(new)), (found.old, _waited(old)))
    if quantity.name == "time_s" and waited and slower * (1 - waited) <= min(found.old, found.new):
        remark = f"threads waited for a processor up to {waited:.0%} of the slower time, which may explain it"
        return Test(replace(change, remark=remark), 1.0, 1.0)
    return Test(change, found.more, found.less)


def _waited(side: Side) -> float:
    """Upper bound on the share of run-queue wait in the calls, mean over runs."""
    shares = [_waited_share(record) for record in records_of(side)]
    return math.fsum(shares) / len(shares)


def _waited_share(record: Record) -> float:
    if record.case.device != "cpu" or not record.waited_s:
        return 0.0
    return min(1.0, max(0.0, record.waited_s / (math.fsum(times(record.times_s or ())) or math.inf)))


def _worst_entry(change: Change, quantity: Quantity, old: Side, new: Side) -> Test:
    """The entry with the largest increase or, if none increased, with the largest decrease."""
    tables = [[getattr(record, quantity.field) for record in records_of(side)] for side in (old, new)]
    tables = [[row for row in table if row is not None] for table in tables]
    rows = [row for table in tables for row in table]
    if len(set(map(len, rows))) > 1 or not all(row and len(numbers(row)) == len(row) for row in rows):
        return Test(replace(change, verdict=UNCOMPARABLE, remark="the entries do not correspond"))
    before, after = (np.mean(table, axis=0) for table in tables)
    with np.errstate(divide="ignore", invalid="ignore"):
        grown = np.nan_to_num(np.log(after) - np.log(before), nan=0.0)
    place = int(grown.argmax() if grown.max() > math.log1p(quantity.threshold) else grown.argmin())
    found = as_they_are(quantity, (float(before[place]), float(after[place])), old, new)
    remark = f"entry {place} of {len(grown)}" + (f"; {found.remark}" if found.remark else "")
    return _decidable(_with_ratio(change, found._replace(remark=remark)), quantity, found, old, new)


def _text_changes(change: Change, old: Side, new: Side) -> Iterator[Change]:
    for name in (one.name for one in QUANTITIES.values() if one.type == "text"):
        before, after = (sorted({str(getattr(one, name)) for one in records_of(side)}) for side in (old, new))
        if before != after:
            remark = f"{', '.join(before)} → {', '.join(after)}"
            yield replace(change, quantity=name, verdict=CHANGED, remark=remark)


def _to_common_step(case: Case, old: Side, new: Side) -> tuple[Side, Side]:
    """Trainings cut off after the last evaluation common to all."""
    if case.kind != "train":
        return old, new
    steps: list[tuple[int, ...]] = [record.train_steps or () for record in records_of((*old, *new))]
    if not all(steps) or len({one[-1] for one in steps}) == 1:
        return old, new
    common = max(set.intersection(*map(set, steps)), default=None)
    before, after = ([[_until(record, common) for record in run] for run in side] for side in (old, new))
    return before, after


def _until(record: Record, step: float | None) -> Record:
    """The curves cut off after a step, without the samples of the last evaluation."""
    steps = record.train_steps or ()
    count = steps.index(step) + 1 if step is not None else 0
    curves = {
        name: values[:count] or None
        for name, values in record.measured.items()
        if name != "train_steps" and isinstance(values, tuple) and len(values) == len(steps)
    }
    last = {one.samples: None for one in QUANTITIES.values() if one.entry == "last" and one.samples}
    return replace(record, **{**curves, **last})


def _with_ratio(change: Change, found: Tested) -> Change:
    """Both values and their ratio, with an interval if available."""
    change = replace(change, old=found.old, new=found.new, over=found.over, remark=found.remark)
    if not found.old:
        return replace(change, ratio=1.0 if not found.new else None)
    ratio = found.new / found.old
    if found.half_width is None:
        return replace(change, ratio=ratio)
    factor = math.exp(min(found.half_width, _WIDEST))
    return replace(change, ratio=ratio, low=ratio / factor, high=ratio * factor)
