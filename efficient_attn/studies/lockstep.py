"""The loop of points that advance together: a round is begun for all of them or for none."""

from typing import Any

from efficient_attn.runner.interrupt import held
from efficient_attn.studies.loop import Loop
from efficient_attn.studies.plan import Plan, Point


class Lockstep(Loop):
    """Rounds of all points until each has its number of rounds, or the budget holds no further round of all.

    After each round of a point its record is emitted as it stands.
    """

    def __init__(self, plan: Plan, *, earlier: object, **of_run: Any) -> None:
        # A complete record may be continued: its point decides how many rounds are left.
        super().__init__(plan, earlier={}, **of_run)

    def _measure_group(self, points: list[Point]) -> None:
        going = points
        # Nobody knows the duration of the first round.
        while going and (not self._begun or self._round_of(going) <= self._left_s()):
            for point in going:
                self._measure_round(point)
            going = [point for point in going if point.case.key in self._left]
        for point in going:
            del self._begun[point.case.key], self._left[point.case.key]

    def _measure_round(self, point: Point) -> None:
        super()._measure_round(point)
        if (parts := self._begun.get(point.case.key)) is not None:
            record = point.merge(parts)
            with held():
                self._emit(record)
            self._report(point, record)

    def _round_of(self, points: list[Point]) -> float:
        """Mean seconds of a round of these points, as far as they were begun."""
        keys = [point.case.key for point in points if point.case.key in self._begun]
        return sum(self._spent_s[key] / len(self._begun[key]) for key in keys)

    def _predicted_s(self) -> float:
        rounds = [(one.rounds or 0) - len(self._begun.get(key, ())) for key, one in self._left.items()]
        return max(rounds, default=0) * self._round_of(list(self._left.values()))
