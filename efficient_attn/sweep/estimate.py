"""Estimated time of the remaining plan, from the points measured so far."""

from collections.abc import Hashable, Iterable

from efficient_attn.sweep.plan import Entry
from efficient_attn.sweep.records import Case, Record

# Calls other than the timed ones: per round up to two of warm-up; for memory one of warm-up and one traced.
_WARM_UP_CALLS, _MEMORY_CALLS = 2, 3

# Construction of a backend and its inputs, per round.
_OVERHEAD_S = 0.02


def series(case: Case) -> Hashable:
    """Fields of a case other than its length."""
    return case.label, case.of, case.num_heads, case.head_dim


class Estimate:
    """Estimates times from the fastest call of each backend at its longest length so far.

    Args:
        turns: Number of rounds per time.
        turn_s: Seconds of calls in one round.
        start_s: Seconds to start a process for each round, if any.
    """

    def __init__(self, *, turns: int, turn_s: float, start_s: float = 0.0) -> None:
        self._turns = turns
        self._turn_s = turn_s
        self._overhead_s = _OVERHEAD_S + start_s
        self._calls: dict[Hashable, tuple[int, float]] = {}

    def learn(self, record: Record) -> None:
        """Update with the time of a call."""
        if record.times_s:
            self._calls[series(record.case)] = (record.case.tokens, min(record.times_s))

    def seconds(self, entry: Entry) -> float:
        """Estimated seconds of one entry; short calls are assumed without information."""
        call_s = self._call_s(entry)
        if entry.case.kind == "memory":
            return self._overhead_s + _MEMORY_CALLS * call_s
        one_turn_s = _WARM_UP_CALLS * call_s + max(self._turn_s, call_s)
        return self._turns * (self._overhead_s + one_turn_s)

    def total(self, entries: Iterable[Entry]) -> float:
        """Estimated seconds of all entries."""
        return sum(self.seconds(entry) for entry in entries if entry.skip is None)

    def _call_s(self, entry: Entry) -> float:
        if series(entry.case) not in self._calls:
            return 0.0
        tokens, call_s = self._calls[series(entry.case)]
        return float(call_s * max(entry.case.tokens / tokens, 1) ** entry.variant.time_growth)
