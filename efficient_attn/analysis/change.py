"""One case of two runs: how its numbers differ, and how likely so much is by chance.

Times and errors scatter and are tested; bytes and counts do not and are compared as they are.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from efficient_attn.analysis import significance
from efficient_attn.sweep.records import Record

REGRESSION, IMPROVEMENT, UNCHANGED = "regression", "improvement", "unchanged"
UNCLEAR, UNCOMPARABLE = "unclear", "not comparable"

# What does not scatter, by kind.
EXACT: Mapping[str, tuple[str, ...]] = {
    "memory": ("peak_bytes", "parameter_bytes", "state_bytes"),
    "count": ("flops", "sequential_operations", "path_length"),
}
_ERRORS = (
    "output_relative_error",
    "output_mse",
    "weights_relative_error",
    "kernel_mse",
    "hidden_relative_error",
    "mean_pool_distance",
    "first_token_distance",
    "next_token_kl",
    "next_token_disagreement",
    "perplexity",
)

# Of an interval around a ratio, on either side.
_OUTSIDE = 0.025

# Beyond these, ratios and their intervals leave the range of floats.
_SMALLEST, _LARGEST, _WIDEST = 1e-100, 1e100, 100.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """One quantity of one case in both runs.

    Attributes:
        name: The label, and whatever else tells the cases of these runs apart beside tokens.
        quantity: `time_s`, `peak_bytes`, … or `status`.
        old: Of times the geometric mean over turns, of errors the mean over draws; None: there is no number.
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


class Test(NamedTuple):
    """A change, and how likely so much more, and so much less, is by chance; None where nothing is."""

    change: Change
    more: float | None = None
    less: float | None = None


def turn_middles(record: Record) -> significance.Floats:
    """For every turn of timed calls the interquartile mean of their logarithms, shape (turns,)."""
    parts = [_times(part) for part in significance.turns(record.times_s or (), record.turn_sizes)]
    return np.array(
        [significance.interquartile_mean([math.log(time_s) for time_s in part]) for part in parts if part]
    )


def compared(old: Record, new: Record, name: str, noise_ratio: float) -> list[Test]:
    """Everything that was measured of one case in both runs.

    Args:
        noise_ratio: How many times the variance of the old run's times the new run's have.
    """
    change = Change(name=name, kind=old.case.kind, tokens=old.case.tokens, quantity="status")
    if (old.status, new.status) != ("ok", "ok"):
        return [Test(_status_change(change, old, new))]
    if change.kind == "time":
        return [_time_test(replace(change, quantity="time_s"), old, new, noise_ratio)]
    if change.kind in EXACT:
        return [Test(one) for one in _exact_changes(change, old, new)]
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


def _time_test(change: Change, old: Record, new: Record, noise_ratio: float) -> Test:
    """Student's test of the logarithms, a turn being one sample."""
    turns_old, turns_new = turn_middles(old), turn_middles(new)
    if min(len(turns_old), len(turns_new)) < 2:
        return Test(replace(change, verdict=UNCOMPARABLE, remark="fewer than two turns were timed"))
    statistic, error, freedom = significance.student_statistic(turns_old, turns_new, noise_ratio)
    before, after = math.exp(turns_old.mean()), math.exp(turns_new.mean())
    half_width = error * significance.quantile(_OUTSIDE, freedom)
    change = _with_ratio(change, before, after, half_width)
    slower, waited = max((after, _waited(new)), (before, _waited(old)))
    if waited and slower * (1 - waited) <= min(before, after):
        remark = (
            f"threads waited for a processor up to {waited:.0%} of the slower time, which may be all of it"
        )
        return Test(replace(change, remark=remark), 1.0, 1.0)
    return Test(change, *_tails(statistic, freedom))


def _waited(record: Record) -> float:
    """By what share of the time calls may be longer because their threads stood waiting, at most."""
    total_s = math.fsum(_times(record.times_s or ()))
    return min(1.0, max(0.0, (record.waited_s or 0.0) / total_s)) if record.case.device == "cpu" else 0.0


def _exact_changes(change: Change, old: Record, new: Record) -> Iterator[Change]:
    """What was counted is exact, so that any difference is real and only the threshold decides."""
    for quantity in EXACT[change.kind]:
        before, after = _numbers([getattr(old, quantity)]), _numbers([getattr(new, quantity)])
        if not before or not after:
            continue
        counted = _with_ratio(replace(change, quantity=quantity), before[0], after[0], 0.0)
        if quantity == "peak_bytes" and old.memory_method != new.memory_method:
            remark = f"counted by {old.memory_method}, then by {new.memory_method}"
            counted = replace(counted, verdict=UNCOMPARABLE, remark=remark)
        yield counted


def _error_test(change: Change, old: Record, new: Record) -> Test:
    """Welch's test of the means over draws; equal draws are the same features on the same inputs."""
    quantity = change.quantity
    draws_old = _numbers(getattr(old, f"{quantity}_draws") or [getattr(old, quantity)])
    draws_new = _numbers(getattr(new, f"{quantity}_draws") or [getattr(new, quantity)])
    if not draws_old or not draws_new:
        return Test(replace(change, verdict=UNCOMPARABLE, remark="no draw has a number"))
    before, after = float(np.mean(draws_old)), float(np.mean(draws_new))
    if draws_old == draws_new:
        return Test(_with_ratio(change, before, after, 0.0))
    if min(len(draws_old), len(draws_new)) < 2:
        change = _with_ratio(change, before, after, None)
        return Test(replace(change, remark="one draw, and so no spread to compare with"))
    statistic, freedom = significance.welch_statistic(draws_old, draws_new)
    relative = [np.std(x, ddof=1) / math.sqrt(len(x)) / (np.mean(x) or 1.0) for x in (draws_old, draws_new)]
    half_width = math.hypot(*relative) * significance.quantile(_OUTSIDE, freedom)
    return Test(_with_ratio(change, before, after, half_width), *_tails(statistic, freedom))


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


def _times(samples: Iterable[float | None]) -> list[float]:
    return [time_s for time_s in _numbers(samples) if time_s > 0]


def _numbers(values: Iterable[float | None]) -> list[float]:
    """What can be reckoned with: a file may hold numbers that no measurement gives."""
    return [
        float(value) for value in values if value is not None and (value == 0 or _SMALLEST < value < _LARGEST)
    ]
