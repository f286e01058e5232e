"""Progress of a run: predicted durations, learnt while it measures."""

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import NamedTuple

from efficient_attn.measure.record import Record
from efficient_attn.runs.study import Point

# A longer call lengthens a round by two calls of the warm-up and at least one that is timed.
_CALLS = 3

# Number of the last predictions that give the range of the time left, and the fewest for one.
_MISSES, _FEWEST_MISSES = 40, 8


class _Duration(NamedTuple):
    """Last duration of a series: of a point, or of one round, and its shortest call."""

    cost: float
    seconds: float
    call_s: float


class Durations:
    """Durations of points and rounds, each predicted from the last one of its series by its cost."""

    def __init__(self, round_s: float) -> None:
        self._round_s = round_s
        self._last: dict[tuple[Hashable, str], _Duration] = {}
        # Of the last round of each timed case.
        self._rounds_s: dict[str, float] = {}
        # Measured over predicted seconds.
        self._misses: deque[float] = deque(maxlen=_MISSES)

    def learn(self, point: Point, record: Record, seconds: float) -> None:
        """Take in the duration of a point or of one of its rounds."""
        if predicted_s := self.next_s(point):
            self._misses.append(seconds / predicted_s)
        call_s = min(record.times_s) if point.rounds and record.times_s else seconds
        self._last[point.series, point.case.kind] = _Duration(point.cost, seconds, call_s)
        if point.rounds:
            self._rounds_s[point.case.key] = seconds

    def next_s(self, point: Point) -> float:
        """Predicted seconds of a point or its next round: of its last one, its series, its kind, or all."""
        if point.skip is not None:
            return 0.0
        if point.case.key in self._rounds_s:
            return self._rounds_s[point.case.key]
        last = self._last.get((point.series, point.case.kind))
        if last is not None and last.cost and point.rounds:
            return last.seconds + _CALLS * last.call_s * max(point.cost / last.cost - 1, 0.0)
        durations = self._last.items()
        series = [duration for (series, _), duration in durations if series == point.series]
        kind = [duration for (_, kind), duration in durations if kind == point.case.kind]
        if point.rounds and kind and not series:
            return fmean(duration.seconds for duration in kind)
        alike = [last] if last is not None else series or kind or list(self._last.values())
        cost = sum(duration.cost for duration in alike)
        call_s = sum(duration.call_s for duration in alike) * point.cost / cost if cost else 0.0
        return max(_CALLS * call_s, self._round_s) if point.rounds else call_s

    def range_s(self, remaining_s: float, left_s: float) -> tuple[float, float]:
        """Likely range of the time left, by the last predictions and within the budget."""
        low, high = 0.5, 2.0
        if len(self._misses) >= _FEWEST_MISSES:
            low, *_, high = quantiles(self._misses, n=_FEWEST_MISSES)
        return min(remaining_s * min(low, 1.0), left_s), min(remaining_s * max(high, 1.0), left_s)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """State of a run after a record.

    Attributes:
        range_s: Shortest and longest likely time left.
        spent: Share of the budget, if there is one.
        records: All records so far.
        current: Title of the next point, empty after the last.
    """

    done: int
    total: int
    range_s: tuple[float, float]
    outcome: str
    record: Record
    spent: float | None = None
    current: str = ""
    records: Collection[Record] = ()

    def __str__(self) -> str:
        return f"[{self.done}/{self.total}] {self.outcome}; {self.left}"

    @property
    def left(self) -> str:
        """`0:45 left`, `0:30–1:10 left`."""
        ends = (divmod(round(seconds), 60) for seconds in self.range_s)
        return f"{'–'.join(dict.fromkeys(f'{minutes}:{rest:02}' for minutes, rest in ends))} left"
