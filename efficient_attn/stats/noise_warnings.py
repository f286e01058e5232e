"""Noise warnings: conditions that make the times of a run uncertain, each with its remedy."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from efficient_attn.runner.records import Record
from efficient_attn.runner.units import show_seconds
from efficient_attn.stats.rounds import FEWEST_ROUNDS, call_time, round_times

# Key of an environment that lists the conditions during the run, one entry per resumption.
DURING = "during"

# Limits above which a share is reported; typical comparisons look for effects of a few percent.
_WIDE_INTERVAL = 0.1
_TOO_MUCH_CLOCK = 0.02
_WAITED = 0.05
_OTHERS, _STOLEN, _THROTTLED = 0.1, 0.02, 0.01
_SLOWED = 0.15

_LOADS = (
    ("others_share", _OTHERS, "other processes took {} of all cores during the run"),
    ("stolen_share", _STOLEN, "the host gave {} of all cores to other virtual machines"),
)

# Number of points that are named; further points are only counted.
_NAMED = 3

Share = Callable[[Record], float | None]


def doubts(records: Iterable[Record], environment: Mapping[str, Any] | None = None) -> list[str]:
    """One sentence per condition that makes times uncertain or wrong; none if there is none."""
    timed = [record for record in records if _timed(record)]
    if not timed:
        return []
    most = max(len(record.round_sizes or ()) for record in timed)
    told = [
        _points(
            timed,
            _half_width,
            _WIDE_INTERVAL,
            "Noisy: the interval of {} reaches {} from the median",
            _ROUNDS,
        ),
        _points(
            timed,
            _overhead,
            _TOO_MUCH_CLOCK,
            "Too short to be timed well: {}; the clock alone takes up to {}",
            _LONGER,
        ),
        _points(
            timed,
            _waiting,
            _WAITED,
            "CPU contention: threads of {} waited for a processor up to {} of the time",
            _THREADS,
        ),
        _few_rounds(timed),
        _fewer_rounds(timed, most),
    ]
    return [sentence for sentence in told if sentence] + _of_machine(environment or {})


def disturbance(records: Iterable[Record], environment: Mapping[str, Any] | None = None) -> str | None:
    """The load that kept processors from a run, as a clause; times measured under it support no verdict."""
    waiting = [share for record in records if _timed(record) and (share := _waiting(record)) is not None]
    most = max(waiting, default=0.0)
    held_up = [f"threads waited for a processor up to {most:.0%} of the time"] if most > _WAITED else []
    return next(iter([*_loads(_runs(environment)), *held_up]), None)


def explanation(
    record: Record, other: Record, ratio: float, environment: Mapping[str, Any] | None
) -> str | None:
    """The load that may explain this ratio of two times, as a clause; None: the ratio stands."""
    load = disturbance([], environment)
    share = max((_waiting(record) or 0.0, _waiting(other) or 0.0))
    if load is None and share > _WAITED and max(ratio, 1 / ratio) * (1 - share) <= 1:
        return f"threads waited for a processor up to {share:.0%} of the time"
    return load


# Beginning of a verdict that the times of a run do not support, and its remedy under load.
COULD_NOT_TELL = "could not tell on this machine now"
IDLE = "an idle machine or fewer --threads would settle it"
_ROUNDS = "more --rounds would settle it."
_LONGER = "use a longer --seq-len or a larger --batch."
_THREADS = "use fewer --threads, or an idle machine."


def _points(records: Sequence[Record], share: Share, limit: float, text: str, help_: str) -> str | None:
    """The text with the points above the limit, and the largest share."""
    found = [(record, value) for record in records if (value := share(record)) is not None and value > limit]
    if not found:
        return None
    largest = max(value for _, value in found)
    return f"{text.format(_names([record for record, _ in found]), f'{largest:.0%}')}; {help_}"


def _names(records: Sequence[Record]) -> str:
    """`window at 256, 512 tokens, exact at 256 tokens and 3 more points`."""
    lengths: dict[str, list[int]] = {}
    for record in records[:_NAMED]:
        lengths.setdefault(record.case.label, []).append(record.case.tokens)
    named = ", ".join(f"{label} at {', '.join(map(str, tokens))} tokens" for label, tokens in lengths.items())
    more = len(records) - _NAMED
    return named if more <= 0 else f"{named} and {more} more {'point' if more == 1 else 'points'}"


def _timed(record: Record) -> bool:
    return record.case.kind == "time" and record.status == "ok" and bool(_samples(record))


def _samples(record: Record) -> tuple[float, ...]:
    # Times that were not finite are null in a file.
    return tuple(time_s for time_s in record.times_s or () if time_s is not None and time_s > 0)


def _half_width(record: Record) -> float | None:
    median, _, high, _ = call_time(record)
    return None if high is None else high / median - 1


def _overhead(record: Record) -> float | None:
    median = call_time(record).median
    return record.empty_call_s / median if record.empty_call_s is not None and median else None


def _waiting(record: Record) -> float | None:
    if record.waited_s is None or record.case.device != "cpu":
        return None
    return record.waited_s / (sum(_samples(record)) * max(record.case.threads, 1))


def _few_rounds(records: Sequence[Record]) -> str | None:
    few = [record for record in records if 0 < len(round_times(record)) < FEWEST_ROUNDS]
    if not few:
        return None
    return (
        f"Few rounds: {_names(few)} had fewer than {FEWEST_ROUNDS}, too few for an interval; "
        f"use --rounds {FEWEST_ROUNDS} or more."
    )


def _fewer_rounds(records: Sequence[Record], most: int) -> str | None:
    short = [record for record in records if record.round_sizes and len(record.round_sizes) < most]
    if not short:
        return None
    return (
        f"Under-sampled: {_names(short)} had fewer than {most} rounds; "
        "raise --budget or --timeout, or let the run finish."
    )


def _of_machine(environment: Mapping[str, Any]) -> list[str]:
    runs = _runs(environment)
    told = [
        *(f"Background load: {load}: times are longer and less certain; {_THREADS}" for load in _loads(runs)),
        *map(_throttled, runs),
        *map(_slowed, runs),
        *map(_slowed_gpu, runs),
    ]
    return list(dict.fromkeys(sentence for sentence in told if sentence))


def _runs(environment: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    runs = (environment or {}).get(DURING)
    return [run for run in runs if isinstance(run, Mapping)] if isinstance(runs, list) else []


def _loads(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Background loads above their limits."""
    found = []
    for name, limit, text in _LOADS:
        largest = max((value for run in runs if (value := _number(run, name)) is not None), default=0.0)
        found += [text.format(f"{largest:.0%}")] if largest > limit else []
    return found


def _throttled(run: Mapping[str, Any]) -> str | None:
    held_s, wall_s = (_number(run, name) for name in ("throttled_s", "wall_s"))
    if held_s is not None and wall_s and held_s > _THROTTLED * wall_s:
        return f"Throttled: a quota withheld the cores for {show_seconds(held_s)}; use fewer --threads."
    return None


def _slowed(run: Mapping[str, Any]) -> str | None:
    before_s, after_s = (_number(run, f"loop_{when}_s") for when in ("before", "after"))
    if not before_s or not after_s or after_s <= (1 + _SLOWED) * before_s:
        return None
    return (
        f"Clock drift: a fixed loop took {after_s / before_s - 1:.0%} longer after the run than before it; "
        f"{_ROUNDS}"
    )


def _slowed_gpu(run: Mapping[str, Any]) -> str | None:
    reasons = run.get("gpu_slowed_by")
    if not isinstance(reasons, list) or not reasons:
        return None
    told = ", ".join(map(str, reasons))
    return f"Throttled: the GPU lowered its clock ({told}); let it cool and measure again."


def _number(run: Mapping[str, Any], name: str) -> float | None:
    value = run.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < math.inf:
        return None
    return float(value)
