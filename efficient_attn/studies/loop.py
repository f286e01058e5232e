"""The one loop of all studies: points group by group, timed ones in interleaved rounds."""

import itertools
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from efficient_attn.measure.clock import in_turns
from efficient_attn.runner.interrupt import held
from efficient_attn.runner.record import Record
from efficient_attn.runner.units import show_seconds
from efficient_attn.studies.estimate import Estimate
from efficient_attn.studies.plan import Plan, Point

# Seconds of calls in one round: enough for a steady median, and no more of the budget than this share.
_ROUND_S = 0.1
_SHARE_OF_BUDGET = 0.5

# Points that a closing sentence names before it counts the others.
_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Step:
    """State of a run for a progress display, after a record."""

    done: int
    total: int
    remaining_s: float
    outcome: str
    record: Record

    def __str__(self) -> str:
        minutes, seconds = divmod(round(self.remaining_s), 60)
        return f"[{self.done}/{self.total}] {self.outcome}; {minutes}:{seconds:02} left"


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
        # A case that a plan names twice is measured once.
        self._left = {
            point.case.key: point for point in plan.points if self._statuses.get(point.case.key) != "ok"
        }
        self._points = list(self._left.values())
        self._emit, self._progress = emit, progress
        self._budget_s = math.inf if budget_s is None else budget_s
        self._timeout_s = plan.timeout_s
        self._start = time.monotonic()
        self._total = len(self._left)
        self._begun: dict[str, list[Record]] = {}
        self._spent_s: dict[str, float] = {}
        self._timed_out: dict[Hashable, int] = {}
        self._round_s = _round_seconds(self._points, budget_s)
        self._estimate = Estimate(round_s=self._round_s)

    def run(self) -> bool:
        """Measure all points; False if interrupted from the keyboard, after begun points were emitted."""
        try:
            for _, group in itertools.groupby(self._points, key=lambda point: point.group):
                self._measure_group(sorted(group, key=lambda point: point.rank()))
        except KeyboardInterrupt:
            for key, parts in list(self._begun.items()):
                self._finish(self._left[key].merge(parts))
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
                start = time.monotonic()
                record = point.measure()
                self._estimate.learn(point, record, time.monotonic() - start)
                self._finish(record)

    def _measure_round(self, point: Point) -> None:
        key, start = point.case.key, time.monotonic()
        part = point.measure(seconds=self._round_s)
        spent_s = time.monotonic() - start
        self._spent_s[key] = self._spent_s.get(key, 0.0) + spent_s
        self._estimate.learn(point, part, spent_s)
        if part.status != "ok":
            self._finish(part)
            return
        parts = self._begun.setdefault(key, [])
        parts.append(part)
        if len(parts) == point.rounds:
            self._finish(point.merge(parts))

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
            self._finish(point.merge(parts))
        return cut_off

    def _skipped(self, point: Point, *, promised_s: float = 0.0) -> bool:
        """Whether the point is not measured; `promised_s` of the budget go to others first."""
        failed = point.needs is not None and self._statuses.get(point.needs.key) != "ok"
        if failed or not point.needed():
            # A backend that fails once fails here too: one record of it is enough.
            self._left.pop(point.case.key, None)
            return True
        reason = point.skip
        if point.series in self._timed_out:
            tokens = self._timed_out[point.series]
            reason = reason or f"took too long at {tokens} tokens already (raise it with --timeout)"
        reason = reason or self._over_budget(point, promised_s)
        if reason is not None:
            self._finish(Record(case=point.case, status="skipped", reason=reason))
        return reason is not None

    def _left_s(self) -> float:
        return self._budget_s - (time.monotonic() - self._start)

    def _over_budget(self, point: Point, promised_s: float) -> str | None:
        # A point without a cost, such as a prediction, fits in any budget.
        left_s = max(self._left_s() - promised_s, 0.0)
        needed_s = self._estimate.seconds(point)
        if needed_s <= left_s:
            return None
        return (
            f"would take about {show_seconds(needed_s)}, {show_seconds(left_s)} of the budget "
            f"of {show_seconds(self._budget_s)} are left (raise it with --budget)"
        )

    def _finish(self, record: Record) -> None:
        key = record.case.key
        with held():
            self._begun.pop(key, None)
            point = self._left.pop(key)
            self._statuses[key] = record.status
            if record.status == "timeout":
                self._timed_out.setdefault(point.series, record.case.tokens)
            self._emit(record)
        self._report(point, record)

    def _report(self, point: Point, record: Record) -> None:
        """Show the progress that a record makes."""
        if self._progress is None:
            return
        left_s = min(self._predicted_s(), max(self._left_s(), 0.0))
        done = self._total - len(self._left)
        outcome = f"{point.shown}: {record.status}"
        self._progress(Step(done=done, total=self._total, remaining_s=left_s, outcome=outcome, record=record))

    def _predicted_s(self) -> float:
        """Predicted duration of all points left, the budget aside."""
        return sum(
            self._estimate.seconds(point, done=len(self._begun.get(key, ())), typical=True)
            for key, point in self._left.items()
            if point.skip is None
        )


def _round_seconds(points: Sequence[Point], budget_s: float | None) -> float:
    rounds = sum(point.rounds or 0 for point in points if point.skip is None)
    if budget_s is None or not rounds:
        return _ROUND_S
    return min(_ROUND_S, _SHARE_OF_BUDGET * budget_s / rounds)
