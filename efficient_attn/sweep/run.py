"""Benchmark runner: interleaved rounds, with every record emitted when it is complete."""

import itertools
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from efficient_attn import limits
from efficient_attn.measure.clock import in_turns
from efficient_attn.sweep import worker
from efficient_attn.sweep.amounts import show_seconds
from efficient_attn.sweep.case import Record, replace
from efficient_attn.sweep.estimate import Estimate, series
from efficient_attn.sweep.interrupt import held
from efficient_attn.sweep.plan import Entry

Measure = Callable[..., Record]

ROUNDS = 4

# Seconds of calls in one round: enough for a steady median; and its largest share of the budget.
_TURN_S = 0.1
_SHARE_OF_BUDGET = 0.5


@dataclass(frozen=True, kw_only=True)
class Step:
    """State of a run for a progress display.

    Attributes:
        doing: Next backend and length; None at the end.
        record: Record just completed, if any.
    """

    done: int
    total: int
    remaining_s: float
    doing: str | None
    record: Record | None = None


def run(
    entries: Sequence[Entry],
    *,
    emit: Callable[[Record], None],
    progress: Callable[[Step], None] | None = None,
    budget_s: float | None = None,
    rounds: int = ROUNDS,
    timeout_s: float = math.inf,
    measure: Measure = worker.measure,
    start_s: float = 0.0,
) -> bool:
    """Measure all entries; `emit` gets each record as soon as it is complete.

    Args:
        budget_s: Seconds of measuring after which no point is started; points that would not fit are skipped.
        rounds: Rounds of each time.
        timeout_s: Limit on the total seconds of the rounds of one time.
        start_s: Overhead of `measure` per call, such as starting a process.

    Returns:
        False if the run was interrupted from the keyboard; unfinished times are emitted with the rounds
        measured so far.
    """
    sweep = _Sweep(
        entries,
        emit=emit,
        progress=progress,
        budget_s=budget_s,
        rounds=rounds,
        timeout_s=timeout_s,
        measure=measure,
        start_s=start_s,
    )
    try:
        for _, group in itertools.groupby(entries, key=lambda entry: entry.case.tokens):
            sweep.measure_length(list(group))
    except KeyboardInterrupt:
        sweep.finish_begun()
        return False
    return True


class _Sweep:
    """State of one run: remaining entries, unfinished times, time spent."""

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        emit: Callable[[Record], None],
        progress: Callable[[Step], None] | None,
        budget_s: float | None,
        rounds: int,
        timeout_s: float,
        measure: Measure,
        start_s: float,
    ) -> None:
        self._emit = emit
        self._progress = progress
        self._measure = measure
        self._budget_s = math.inf if budget_s is None else budget_s
        self._start = time.monotonic()
        self._left = {entry.case.key: entry for entry in entries}
        self._total = len(self._left)
        self._begun: dict[str, list[Record]] = {}
        self._rounds = rounds
        self._timeout_s = timeout_s
        self._start_s = start_s
        self._turn_s = _seconds_of_a_turn(entries, budget_s, rounds)
        self._estimate = Estimate(turns=rounds, turn_s=self._turn_s, start_s=start_s)
        self._spent_s: dict[str, float] = {}
        self._timed_out: dict[Hashable, int] = {}

    def measure_length(self, entries: list[Entry]) -> None:
        """Measure the entries of one length: the times in interleaved rounds, then the others one by one."""
        timed, promised_s = [], 0.0
        for entry in entries:
            if entry.case.kind == "time" and not self._skipped(entry, promised_s=promised_s):
                timed.append(entry)
                promised_s += self._estimate.seconds(entry)
        for entry in in_turns(timed, rounds=self._rounds):
            self._take_turn(entry)
        for entry in entries:
            if entry.case.kind != "time" and not self._skipped(entry):
                self._announce(entry)
                self._finish(self._one_turn(entry))

    def finish_begun(self) -> None:
        """Emit the rounds measured so far of all unfinished times."""
        for parts in list(self._begun.values()):
            self._finish(joined(parts))

    def _take_turn(self, entry: Entry) -> None:
        key = entry.case.key
        if key not in self._left or self._given_up(entry):
            return
        self._announce(entry)
        start = time.monotonic()
        part = self._one_turn(entry)
        turn_s = max(time.monotonic() - start - self._start_s, 0.0)
        self._spent_s[key] = self._spent_s.get(key, 0.0) + turn_s
        self._estimate.learn(part)
        if part.status != "ok":
            self._finish(part)
            return
        parts = self._begun.setdefault(key, [])
        parts.append(part)
        if len(parts) == self._rounds:
            self._finish(joined(parts))

    def _given_up(self, entry: Entry) -> bool:
        """Whether to skip a round; other entries may have taken longer than estimated."""
        key = entry.case.key
        if key not in self._begun:
            return self._skipped(entry)
        spent_s, parts = self._spent_s[key], self._begun[key]
        turn_s = spent_s / len(parts)
        # The samples at hand are worth more than a round that would probably be cut off.
        cut_off = spent_s + turn_s > self._timeout_s or turn_s > self._left_s()
        if cut_off:
            self._finish(joined(parts))
        return cut_off

    def _one_turn(self, entry: Entry) -> Record:
        return self._measure(entry.case, target=entry.variant.target, seconds=self._turn_s)

    def _skipped(self, entry: Entry, *, promised_s: float = 0.0) -> bool:
        """Whether the entry is skipped, with the reason recorded; others have `promised_s` of the budget."""
        reason = entry.skip or self._hopeless(entry) or self._over_budget(entry, promised_s)
        if reason is not None:
            self._finish(Record(case=entry.case, status="skipped", reason=reason))
        return reason is not None

    def _hopeless(self, entry: Entry) -> str | None:
        tokens = self._timed_out.get(series(entry.case))
        return (
            None if tokens is None else f"took too long at {tokens} tokens already (raise it with --timeout)"
        )

    def _left_s(self) -> float:
        return self._budget_s - (time.monotonic() - self._start)

    def _over_budget(self, entry: Entry, promised_s: float) -> str | None:
        left_s = self._left_s() - promised_s
        needed_s = self._estimate.seconds(entry)
        if needed_s <= left_s:
            return None
        return (
            f"would take about {show_seconds(needed_s)}, {show_seconds(max(left_s, 0))} of the budget "
            f"of {show_seconds(self._budget_s)} are left (raise it with --budget)"
        )

    def _finish(self, record: Record) -> None:
        with held():
            self._begun.pop(record.case.key, None)
            self._left.pop(record.case.key, None)
            if record.status == "timeout":
                self._timed_out.setdefault(series(record.case), record.case.tokens)
            self._emit(record)
        self._tell(None, record)

    def _announce(self, entry: Entry) -> None:
        case = entry.case
        place = "" if case.of == "attention" else f", {case.of}"
        self._tell(f"{case.label}{place}, {case.tokens} tokens, {case.kind}", None)

    def _tell(self, doing: str | None, record: Record | None) -> None:
        if self._progress is None:
            return
        estimated_s = self._estimate.total(self._left.values())
        remaining_s = min(estimated_s, max(self._left_s(), 0.0))
        done = self._total - len(self._left)
        self._progress(
            Step(done=done, total=self._total, remaining_s=remaining_s, doing=doing, record=record)
        )


def _seconds_of_a_turn(entries: Sequence[Entry], budget_s: float | None, rounds: int) -> float:
    timed = sum(entry.case.kind == "time" and entry.skip is None for entry in entries)
    if budget_s is None or not timed:
        return _TURN_S
    return min(_TURN_S, _SHARE_OF_BUDGET * budget_s / (timed * rounds))


def joined(parts: Sequence[Record]) -> Record:
    """One record with the samples of all rounds, cut evenly to the capacity of a record."""
    most = max(limits.SAMPLES // len(parts), 1)
    kept = [(part.times_s or ())[:most] for part in parts]
    waited_s = [
        part.waited_s * len(times_s) / max(len(part.times_s or ()), 1)
        for part, times_s in zip(parts, kept, strict=True)
        if part.waited_s is not None
    ]
    return replace(
        parts[0],
        times_s=tuple(time_s for times_s in kept for time_s in times_s),
        round_sizes=tuple(map(len, kept)),
        waited_s=sum(waited_s) if len(waited_s) == len(parts) else None,
        empty_call_s=min(
            (part.empty_call_s for part in parts if part.empty_call_s is not None), default=None
        ),
    )
