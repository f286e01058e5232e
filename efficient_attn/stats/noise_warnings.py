"""Noise warnings: conditions that make times uncertain, with their remedies.

They are notes beside the numbers. Intervals decide whether a backend is faster.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.stats.estimates import call_time

# Key of an environment that lists the conditions during the run, one entry per resumption.
DURING = "during"

# Times of a fixed loop after and before a run differ by more than this share if clocks drift.
_DRIFTED = 0.15

# Share of the time above which threads that wait for a processor are reported.
_WAITED = 0.05

# Number of points that are named; further points are only counted.
_NAMED = 3

# NVML's throttle reasons 4 and 128, power; 8, hardware; 32 and 64, heat.
_SLOWED = 4 | 8 | 32 | 64 | 128

_ROUNDS = "more --rounds would settle it."
_THREADS = "use fewer --threads, or an idle machine."


def doubts(records: Iterable[Record], environment: Mapping[str, Any] | None = None) -> list[str]:
    """Sentences on conditions that make times uncertain or wrong."""
    timed = [
        record
        for record in records
        if record.case.kind == "time" and record.status == "ok" and _samples(record)
    ]
    if not timed:
        return []
    sentences = []
    for share, limit, text in _SIGNS:
        above = [(record, value) for record in timed if (value := share(record)) > limit]
        if above:
            sentences.append(text.format(_names([record for record, _ in above]), max(v for _, v in above)))
    listed = (environment or {}).get(DURING)
    runs = [run for run in listed if isinstance(run, Mapping)] if isinstance(listed, list) else []
    for name, limit, text in _LOADS:
        taken = max((_number(run, name) for run in runs), default=0.0)
        if taken > limit:
            load = text.format(taken)
            sentences.append(f"Background load: {load}: times are longer and less certain; {_THREADS}")
    loops = [(_number(run, "loop_before_s"), _number(run, "loop_after_s")) for run in runs]
    drift = max((after_s / before_s - 1 for before_s, after_s in loops if before_s and after_s), default=0.0)
    if drift > _DRIFTED:
        text = f"Clock drift: a fixed loop took {drift:.0%} longer after the run than before it; {_ROUNDS}"
        sentences.append(text)
    return sentences


def _names(records: Sequence[Record]) -> str:
    """`window at 256, 512 tokens, exact at 256 tokens and 3 more points`."""
    lengths: dict[str, list[int]] = {}
    for record in records[:_NAMED]:
        lengths.setdefault(record.case.label, []).append(record.case.tokens)
    named = ", ".join(f"{label} at {', '.join(map(str, tokens))} tokens" for label, tokens in lengths.items())
    further = len(records) - _NAMED
    return named if further <= 0 else f"{named} and {further} more point{'s' * (further > 1)}"


def _samples(record: Record) -> tuple[float, ...]:
    # Times that were not finite are null in a file.
    return tuple(time_s for time_s in record.times_s or () if time_s is not None and time_s > 0)


def _half_width(record: Record) -> float:
    median, _, high, _ = call_time(record)
    return 0.0 if high is None else high / median - 1


def _waiting(record: Record) -> float:
    """Share of run-queue wait, which times on one thread exclude."""
    if record.waited_s is None or record.case.device != "cpu" or record.case.threads == 1:
        return 0.0
    return record.waited_s / (sum(_samples(record)) * record.case.threads)


def _number(run: Mapping[str, Any], name: str) -> float:
    """Entry of the conditions during a run, 0 if not a finite number."""
    value = run.get(name)
    finite = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
    return float(value) if finite and value is not None else 0.0


# Shares of records, their limits, and sentences; typical comparisons look for a few percent.
_SIGNS: tuple[tuple[Callable[[Record], float], float, str], ...] = (
    (_half_width, 0.1, f"Noisy: the interval of {{}} reaches {{:.0%}} from the median; {_ROUNDS}"),
    (
        _waiting,
        _WAITED,
        f"CPU contention: threads of {{}} waited for a processor up to {{:.0%}} of the time; {_THREADS}",
    ),
    (
        lambda record: (record.throttle_reasons or 0) & _SLOWED,
        0,
        "Throttled GPU: power, heat or hardware held its clocks down after {} (reasons {:#x}); cool it, or "
        "lock its clocks.",
    ),
)
_LOADS = (
    ("others_share", 0.1, "other processes took {:.0%} of all cores during the run"),
    ("stolen_share", 0.02, "the host gave {:.0%} of all cores to other virtual machines"),
)
