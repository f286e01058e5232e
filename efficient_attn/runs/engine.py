"""The engine of all studies: points that a generator yields are measured, stored and sent back.

Timed points of a list are measured in interleaved rounds, each of which is on the disk before the next
begins. Stored records answer their points: a resumed run replays the study and measures the rest.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from efficient_attn.contained import described
from efficient_attn.errors import OptionError
from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.measure.units import show_seconds
from efficient_attn.measure.variants import UNIFORM_ATTENTION
from efficient_attn.report.table import short
from efficient_attn.runs.progress import Durations, Progress
from efficient_attn.runs.store import OVER_BUDGET, Store, over_budget
from efficient_attn.runs.study import Point, Points

# Seconds of timed calls in a round; the rounds of a run take at most this share of its budget.
_ROUND_S, _SHARE_OF_BUDGET = 0.05, 0.5

# Seconds of tables, plots and the page after the last point on a busy machine, and their share of a budget.
_SAVING_S, _SHARE_OF_SAVING = 14.0, 0.3


def _drive(points: Points, measure: Callable[[list[Point]], list[Record | None]]) -> None:
    """Send the records of its points to a study until it ends."""
    answer = None
    with suppress(StopIteration):
        while True:
            request = points.send(answer)
            records = measure(request if isinstance(request, list) else [request])
            answer = records if isinstance(request, list) else records[0]


def foreseen(points: Points, store: Store) -> dict[str, Point]:
    """All points by the key of their case, if all without a record succeed."""
    all_points: dict[str, Point] = {}

    def succeed(points: list[Point]) -> list[Record | None]:
        all_points.update({point.case.key: point for point in points})
        # A point that has not been measured succeeds, unless its study skips it.
        return [
            store.records.get(point.case.key)
            or store.kind(case=point.case, status="skipped" if point.skip else "ok")
            for point in points
        ]

    _drive(points, succeed)
    return all_points


def _measured(point: Point, **seconds: float) -> Record:
    """Measure a point. Whatever it raises is its result."""
    try:
        return point.measure(**seconds)
    except Exception as failure:  # A study may be anybody's code.
        from efficient_attn.measure.calls import failed

        return failed(point.case, failure)


def _labels(cases: Iterable[Case]) -> set[str]:
    return {case.label for case in cases if case.backend != UNIFORM_ATTENTION}


class _TooShortError(Exception):
    """The budget is too short for a comparison. The message says how long it has to be."""


class Engine:
    """One run of a study within a budget from `start_s`.

    Args:
        points: Function that starts the study; a run starts it more than once.
        point_limit_s: Seconds of one point, all its rounds together.
    """

    def __init__(
        self,
        points: Callable[[], Points],
        store: Store,
        *,
        point_limit_s: float = math.inf,
        budget_s: float | None = None,
        start_s: float | None = None,
        executor: Any = None,
        report: Callable[[Progress], None] | None = None,
    ) -> None:
        self._points, self._store, self._executor, self._report = points, store, executor, report
        self._point_limit_s = point_limit_s
        planned = foreseen(points(), store)
        self.cases = [point.case for point in planned.values()]
        self._missing = self._unanswered(planned)
        self.to_measure = len(self._missing)
        self._done = 0
        if executor is not None and any(point.rounds for point in self._missing.values()):
            raise OptionError(
                "executor: the rounds of this run are interleaved in one process; leave it out."
            )
        self._budget_s = math.inf if budget_s is None else budget_s
        saving_s = min(_SAVING_S, _SHARE_OF_SAVING * self._budget_s)
        self._end_s = (time.monotonic() if start_s is None else start_s) + self._budget_s - saving_s
        rounds = sum(point.rounds for point in self._missing.values())
        self._round_s = min(_ROUND_S, _SHARE_OF_BUDGET * self._budget_s / max(rounds, 1))
        self._durations = Durations(self._round_s)
        self._timed_out: dict[Hashable, int] = {}
        self._budget_reported = False
        self.too_short: str | None = None

    def _unanswered(self, points: Mapping[str, Point]) -> dict[str, Point]:
        return {key: point for key, point in points.items() if not self._store.answers(point)}

    def run(self) -> bool:
        """Measure until the study ends, and return False after Ctrl-C."""
        try:
            _drive(self._points(), self._measure)
        except KeyboardInterrupt:
            return False
        except _TooShortError as refusal:
            self.too_short = str(refusal)
        return True

    def not_measured(self) -> list[str]:
        """Sentence that names the points which an interruption left out."""
        missing = self._unanswered(foreseen(self._points(), self._store))
        labels = ", ".join(dict.fromkeys(point.case.label for point in missing.values()))
        count = f"{len(missing)} of {self._done + len(missing)} points"
        return [f"{count} were not measured ({labels}). Continue: --out FOLDER --resume."] if missing else []

    def _measure(self, points: list[Point]) -> list[Record | None]:
        self._measure_rounds([point for point in points if point.rounds])
        self._measure_once([point for point in points if not point.rounds])
        return [self._store.records.get(point.case.key) for point in points]

    def _measure_once(self, points: list[Point]) -> None:
        """Measure each point that is neither stored nor skipped, all at once with an executor."""
        futures = {}
        if self._executor is not None:
            due = [point for point in points if not self._store.answers(point) and point.skip is None]
            try:
                futures = {point.case.key: self._executor.submit(point.measure) for point in due}
            except Exception as failure:
                raise OptionError(
                    "executor is an object with submit, such as concurrent.futures.ProcessPoolExecutor(2); "
                    f"{short(repr(self._executor))} accepts no points: {described(failure)}."
                ) from None
        try:
            for point in points:
                if self._store.answers(point) or self._skip(point):
                    continue
                start, future = time.monotonic(), futures.get(point.case.key)
                try:
                    record = _measured(point) if future is None else future.result()
                except Exception as failure:  # An executor may raise anything; its failures are records too.
                    reason = f"the executor failed: {described(failure)}"
                    record = Record(case=point.case, status="error", reason=reason)
                self._durations.learn(point, record, time.monotonic() - start)
                self._add(point, record)
        finally:
            for future in futures.values():
                future.cancel()

    def _measure_rounds(self, points: list[Point]) -> None:
        """Rounds in turns, forward and back, so that drift of the machine affects all points alike.

        The first point is the baseline: without it no further round of the others would be compared.
        """
        spent_s = dict.fromkeys((point.case.key for point in points), 0.0)
        last = max((point.rounds for point in points), default=0)
        for number in range(last):
            for point in points if (last - number) % 2 else points[::-1]:
                key, done = point.case.key, self._store.rounds(point.case)
                if self._store.answers(point) or done > number or (not done and self._skip(point)):
                    continue
                round_s = self._durations.next_s(point)
                # Rounds in hand are worth more than one that would be cut off.
                if done and (spent_s[key] + round_s > self._point_limit_s or round_s > self._left_s()):
                    for left in points if point is points[0] else [point]:
                        self._store.close(left.case)
                        self._add(left)
                    continue
                start = time.monotonic()
                record = _measured(point, seconds=self._round_s)
                if record.round_sizes:
                    record = replace(record, round_numbers=(number,))
                seconds = time.monotonic() - start
                spent_s[key] += seconds
                self._durations.learn(point, record, seconds)
                self._add(point, record)

    def _skip(self, point: Point) -> bool:
        """Whether the point is skipped: by its study, after a timeout of its series, or by the budget."""
        needed_s, left_s = self._durations.next_s(point), max(self._left_s(), 0.0)
        reason = point.skip
        if reason is None and point.series in self._timed_out:
            tokens = self._timed_out[point.series]
            reason = f"timed out at {tokens} tokens already (raise it with --timeout)"
        if reason is None and (needed_s > left_s or (point.cost and not left_s)):
            self._refuse_too_short(needed_s - self._left_s())
            budget = f"of the budget of {show_seconds(self._budget_s)}"
            reason = f"needs {show_seconds(needed_s)}, {show_seconds(left_s)} {budget} left {OVER_BUDGET}"
        if reason is not None:
            self._add(point, Record(case=point.case, status="skipped", reason=reason))
        return reason is not None

    def _refuse_too_short(self, more_s: float) -> None:
        """End the run if its budget is too short for the baseline and one candidate."""
        measured = _labels(record.case for record in self._store.records.values() if record.status == "ok")
        left = _labels(point.case for point in self._missing.values() if not point.skip)
        if len(measured) < min(len(measured | left), 2):
            raise _TooShortError(
                f"A budget of {show_seconds(self._budget_s)} is too short for a baseline and one candidate; "
                f"use --budget {math.ceil(self._budget_s + more_s)}s or more."
            )

    def _left_s(self) -> float:
        return self._end_s - time.monotonic()

    def _add(self, point: Point, row: Record | None = None) -> None:
        """Store a row, and show progress once its point needs no more."""
        if row is not None:
            self._store.add(row)
            if row.status == "timeout":
                self._timed_out.setdefault(point.series, row.case.tokens)
            if not self._store.answers(point):
                return
        key, record = point.case.key, self._store.records[point.case.key]
        if record.status != "ok" and not over_budget(record):
            # The study may leave out points that depend on this one.
            self._missing = self._unanswered(foreseen(self._points(), self._store))
            self._done += 1
        elif key in self._missing and (record.status != "ok" or self._store.answers(self._missing[key])):
            # A study may ask for more rounds of the same point later.
            del self._missing[key]
            self._done += 1
        # One line is enough for all points beyond the budget.
        repeated = over_budget(record) and self._budget_reported
        self._budget_reported |= over_budget(record)
        if self._report is not None and not repeated:
            self._report(self._progress(point, record))

    def _progress(self, point: Point, record: Record) -> Progress:
        remaining_s = sum(
            self._durations.next_s(left) * (left.rounds - self._store.rounds(left.case) if left.rounds else 1)
            for left in self._missing.values()
        )
        waiting = (x.title for x in self._missing.values() if not self._store.rounds(x.case))
        left_s = max(self._left_s(), 0.0)
        range_s = self._durations.range_s(remaining_s, left_s)
        if not self._missing and math.isfinite(left_s):
            # Further rounds end where the study has enough of them, at the latest with the budget.
            range_s = 0.0, left_s
        return Progress(
            done=self._done,
            total=self._done + len(self._missing),
            range_s=range_s,
            spent=None if math.isinf(left_s) else 1 - left_s / self._budget_s,
            outcome=f"{point.title}: {record.status}",
            record=record,
            records=self._store.records.values(),
            current=next(waiting, point.title),
        )
