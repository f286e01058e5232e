"""Predicted durations of points, learnt while a run measures."""

from collections.abc import Hashable

from efficient_attn.runner.record import Record
from efficient_attn.studies.plan import Point

# Calls besides the timed ones: a round warms up twice.
_WARM_UP_CALLS = 2

# Building a backend and drawing its inputs, per round.
_OVERHEAD_S = 0.02

# Device times repeat the warm-up and the calls of a round.
_WITH_DEVICE_TIMES = 2


class Estimate:
    """Predicted durations, learnt from the points that were measured and their costs."""

    def __init__(self, *, round_s: float) -> None:
        self._round_s = round_s
        # Costs and seconds, of one call of timed points and of whole points.
        self._calls: dict[Hashable, tuple[float, float]] = {}
        self._points: dict[Hashable, tuple[float, float]] = {}
        self._seconds = self._cost = 0.0
        # Seconds of the last round beside its timed calls, by execution: compiling takes most of them.
        self._preparing_s: dict[str, float] = {}

    def learn(self, point: Point, record: Record, seconds: float) -> None:
        """Take in the duration of a round or of a whole point."""
        if point.rounds is not None:
            if record.times_s:
                self._calls[point.series] = point.cost, min(record.times_s)
                if point.case.execution is not None:
                    self._preparing_s[point.case.execution] = seconds - sum(record.times_s)
        elif point.calls is not None:
            self._calls.setdefault(point.series, (point.cost, seconds / point.calls))
        else:
            self._points[point.series] = point.cost, seconds
            self._seconds += seconds
            self._cost += point.cost

    def seconds(self, point: Point, *, done: int = 0, typical: bool = False) -> float:
        """Predicted duration of a point after `done` rounds.

        Calls of an unknown series are short; with `typical` they last as long as calls of other series.
        """
        if point.rounds is None and point.calls is None:
            cost, seconds = self._points.get(point.series, (self._cost, self._seconds))
            return seconds / cost * point.cost if cost else 0.0
        call_s = self._call_seconds(point, typical)
        preparing_s = max(self._preparing_s.get(point.case.execution or "", 0.0), _OVERHEAD_S)
        if point.rounds is None:
            return preparing_s + (point.calls or 0) * call_s
        round_s = _WARM_UP_CALLS * call_s + max(self._round_s, call_s)
        factor = 1 if point.case.l2 is None else _WITH_DEVICE_TIMES
        return (point.rounds - done) * (preparing_s + factor * round_s)

    def _call_seconds(self, point: Point, typical: bool) -> float:
        known = [self._calls[point.series]] if point.series in self._calls else []
        if not known and typical:
            known = list(self._calls.values())
        cost, seconds = map(sum, zip(*known, strict=True)) if known else (1.0, 0.0)
        return seconds / max(len(known), 1) * max(point.cost * len(known) / cost, 1.0)
