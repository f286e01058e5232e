"""The one loop of all studies: points group by group, timed ones in interleaved rounds."""

import itertools
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from efficient_attn.measure.clock import in_turns
from efficient_attn.studies.plan import Plan, Point
from efficient_attn.sweep.amounts import show_seconds
from efficient_attn.sweep.case import Record
from efficient_attn.sweep.interrupt import held
from efficient_attn.sweep.run import Step, joined

# Seconds of calls in one round: enough for a steady median, and no more of the budget than this share.
_ROUND_S = 0.1
_SHARE_OF_BUDGET = 0.5

# Calls besides the timed ones: a round warms up twice.
_WARM_UP_CALLS = 2

# Building a backend and drawing its inputs, per round.
_OVERHEAD_S = 0.02

# Points that a closing sentence names before it counts the others.
_NAMED = 6


@dataclass(frozen=True)
class _Known:
    """Duration of a measured point: of one call if it was timed, else of the point."""

    cost: float
    seconds: float


class Estimate:
    """Predicted durations, learnt from the points that were measured and their costs.

    Args:
        round_s: Seconds of calls in one round.
        start_s: Seconds of starting a process for each round, where that is done.
    """

    def __init__(self, *, round_s: float, start_s: float = 0.0) -> None:
        self._round_s = round_s
        self._overhead_s = _OVERHEAD_S + start_s
        self._calls: dict[Hashable, _Known] = {}
        self._points: dict[Hashable, _Known] = {}
        self._seconds = self._cost = 0.0

    def learn(self, point: Point, record: Record, seconds: float) -> None:
        """Take in the duration of a round or of a whole point."""
        if point.rounds is not None:
            if record.times_s:
                self._calls[point.series] = _Known(point.cost, min(record.times_s))
        elif point.calls is not None:
            self._calls.setdefault(point.series, _Known(point.cost, seconds / point.calls))
        else:
            self._points[point.series] = _Known(point.cost, seconds)
            self._seconds += seconds
            self._cost += point.cost

    def seconds(self, point: Point, *, done: int = 0, typical: bool = False) -> float:
        """Predicted duration of a point after `done` rounds.

        Calls of an unknown series are short; with `typical` they last as long as calls of other series.
        """
        if point.rounds is None and point.calls is None:
            known = self._points.get(point.series)
            if known is None:
                return self._seconds / self._cost * point.cost if self._cost else 0.0
            return known.seconds * point.cost / known.cost
        call_s = self._call_seconds(point, typical)
        if point.rounds is None:
            return self._overhead_s + (point.calls or 0) * call_s
        round_s = _WARM_UP_CALLS * call_s + max(self._round_s, call_s)
        return (point.rounds - done) * (self._overhead_s + round_s)

    def _call_seconds(self, point: Point, typical: bool) -> float:
        known = self._calls.get(point.series)
        if known is None and typical and self._calls:
            every = self._calls.values()
            known = _Known(fmean(one.cost for one in every), fmean(one.seconds for one in every))
        return 0.0 if known is None else known.seconds * max(point.cost / known.cost, 1.0)


class Loop:
    """The state of one run: remaining points, begun points, and the time spent.

    Args:
        earlier: Records of the run so far, by the key of their case.
        emit: Receives each record as soon as it is complete.
        budget_s: Seconds of measuring; points that would not fit are skipped.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        earlier: Mapping[str, Record],
        emit: Callable[[Record], None],
        progress: Callable[[Step], None] | None = None,
        budget_s: float | None = None,
    ) -> None:
        self._statuses = {key: record.status for key, record in earlier.items()}
        self._points = [point for point in plan.points if self._statuses.get(point.case.key) != "ok"]
        self._emit, self._progress = emit, progress
        self._budget_s = math.inf if budget_s is None else budget_s
        self._timeout_s, self._start_s = plan.timeout_s, plan.start_s
        self._start = time.monotonic()
        self._left = {point.case.key: point for point in self._points}
        self._total = len(self._left)
        self._begun: dict[str, list[Record]] = {}
        self._spent_s: dict[str, float] = {}
        self._timed_out: dict[Hashable, int] = {}
        self._round_s = _round_seconds(self._points, budget_s)
        self._estimate = Estimate(round_s=self._round_s, start_s=plan.start_s)

    def run(self) -> bool:
        """Measure all points; False if interrupted from the keyboard, after begun points were emitted."""
        try:
            for _, group in itertools.groupby(self._points, key=lambda point: point.group):
                self._measure_group(list(group))
        except KeyboardInterrupt:
            for key, parts in list(self._begun.items()):
                self._finish(self._merged(self._left[key], parts))
            return False
        return True

    def not_tried(self) -> list[str]:
        """A closing sentence that names the points left, none if there are none."""
        names = list(dict.fromkeys(point.case.label for point in self._left.values()))
        if not names:
            return []
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        count = f"{len(self._left)} of {self._total} points"
        return [f"Not tried: {count}, of {', '.join(names[:_NAMED])}{more}; --resume measures them."]

    def _measure_group(self, points: list[Point]) -> None:
        """Timed points in interleaved rounds, then the others one by one."""
        timed, promised_s = [], 0.0
        for point in points:
            if point.rounds is not None and not self._skipped(point, promised_s=promised_s):
                timed.append(point)
                promised_s += self._estimate.seconds(point)
        for point in in_turns(timed, rounds=max((point.rounds or 0 for point in timed), default=0)):
            if point.case.key in self._left and not self._given_up(point):
                self._measure_round(point)
        for point in points:
            if point.rounds is None and not self._skipped(point):
                self._tell(point.shown, None)
                start = time.monotonic()
                record = point.measure()
                self._estimate.learn(point, record, time.monotonic() - start)
                self._finish(record)

    def _measure_round(self, point: Point) -> None:
        key, start = point.case.key, time.monotonic()
        self._tell(point.shown, None)
        part = point.measure(seconds=self._round_s)
        spent_s = max(time.monotonic() - start - self._start_s, 0.0)
        self._spent_s[key] = self._spent_s.get(key, 0.0) + spent_s
        self._estimate.learn(point, part, spent_s)
        if part.status != "ok":
            self._finish(part)
            return
        parts = self._begun.setdefault(key, [])
        parts.append(part)
        if len(parts) == point.rounds:
            self._finish(self._merged(point, parts))

    def _merged(self, point: Point, parts: Sequence[Record]) -> Record:
        return (point.merge or joined)(parts)

    def _given_up(self, point: Point) -> bool:
        """Whether a round is not begun: others may have taken longer than predicted."""
        key = point.case.key
        if key not in self._begun:
            return self._skipped(point)
        spent_s, parts = self._spent_s[key], self._begun[key]
        round_s = spent_s / len(parts)
        # Samples in hand are worth more than a round that would most likely be cut off.
        cut_off = spent_s + round_s > self._timeout_s or round_s > self._left_s()
        if cut_off:
            self._finish(self._merged(point, parts))
        return cut_off

    def _skipped(self, point: Point, *, promised_s: float = 0.0) -> bool:
        """Whether the point is not measured; `promised_s` of the budget go to others first."""
        if point.needs is not None and self._statuses.get(point.needs.key) != "ok":
            # A backend that fails once fails here too: one record of it is enough.
            self._left.pop(point.case.key, None)
            return True
        reason = point.skip or self._hopeless(point) or self._over_budget(point, promised_s)
        if reason is not None:
            self._finish(Record(case=point.case, status="skipped", reason=reason))
        return reason is not None

    def _hopeless(self, point: Point) -> str | None:
        tokens = self._timed_out.get(point.series)
        if tokens is None:
            return None
        return f"took too long at {tokens} tokens already (raise it with --timeout)"

    def _left_s(self) -> float:
        return self._budget_s - (time.monotonic() - self._start)

    def _over_budget(self, point: Point, promised_s: float) -> str | None:
        left_s = self._left_s() - promised_s
        needed_s = self._estimate.seconds(point)
        if needed_s <= left_s:
            return None
        return (
            f"would take about {show_seconds(needed_s)}, {show_seconds(max(left_s, 0))} of the budget "
            f"of {show_seconds(self._budget_s)} are left (raise it with --budget)"
        )

    def _finish(self, record: Record) -> None:
        key = record.case.key
        with held():
            self._begun.pop(key, None)
            point = self._left.pop(key, None)
            self._statuses[key] = record.status
            if record.status == "timeout" and point is not None:
                self._timed_out.setdefault(point.series, record.case.tokens)
            self._emit(record)
        self._tell(None, record)

    def _tell(self, doing: str | None, record: Record | None) -> None:
        if self._progress is None:
            return
        predicted_s = sum(
            self._estimate.seconds(point, done=len(self._begun.get(key, ())), typical=True)
            for key, point in self._left.items()
            if point.skip is None
        )
        left_s = min(predicted_s, max(self._left_s(), 0.0))
        done = self._total - len(self._left)
        self._progress(Step(done=done, total=self._total, remaining_s=left_s, doing=doing, record=record))


def _round_seconds(points: Sequence[Point], budget_s: float | None) -> float:
    rounds = sum(point.rounds or 0 for point in points if point.skip is None)
    if budget_s is None or not rounds:
        return _ROUND_S
    return min(_ROUND_S, _SHARE_OF_BUDGET * budget_s / rounds)
