"""Tables of time and peak memory of every backend, with failures."""

from collections.abc import Mapping, Sequence

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import YARDSTICK
from efficient_attn.report.table import Table
from efficient_attn.report.text import QUEUED_NOTE, failure_notes, show_growth, show_ratio, show_spread
from efficient_attn.stats.curves import DEVICE_TIME, Curve, by_clock, by_subject, curves
from efficient_attn.stats.estimates import FEWEST_ROUNDS, RUN_SHIFT
from efficient_attn.studies.bench.calls import call_table
from efficient_attn.studies.bench.crossover import FURTHEST, Crossover, crossovers, gains
from efficient_attn.studies.view import Environment

_MILLISECOND, _MEBIBYTE = 1e-3, 2.0**20

_INTERVALS = (
    f"Intervals (±, and in brackets): 95 %; each round is one sample, at least {FEWEST_ROUNDS} are needed "
    f"(--rounds), and a shift of {RUN_SHIFT:.0%} (standard deviation) from run to run is added, which "
    "no round shows."
)
_LOOKED = (
    f"faster from: tokens above which a call is faster than one of {YARDSTICK}, sought at the lengths of the "
    f"run and beyond as far as {FURTHEST} times the last."
)

_ALIKE = "Compiled and replayed calls are compared with {} compiled or replayed."

Cells = Mapping[str, str]


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """The tables of a benchmark: time, then peak memory, as far as they were measured."""
    made = []
    for subject, group in by_subject(records).items():
        place = "" if subject == "attention" else f" of the {subject}"
        for clock, timed in by_clock(group).items():
            made += _time_tables(clock, place, curves(timed, "time_s"))
        peaks = curves(group, "peak_bytes")
        if peaks:
            bytes_of = {"weights": "parameter_bytes", "state": "state_bytes"}
            more = {name: _largest(group, quantity) for name, quantity in bytes_of.items()}
            made.append(_cost_table(f"Peak memory of a call{place}, MiB", peaks, _MEBIBYTE, more))
    return made


def _time_tables(clock: str, place: str, times: Sequence[Curve]) -> list[Table]:
    """Times at all lengths with speeds and crossovers, and the calls at the longest length."""
    if not times:
        return []
    starts, name = crossover_cells(times), clock.capitalize()
    notes = (_INTERVALS, *([_LOOKED] if starts else []), *_meanings(clock, times))
    more = {"speed, exact = 1": _speeds(times), "faster from": starts}
    made = [_cost_table(f"{name} per call{place}, ms", times, _MILLISECOND, more, notes)]
    if any(curve.measured for curve in times):
        made.append(call_table(f"{name} per call{place} at the longest length", times))
    return made


def crossover_cells(times: Sequence[Curve]) -> dict[str, str]:
    """{label: `910 (850 to 990)`, or the reason why there is no such number}."""
    return {found.label: _show_crossover(found) for found in crossovers(times)}


def _show_crossover(found: Crossover) -> str:
    first, last = found.lengths[0], found.lengths[-1]
    if found.tokens is None:
        return f"all from {first}" if found.always else f"none up to {last}" if found.never else "unclear"
    if found.low is None and found.high is None:
        return "unclear"
    low = f"below {first}" if found.low is None else str(_round(found.low))
    interval = f"{low} or more" if found.high is None else f"{low} to {_round(found.high)}"
    return f"{_round(found.tokens)} ({interval}{', extrapolated' if found.extrapolated else ''})"


def _round(tokens: float) -> int:
    """Tokens to two digits, the precision of timings."""
    return int(float(f"{tokens:.2g}"))


def _speeds(times: Sequence[Curve]) -> Cells:
    ratios = {gain.label: show_ratio(gain.ratio) for gain in gains(times)}
    return ratios and {**{curve.label: "1" for curve in times if curve.backend == YARDSTICK}, **ratios}


def _cost_table(
    title: str,
    all_curves: Sequence[Curve],
    unit: float,
    more: Mapping[str, Cells],
    notes: tuple[str, ...] = (),
) -> Table:
    lengths = sorted({point.tokens for curve in all_curves for point in curve.points})
    more = {name: cells for name, cells in more.items() if cells}
    rows = [
        (
            curve.label,
            *(_cost(curve, tokens, unit) for tokens in lengths),
            show_growth(curve.growth),
            *(cells.get(curve.label, "") for cells in more.values()),
        )
        for curve in all_curves
    ]
    failures = failure_notes([point.record for curve in all_curves for point in curve.points])
    return Table(title, ("backend", *map(str, lengths), "grows as", *more), tuple(rows), (*notes, *failures))


def _meanings(clock: str, times: Sequence[Curve]) -> list[str]:
    """Notes on device times, and on the baseline of compiled or replayed calls."""
    cases = [curve.points[0].record.case for curve in times]
    caches = " or ".join(sorted({case.l2 for case in cases if case.l2}))
    queued = [QUEUED_NOTE.format(caches)] if clock == DEVICE_TIME else []
    return queued + ([_ALIKE.format(YARDSTICK)] if any(case.execution for case in cases) else [])


def _largest(records: Sequence[Record], quantity: str) -> Cells:
    """Bytes at the longest length, in MiB, of every curve that has any."""
    last = {curve: curve.measured[-1] for curve in curves(records, quantity) if curve.measured}
    return {curve.label: _cost(curve, end.tokens, _MEBIBYTE) for curve, end in last.items() if end.value}


def _cost(curve: Curve, tokens: int, unit: float) -> str:
    """The value with its interval, or the status of a failure."""
    point = next((point for point in curve.points if point.tokens == tokens), None)
    if point is None or point.value is None:
        return "" if point is None else point.record.status
    return show_spread(point.value, point.low, point.high, unit=unit)
