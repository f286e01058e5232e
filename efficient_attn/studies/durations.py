"""Predicted durations of points, learnt while a run measures."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from efficient_attn.measure.record import Record
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

    def __init__(self, round_s: float) -> None:
        self._round_s = round_s
        self._last: dict[tuple[Hashable, str], _Duration] = {}

    def learn(self, point: Point, record: Record, seconds: float) -> None:
        """Take in the duration of a point or of one of its rounds."""
        call_s = min(record.times_s) if point.rounds and record.times_s else None
        self._last[_key(point)] = _Duration(point.cost, seconds, call_s)

    def next_s(self, point: Point) -> float:
        """Seconds of the point, or of its next round; 0 where nothing of its series was measured."""
        last = self._last.get(_key(point))
        timed = self._last.get((point.series, "time"))
        if point.case.kind == "memory" and timed is not None and timed.call_s is not None:
            # Counting takes most of a short point, calls most of a long one.
            return (0.0 if last is None else last.seconds) + _CALLS * timed.call_s * point.cost / timed.cost
        if last is None or not last.cost:
            return 0.0
        if not point.rounds:
            return last.seconds * point.cost / last.cost
        return last.seconds + _CALLS * (last.call_s or 0.0) * max(point.cost / last.cost - 1, 0.0)

    def remaining_s(self, points: Iterable[tuple[Point, int]]) -> float:
        """Seconds of all these points, each so many times."""
        return sum(
            times * (self.next_s(point) or self._typical_s(point))
            for point, times in points
            if point.skip is None
        )

    def _typical_s(self, point: Point) -> float:
        """Seconds of a point, or of a round, if it is like its series, its kind, or all others."""
        last = self._last.items()
        series = [duration for (series, _), duration in last if series == point.series]
        kind = [duration for (_, kind), duration in last if kind == point.case.kind]
        alike = series or kind or list(self._last.values())
        if point.rounds and alike is kind:
            return sum(duration.seconds for duration in kind) / len(kind)
        cost = sum(duration.cost for duration in alike)
        call_s = sum(duration.seconds for duration in alike) * point.cost / cost if cost else 0.0
        return max(_CALLS * call_s, self._round_s) if point.rounds else call_s


def _key(point: Point) -> tuple[Hashable, str]:
    return point.series, point.case.kind
