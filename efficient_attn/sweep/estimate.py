"""How long the rest of a plan will take, learnt from the points that were measured; points grow."""

from collections.abc import Hashable, Iterable

from efficient_attn.sweep.plan import Entry
from efficient_attn.sweep.records import Case, Record

# Calls beside the timed ones: in each turn two to warm up, of calls long enough to matter rather one; for
# memory one to warm up, one that is traced.
_WARM_UP_CALLS, _MEMORY_CALLS = 2, 3

# Building a backend and drawing its inputs, per turn.
_OVERHEAD_S = 0.02


def series(case: Case) -> Hashable:
    """What the cases of a run have in common that differ in their length alone."""
    return case.label, case.of, case.num_heads, case.head_dim


class Estimate:
    """Remembers the fastest call of each backend at its longest length so far.

    Args:
        turns: How often a time is taken up.
        turn_s: Seconds of calls in one turn.
        start_s: Seconds of starting a process for each turn, where that is done.
    """

    def __init__(self, *, turns: int, turn_s: float, start_s: float = 0.0) -> None:
        self._turns = turns
        self._turn_s = turn_s
        self._overhead_s = _OVERHEAD_S + start_s
        self._calls: dict[Hashable, tuple[int, float]] = {}

    def learn(self, record: Record) -> None:
        """Take in what a call took."""
        if record.times_s:
            self._calls[series(record.case)] = (record.case.tokens, min(record.times_s))

    def seconds(self, entry: Entry) -> float:
        """What one entry will take; as if calls were short where nothing is known."""
        call_s = self._call_s(entry)
        if entry.case.kind == "memory":
            return self._overhead_s + _MEMORY_CALLS * call_s
        one_turn_s = _WARM_UP_CALLS * call_s + max(self._turn_s, call_s)
        return self._turns * (self._overhead_s + one_turn_s)

    def total(self, entries: Iterable[Entry]) -> float:
        """What all these entries will take."""
        return sum(self.seconds(entry) for entry in entries if entry.skip is None)

    def _call_s(self, entry: Entry) -> float:
        if series(entry.case) not in self._calls:
            return 0.0
        tokens, call_s = self._calls[series(entry.case)]
        return float(call_s * max(entry.case.tokens / tokens, 1) ** entry.variant.time_growth)
