"""The loop of points that advance together: a round is begun for all of them or for none."""

import math
from typing import Any

from efficient_attn.runner.interrupt import held
from efficient_attn.runner.records import Record
from efficient_attn.studies.loop import Loop, Step
from efficient_attn.studies.plan import Plan, Point


class Lockstep(Loop):
    """Rounds of all points until each has its number of rounds, or the budget holds no further round of all.

    After each round of a point its record is emitted as it stands.
    """

    def __init__(self, plan: Plan, *, earlier: object, **of_run: Any) -> None:
        # A complete record may be continued: its point decides how many rounds are left.
        super().__init__(plan, earlier={}, **of_run)
        self._outcome = plan.outcome
        self._ended = 0

    def _measure_group(self, points: list[Point]) -> None:
        going = points
        # Nobody knows the duration of the first round.
        while going and (not self._begun or self._round_of(going) <= self._left_s()):
            for point in going:
                self._measure_round(point)
            going = [point for point in going if point.case.key in self._left]
        for point in going:
            self._ended += len(self._begun.pop(point.case.key))
            del self._left[point.case.key]

    def _measure_round(self, point: Point) -> None:
        super()._measure_round(point)
        if (parts := self._begun.get(point.case.key)) is not None:
            record = point.merge(parts)
            with held():
                self._emit(record)
            self._tell(None, record)

    def _finish(self, record: Record) -> None:
        self._ended += len(self._begun.get(record.case.key, ()))
        super()._finish(record)

    def _round_of(self, points: list[Point]) -> float:
        """Mean seconds of a round of these points, as far as they were begun."""
        keys = [point.case.key for point in points if point.case.key in self._begun]
        return sum(self._spent_s[key] / len(self._begun[key]) for key in keys)

    def _tell(self, doing: str | None, record: Record | None) -> None:
        if self._progress is None:
            return
        left_s = max(self._left_s(), 0.0)
        round_s = self._round_of(list(self._left.values()))
        fitting = left_s / round_s if round_s else 1.0
        done = {key: len(self._begun.get(key, ())) for key in self._left}
        rounds = [min((point.rounds or 0) - done[key], fitting) for key, point in self._left.items()]
        # The duration of the first round is unknown.
        predicted_s = max(rounds, default=0.0) * round_s if round_s or not rounds else left_s
        measured = self._ended + sum(done.values())
        self._progress(
            Step(
                done=measured,
                total=measured + int(sum(map(int, rounds))),
                remaining_s=min(left_s, predicted_s) if math.isfinite(predicted_s) else 0.0,
                doing=self._outcome(record) if record is not None and self._outcome is not None else doing,
                record=record,
            )
        )
