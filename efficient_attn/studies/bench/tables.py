"""Tables of a benchmark: one of each setting for the terminal, and all lengths for the page."""

import math
from collections.abc import Iterable, Mapping, Sequence

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION, YARDSTICK
from efficient_attn.report import text
from efficient_attn.report.table import NOT_MEASURED, PREDICTED, UNDECIDED, Table
from efficient_attn.runs.study import Run, Settled
from efficient_attn.stats import estimates
from efficient_attn.stats.predicted_time import crossover
from efficient_attn.studies.bench.comparison import REFERENCES, ROUNDING, Comparison, Row, comparisons

START = "faster from, tokens"

_MILLISECOND, _MEBIBYTE = 1e-3, 2.0**20

_ERRORS = (
    "error: ‖out − exact‖ / ‖exact‖ against float64, median over draws, worst layer. "
    f"{UNIFORM_ATTENTION}: mean of the values. Dimmed or italic: worse than it, or a reference."
)
_SPEEDS = (
    "speed-up: median over rounds, decided once its 95 % interval excludes 1 or lies within 10 % of 1. Two "
    f"runs often differ by a further ±{100 * estimates.SHIFT_HALF_WIDTH:.0f} %. Starred: best decided value "
    "but exact. All lengths: report.html."
)


def tables(records: Sequence[Record], run: Run[Settled]) -> list[Table]:
    """One table of each setting, then details: times, memory and errors at all lengths."""
    settings = comparisons(records)
    shown = [_comparison_table(x, run) for x in settings if x.rows]
    for heading, calls in calls_by_heading(settings, run).items():
        for clock, timed in estimates.by_clock(calls).items():
            caches = " or ".join(sorted({record.case.l2 for record in timed if record.case.l2}))
            notes = [text.QUEUED_NOTE.format(caches)] if clock == estimates.DEVICE_TIME else []
            title = f"{heading}; {clock} per call, ms"
            cost = _cost_table(title, estimates.curves(timed, "time_s"), _MILLISECOND, notes)
            shown += [table._replace(detail=clock != estimates.DEVICE_TIME) for table in cost]
        memory = _cost_table(f"{heading}; peak memory, MiB", estimates.curves(calls, "peak_bytes"), _MEBIBYTE)
        shown += [table._replace(detail=True) for table in memory]
    shown += [_speed_table(x) for x in settings if len({n for row in x.rows for n in row.speeds}) > 1]
    shown += [_error_table(x) for x in settings if len({n for row in x.rows for n in row.errors}) > 1]
    for comparison in settings:
        errors = [record for record in comparison.records if record.case.tokens == comparison.tokens]
        for layer in estimates.grouped(errors, "inputs"):
            shown += text.deviation_table(layer, "output_relative_error")
    return shown


def calls_by_heading(settings: Iterable[Comparison], run: Run[Settled]) -> dict[str, list[Record]]:
    """Times and memory of each setting, in the order of the settings."""
    headings: dict[str, list[Record]] = {}
    for comparison in settings:
        calls = [record for record in comparison.records if record.case.kind in ("time", "memory")]
        if calls:
            # Errors of several models may stand beside the same calls.
            headings.setdefault(heading_of(comparison._replace(inputs=None), run), calls)
    return headings


def _comparison_table(comparison: Comparison, run: Run[Settled]) -> Table:
    column = run.study.column
    shown, errors_at, longest = comparison.rows, comparison.tokens, comparison.longest
    memory_at = longest or max((tokens for row in shown for tokens in row.peaks), default=0)
    error, speed = f"error, {errors_at} tokens", f"speed-up, {longest} tokens"
    memory = f"MiB, {memory_at} tokens"
    further = _FURTHER[column].format(errors=errors_at, longest=longest)
    columns = {
        error: [error_cell(row, errors_at) for row in shown],
        speed: [_speed_cell(row, longest) for row in shown],
        memory: [_memory_cell(row, memory_at) for row in shown],
        START: [start_cell(row) for row in shown],
        further: [_further(column, row, errors_at, longest) for row in shown],
    }
    # Kernels of exact attention are compared in digits.
    backends = [row.backend for row in shown if row.backend not in REFERENCES]
    if {*backends} == {YARDSTICK} and len(backends) > 1:
        columns[f"digits, {errors_at} tokens"] = [_digits(row, errors_at) for row in shown]
    columns = {head: cells for head, cells in columns.items() if {*cells} - {NOT_MEASURED, ""}}
    rows = tuple(zip([row.label for row in shown], *columns.values(), strict=True))
    doubt = _doubt(comparison, run.study.most_rounds)
    notes = (
        *([_ERRORS] if errors_at else []),
        *([f"{text.CORRELATION_NOTE} Worst layer."] if further in columns and column == "corr" else []),
        *([_SPEEDS] if longest else []),
        *text.mark_notes(rows, "extrapolated from shorter lengths", doubt),
        *text.calibration_note(comparison.records),
        *text.failure_notes(comparison.records),
    )
    # Who reads all keys, or approximates nothing, is not compared.
    reading = {row.label for row in shown if errors_at in row.errors and row.errors[errors_at].reads_all}
    exact = [row.label for row in shown if row.is_exact or row.label in reading]
    references = [row.label for row in shown if row.backend in REFERENCES]
    table = Table(heading_of(comparison, run), ("backend", *columns), rows, notes).compared(
        errors=[error],
        scores=[further] if column == "corr" else [],
        speeds=[speed],
        costs=[memory],
        skip=[*exact, *references],
    )
    grey = [(n, place) for n, row in enumerate(rows) if row[0] in references for place in range(len(row))]
    return table._replace(worse=tuple(dict.fromkeys((*table.worse, *grey))))


def _digits(row: Row, tokens: int) -> str:
    """Correct decimal digits of exact attention on the worst layer."""
    error = row.errors.get(tokens)
    if error is None or row.backend in REFERENCES:
        return NOT_MEASURED
    # Equal to float64, whose numbers have 16 digits.
    return f"{-math.log10(max(error.worst, 1e-16)):.1f}"


def _memory_cell(row: Row, tokens: int) -> str:
    peak = row.peaks.get(tokens)
    return _failure(row, "memory") if peak is None else text.three_digits(peak / _MEBIBYTE)


def _failure(row: Row, kind: str) -> str:
    return next((record.status for record in row.failed if record.case.kind == kind), NOT_MEASURED)


def _doubt(comparison: Comparison, rounds: int) -> str:
    """Meaning of a question mark, and how to go on if the budget ended before the rounds."""
    speeds = [speed for row in comparison.rows for speed in row.speeds.values() if speed.samples]
    done = [speed.samples for speed in speeds if speed.outcome == estimates.OPEN]
    if not done:
        return "the interval reaches beyond ×3, or beyond the measured lengths"
    further = "" if min(done) >= rounds else f". {text.CONTINUE}"
    return f"not decided after {min(done)} of at most {rounds} rounds{further}"


# Headings of the fifth column by its option.
_FURTHER = {
    "time": "ms, {longest} tokens",
    "mse": "MSE, {errors} tokens",
    "corr": "correlation, {errors} tokens",
    "keys": "keys read, {errors} tokens",
    "state": "state, KiB",
    "weights": "weights, KiB",
}


def _further(column: str, row: Row, errors_at: int, longest: int) -> str:
    error = row.errors.get(errors_at)
    if column == "time":
        if longest not in row.times:
            return NOT_MEASURED
        return text.show_spread(*estimates.call_time(row.times[longest])[:3], unit=_MILLISECOND)
    if column == "mse":
        return NOT_MEASURED if error is None or error.mse is None else text.show_error(error.mse)
    if column == "corr":
        if error is None or error.correlation is None:
            return NOT_MEASURED
        return f"{text.show_correlation(error.correlation)}{' bland' * error.bland}"
    if column == "keys":
        return NOT_MEASURED if error is None or error.keys is None else f"{100 * error.keys:.2g} %"
    size = getattr(row, f"{column}_bytes")
    return NOT_MEASURED if size is None else text.three_digits(size / 2**10)


def heading_of(comparison: Comparison, run: Run[Settled]) -> str:
    """Inputs of the errors and setting of the calls: `encoder, layers 0, 1, 5: 12 heads of 32, …`."""
    case, free = comparison.case, run.settled.free_cores
    subject = "" if case.of in ("attention", "output") else f"{case.of}: "
    inputs = "" if comparison.inputs is None else f"{text.describe(comparison.inputs)}: "
    cores = "" if free is None else f"; {free}"
    return f"{(subject + inputs)[:1].upper()}{(subject + inputs)[1:]}{text.setting(case)}{cores}"


def error_cell(row: Row | None, tokens: int) -> str:
    """Cell of the error on the worst layer, with its range over layers or its interval over draws."""
    if row is None or tokens not in row.errors:
        return NOT_MEASURED if row is None else _failure(row, "error")
    error = row.errors[tokens]
    worst, low, high = map(text.show_error, error[:3])
    shown = f"{worst} all keys" if error.reads_all else worst
    return shown if low == high or error.worst < ROUNDING else f"{shown}\t{low} to {high}"


def _speed_cell(row: Row, tokens: int) -> str:
    """Cell `5.3×`, `~3.1×` if predicted."""
    speed = row.speeds.get(tokens)
    if speed is None:
        return _failure(row, "time")
    if row.is_exact:
        return "1×"
    shown = text.show_ratio(speed)
    return shown if speed.samples else f"{PREDICTED}{shown.replace(UNDECIDED, '')}"


def start_cell(row: Row) -> str:
    """Cell of the crossover, empty for exact attention and for a single length."""
    return crossover_cell(row.speeds) if len(row.speeds) > 1 and not row.is_exact else ""


def crossover_cell(ratios: Mapping[int, estimates.Typical]) -> str:
    """Cell `910` with its interval, `?` behind if that is wider than the measured lengths."""
    speeds = {tokens: ratio for tokens, ratio in ratios.items() if ratio.low is not None}
    if len(speeds) < 2:
        return UNDECIDED
    value, low, high = crossover(speeds)
    first, last = min(speeds), max(speeds)
    if low is None:
        return f">{last}"
    if high == first:
        return f"≤{first}"
    # Two digits, the precision of timings.
    shown, lowest, highest = (end and str(int(float(f"{end:.2g}"))) for end in (value, low, high))
    lowest = f"below {first}" if low == first else lowest
    if value is None or value == first:
        shown = f">{last}" if value is None else f"≤{first}"
    doubt = UNDECIDED if high is None or low == first else ""
    return f"{shown}{doubt}\t{lowest} {'or more' if high is None else f'to {highest}'}"


def _cost_table(
    title: str, all_curves: Sequence[estimates.Curve], unit: float, notes: Iterable[str] = ()
) -> list[Table]:
    """One table with a column for each length, if any point was tried before the budget ended."""
    points = [point for curve in all_curves for point in curve.points]
    if all(point.record.status == "skipped" for point in points):
        return []
    lengths = sorted({point.tokens for point in points})
    rows = []
    for curve in all_curves:
        costs = {
            point.tokens: point.record.status
            if point.value is None
            else text.show_spread(point.value, point.low, point.high, unit=unit)
            for point in curve.points
        }
        rows.append((curve.label, *(costs.get(tokens, "") for tokens in lengths)))
    heads = ("backend", *map(str, lengths))
    return [Table(title, heads, tuple(rows), (*notes, *text.mark_notes(rows))).compared(costs=heads[1:])]


def _speed_table(comparison: Comparison) -> Table:
    lengths = sorted({tokens for row in comparison.rows for tokens in row.speeds})
    timed = [row for row in comparison.rows if row.speeds]
    rows = tuple((row.label, *(_speed_cell(row, n) for n in lengths)) for row in timed)
    title = f"{text.setting(comparison.case)}; speed-up over exact"
    return Table(title, ("backend", *map(str, lengths)), rows, (_SPEEDS,), detail=True)


def _error_table(comparison: Comparison) -> Table:
    lengths = sorted({tokens for row in comparison.rows for tokens in row.errors})
    rows = tuple((row.label, *(error_cell(row, n) for n in lengths)) for row in comparison.rows if row.errors)
    layers = {n: max(row.errors[n].layers for row in comparison.rows if n in row.errors) for n in lengths}
    # Some lengths have fewer layers.
    most = max(layers.values())
    few = {n: f", {count} layer{'s' * (count > 1)}" for n, count in layers.items() if count < most}
    heads = ("backend", *(f"{n}{few.get(n, '')}" for n in lengths))
    inputs = text.describe(comparison.inputs or "")
    title = f"Relative error of the output: {inputs}, {text.setting(comparison.case)}"
    spread = inputs.partition(", ")[2]
    notes = (_ERRORS, f"Range: over {spread}." if "," in spread else "Interval: 95 % over the draws.")
    table = Table(title, heads, rows, notes).compared(errors=heads[1:])
    return table._replace(detail=True)
