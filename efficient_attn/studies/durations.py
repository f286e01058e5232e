"""Predicted durations of points, learnt while a run measures."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from efficient_attn.runner.record import Record
from efficient_attn.studies.points import Point

# A longer call lengthens a round by two calls of the warm-up and at least one that is timed.
_CALLS = 3


class _Duration(NamedTuple):
    """Last duration of a series: of a point, or of one round with its shortest call."""

    cost: float
    seconds: float
    call_s: float | None


class Durations:
    """Durations of points and rounds, each predicted from the last one of its series by its cost."""

    def __init__(self) -> None:
        self._last: dict[Hashable, _Duration] = {}

    def learn(self, point: Point, record: Record, seconds: float) -> None:
        """Take in the duration of a point or of one of its rounds."""
        call_s = min(record.times_s) if point.rounds and record.times_s else None
        self._last[_key(point)] = _Duration(point.cost, seconds, call_s)

    def next_s(self, point: Point) -> float:
        """Seconds of the point, or of its next round; 0 where nothing of its series was measured."""
        last = self._last.get(_key(point))
        if last is None or not last.cost:
            return 0.0
        if not point.rounds:
            return last.seconds * point.cost / last.cost
        return last.seconds + _CALLS * (last.call_s or 0.0) * max(point.cost / last.cost - 1, 0.0)

    def remaining_s(self, points: Iterable[Point]) -> float:
        """Seconds of all these points; those of unknown series take as long as the others on average."""
        known = [duration.seconds for duration in self._last.values()]
        typical_s = sum(known) / max(len(known), 1)
        return sum(
            max(point.rounds, 1) * (self.next_s(point) if _key(point) in self._last else typical_s)
            for point in points
            if point.skip is None
        )


def _key(point: Point) -> Hashable:
    return point.series, bool(point.rounds)
