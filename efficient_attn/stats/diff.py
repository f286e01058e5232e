"""Comparison of two runs case by case: regressions and improvements of every quantity.

Times are compared by `time_ratio`, whose interval includes the shift between runs. Draws of random features
and trainings from several seeds are compared pair by pair, by Student's 95 % interval of the mean difference.
All other numbers are reproduced by their case and compared exactly.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from efficient_attn.measure.quantities import Quantity
from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.stats.estimates import Namer, call_time, half_width, namer, on_device, time_ratio

REGRESSION, IMPROVEMENT, UNCHANGED = "regression", "improvement", "unchanged"
CHANGED, UNCLEAR = "changed", "no evidence of change"
# The worst first.
VERDICTS = (REGRESSION, IMPROVEMENT, UNCLEAR, CHANGED, UNCHANGED)

# Trainings from several seeds are repetitions of one measurement.
_OVER_SEEDS = ("recall",)

# Machine precision by dtype; errors below a multiple of it are rounding.
_PRECISION = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}
_ROUNDING = 16

# Values beyond this are no measurements.
_LARGEST = 1e100

# Records of a case by seed.
_Side = Mapping[int, Record]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Change of one quantity of one case.

    Attributes:
        name: The label, and the fields other than tokens that distinguish the cases of these runs.
        quantity: `time_s`, `peak_bytes`, … or `status`.
        old: Median over rounds for times, else the mean; None: no value.
        ratio: New over old, with a 95 % interval if there are repetitions.
        verdict: `regression`, `improvement`, `unchanged`, `changed` or `no evidence of change`.
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
    verdict: str = UNCHANGED
    remark: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Changes between two runs, and names of the cases that only the old or the new run has."""

    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]

    def of(self, verdict: str) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.verdict == verdict)


def compare_runs(
    old: Sequence[Record], new: Sequence[Record], *, thresholds: Mapping[str, float] | None = None
) -> RunComparison:
    """Compare cases present in both runs.

    Thresholds are the smallest relative changes that matter, by quantity or by kind of record.
    """
    before, after = _by_case(old), _by_case(new)
    name = namer([_case(side) for side in (*before.values(), *after.values())])
    changes = [
        change
        for key in before
        if key in after
        for change in _changes(before[key], after[key], name, thresholds or {})
    ]
    missing, added = (
        tuple(_words(_case(run[key]), name) for key in run if key not in compared)
        for run, compared in ((before, after), (after, before))
    )
    return RunComparison(changes=tuple(changes), missing=missing, added=added)


def _by_case(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """Records of each case, without labels and training seeds. The last of equal cases counts."""
    cases: dict[str, dict[int, Record]] = {}
    for record in records:
        case = record.case
        seed = 0 if case.kind in _OVER_SEEDS else case.seed
        cases.setdefault(replace(case, label="", seed=seed).key, {})[case.seed] = record
    return cases


def _case(side: _Side) -> Case:
    """The case of a side, with the label of its first record."""
    case = next(iter(side.values())).case
    return replace(case, seed=0) if case.kind in _OVER_SEEDS else case


def _words(case: Case, name: Namer) -> str:
    return f"{name(case)}, {case.tokens} tokens, {case.kind}"


def _changes(old: _Side, new: _Side, name: Namer, thresholds: Mapping[str, float]) -> Iterator[Change]:
    case = _case(old)
    change = Change(name=name(case), kind=case.kind, tokens=case.tokens, quantity="status")
    yield from _status_change(change, old, new)
    seeds = [seed for seed in old if seed in new and old[seed].status == new[seed].status == "ok"]
    pairs = [(old[seed], new[seed]) for seed in seeds]
    kinds = dict.fromkeys(type(record) for pair in pairs for record in pair)
    quantities = {name: quantity for kind in kinds for name, quantity in kind.quantities().items()}
    for quantity in quantities.values():
        if not quantity.compared:
            continue
        named = replace(change, quantity=quantity.name)
        if quantity.type == "text":
            texts = [
                sorted({str(getattr(r, quantity.field)) for r in run}) for run in zip(*pairs, strict=True)
            ]
            if texts[0] != texts[1]:
                yield replace(named, verdict=CHANGED, remark=" → ".join(map(", ".join, texts)))
        elif all(quantity.field in record.measured for pair in pairs for record in pair):
            threshold = thresholds.get(quantity.name, thresholds.get(case.kind, quantity.threshold))
            if quantity.scatter == "rounds" and len(pairs) == 1:
                compared = _compared_times(named, quantity, *pairs[0], threshold)
            else:
                compared = _compared(named, quantity, pairs, threshold)
            if compared is not None:
                yield compared


def _status_change(change: Change, old: _Side, new: _Side) -> Iterator[Change]:
    """Change of status: a failure on one side alone is a regression or an improvement."""
    failed = [[record for record in side.values() if record.status != "ok"] for side in (old, new)]
    statuses = [records[0].status if records else "ok" for records in failed]
    if statuses[0] == statuses[1]:
        if any(failed):
            yield change
        return
    reason = (failed[1] or failed[0])[0].reason
    remark = " → ".join(statuses) + (f": {reason}" if reason else "")
    verdict = UNCHANGED if all(failed) else REGRESSION if failed[1] else IMPROVEMENT
    yield replace(change, verdict=UNCLEAR if "skipped" in statuses else verdict, remark=remark)


def _compared(
    change: Change, quantity: Quantity, pairs: Sequence[tuple[Record, Record]], threshold: float
) -> Change | None:
    """Values, their ratio and the verdict, or None without usable numbers."""
    samples = [_samples(quantity, [pair[side] for pair in pairs]) for side in (0, 1)]
    count = min(map(len, samples))
    if not count:
        return None
    before, after = (np.array(values[:count]) for values in samples)
    old, new = float(before.mean()), float(after.mean())
    half = half_width(after - before) if quantity.scatter and count > 1 else 0.0
    change = replace(change, old=old, new=new, ratio=1.0 if old == new else None)
    if old > 0:
        low, high = (1 + (new - old + sign * half) / old for sign in (-1, 1))
        change = replace(change, ratio=new / old, **({"low": low, "high": high} if half else {}))
    precision = _ROUNDING * _PRECISION.get(pairs[0][0].case.dtype, 0.0)
    if quantity.rounding and max(old, new) < precision**quantity.rounding:
        return change
    return replace(change, verdict=_verdict(quantity, old, new, threshold, abs(new - old) > half))


def _compared_times(
    change: Change, quantity: Quantity, old: Record, new: Record, threshold: float
) -> Change | None:
    """Medians, their ratio over rounds and the verdict, or None without usable numbers."""
    if quantity.name == "device_time_s":
        old, new = on_device(old), on_device(new)
    before, after = call_time(old).median, call_time(new).median
    ratio = time_ratio(old, new, between_runs=True)
    if not all(0 < value < _LARGEST for value in (before, after, ratio.median)):
        return None
    verdict = _verdict(quantity, 1.0, ratio.median, threshold, ratio.side_of_one != 0)
    edges = {"low": ratio.low, "high": ratio.high}
    return replace(change, old=before, new=after, ratio=ratio.median, verdict=verdict, **edges)


def _samples(quantity: Quantity, records: Sequence[Record]) -> list[float]:
    """One value per seed, or the draws of a single seed. Empty if any is no usable number."""
    values = [
        call_time(record).median if quantity.scatter == "rounds" else getattr(record, quantity.field)
        for record in records
    ]
    draws = getattr(records[0], quantity.samples or "", None) or ()
    samples = values if len(records) > 1 or not draws else draws
    if not all(abs(value) < _LARGEST for value in (*values, *samples)):
        return []
    # Draws of a model are listed text by text, and all texts together are one measurement.
    texts = records[0].texts or 1 if samples is draws and records[0].case.kind == "swap" else 1
    return np.reshape(samples, (texts, -1) if len(samples) % texts == 0 else (1, -1)).mean(axis=0).tolist()


def _verdict(quantity: Quantity, old: float, new: float, threshold: float, clear: bool) -> str:
    grew = new - old > threshold * abs(old)
    if not grew and not old - new > threshold * abs(new):
        return UNCHANGED
    if quantity.better is None:
        return CHANGED
    if not clear:
        return UNCLEAR
    return REGRESSION if grew == (quantity.better == "less") else IMPROVEMENT
