"""Tables of error, time and peak memory of every backend, with failures."""

from collections.abc import Mapping, Sequence

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import CEILING, UNIFORM_ATTENTION, YARDSTICK, single_names, timed_layer
from efficient_attn.report.table import NOT_MEASURED, UNDECIDED, Table
from efficient_attn.report.text import (
    QUEUED_NOTE,
    calibration_note,
    describe,
    failure_notes,
    layer_words,
    mark_notes,
    setting,
    show_error,
    show_ratio,
    show_spread,
    three_digits,
)
from efficient_attn.runs.default_view import cost_cells
from efficient_attn.stats.estimates import (
    DEVICE_TIME,
    FEWEST_ROUNDS,
    RUN_SHIFT,
    Curve,
    SpeedUp,
    Typical,
    by_clock,
    by_subject,
    curves,
    speed_ups,
)
from efficient_attn.stats.predicted_time import crossover
from efficient_attn.studies.bench.comparison import (
    GAUSSIAN,
    ROUNDING,
    Comparison,
    Contender,
    by_setting,
    comparisons,
)

# Column of speed-ups.
SPEED = "speed, exact 1×"

_MILLISECOND, _MEBIBYTE = 1e-3, 2.0**20

_INTERVALS = (
    f"Interval: 95 % over rounds (at least {FEWEST_ROUNDS}, --rounds) and a shift of {100 * RUN_SHIFT:.0f} % "
    "(standard deviation) between runs."
)
_FRONT = "front: no backend has both a smaller error and a smaller cost."
_UNIFORM = f"{UNIFORM_ATTENTION}: mean of the values. Dimmed or italic: worse than {UNIFORM_ATTENTION}."

Cells = Mapping[str, str]


def tables(records: Sequence[Record]) -> list[Table]:
    """Time, peak memory and error at all lengths, and all of them at the longest length with an error."""
    groups = by_setting(comparisons(records))
    shown = []
    for subject, group in subjects_alone(records, groups).items():
        place = "" if subject == "attention" else f" of the {subject}"
        for clock, timed in by_clock(group).items():
            times = curves(timed, "time_s")
            compared = speed_ups(times)
            speeds = {row.label: show_ratio(row.last) for row in compared}
            baselines = {curve.label: "1×" for curve in times if speeds and curve.backend == YARDSTICK}
            columns = {SPEED: {**baselines, **speeds}, "faster from, tokens": crossover_cells(compared)}
            caches = " or ".join(sorted({record.case.l2 for record in timed if record.case.l2}))
            notes = [_INTERVALS, *([QUEUED_NOTE.format(caches)] if clock == DEVICE_TIME else [])]
            title = f"{clock.capitalize()} per call{place}, ms"
            shown += _cost_tables(title, times, _MILLISECOND, columns, notes)
        # Bytes at the longest length, of every curve that has any.
        columns = {
            name: {
                curve.label: three_digits(curve.measured[-1].value / _MEBIBYTE)
                for curve in curves(group, quantity)
                if curve.measured and curve.measured[-1].value
            }
            for name, quantity in (("weights", "parameter_bytes"), ("state", "state_bytes"))
        }
        title = f"Peak memory of a call{place}, MiB"
        shown += _cost_tables(title, curves(group, "peak_bytes"), _MEBIBYTE, columns)
    longest = max((record.case.tokens for record in records), default=0)
    for setting_group in groups:
        if len(setting_group) > 1:
            shown.append(_error_table(setting_group, longest))
        shown.append(_comparison_table(setting_group[-1]))
    return shown


def subjects_alone(
    records: Sequence[Record], groups: Sequence[Sequence[Comparison]]
) -> dict[str, list[Record]]:
    """Group costs by subject. Empty when the comparison table already shows them."""
    subjects = by_subject(records)
    queued = any(record.device_times_s for record in records)
    both = (*curves(records, "time_s"), *curves(records, "peak_bytes"))
    single = len(subjects) == 1 and all(len(curve.points) == 1 for curve in both)
    return {} if groups and single and not queued else subjects


def crossover_cells(compared: Sequence[SpeedUp]) -> dict[str, str]:
    """Cells of the crossover of every backend with several lengths, by label."""
    rows = [row for row in compared if len(row.ratios) > 1 and row.case.backend != CEILING]
    return {row.label: crossover_cell(row.ratios) for row in rows}


def crossover_cell(ratios: Mapping[int, Typical]) -> str:
    """Cell `910` with its interval, or the lengths that it lies beyond."""
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
    return f"{shown}\t{lowest} {'or more' if high is None else f'to {highest}'}"


def _cost_tables(
    title: str,
    all_curves: Sequence[Curve],
    unit: float,
    columns: Mapping[str, Cells],
    notes: Sequence[str] = (),
) -> list[Table]:
    """One table with a column for each length, if any point was tried before the budget ended."""
    points = [point for curve in all_curves for point in curve.points]
    if all(point.record.status == "skipped" for point in points):
        return []
    lengths = sorted({point.tokens for point in points})
    columns = {name: cells for name, cells in columns.items() if cells}
    rows = []
    for curve in all_curves:
        costs = {
            point.tokens: point.record.status
            if point.value is None
            else show_spread(point.value, point.low, point.high, unit=unit)
            for point in curve.points
        }
        cells = (
            *(costs.get(tokens, "") for tokens in lengths),
            *(c.get(curve.label, "") for c in columns.values()),
        )
        rows.append((curve.label, *cells))
    heads = ("backend", *map(str, lengths), *columns)
    notes = (*notes, *mark_notes(rows), *failure_notes([point.record for point in points]))
    return [
        Table(title, heads, tuple(rows), notes).compared(costs=heads[1 : len(lengths) + 1], speeds=(SPEED,))
    ]


def _error_table(group: Sequence[Comparison], longest: int) -> Table:
    last = group[-1]
    notes = _error_notes(last)
    if longest > last.case.tokens:
        model = last.inputs.partition("(")[0]
        notes += (f"{model} has {last.case.tokens} tokens. Pass longer q, k and v with --inputs FILE.",)
    labels = dict.fromkeys(row.label for comparison in reversed(group) for row in comparison.contenders)
    rows = tuple((label, *(error_cell(comparison.row(label)) for comparison in group)) for label in labels)
    heads = ("backend", *(str(comparison.case.tokens) for comparison in group))
    title = f"Relative error of the output: {describe(last.inputs)}, {setting(last.errors)}"
    return Table(title, heads, rows, notes).compared(errors=heads[1:])


def _comparison_table(comparison: Comparison) -> Table:
    case, contenders = comparison.case, comparison.contenders
    fronts = {"time": comparison.front("time_s"), "memory": comparison.front("peak_bytes")}
    baseline = comparison.exact and comparison.exact.timed
    rows = []
    for row in contenders:
        time, speed, peak = cost_cells(row.timed, baseline, row.peak_bytes)
        front = ", ".join(name for name, front in fronts.items() if row in front)
        mse = NOT_MEASURED if row.mse is None else show_error(row.mse.median)
        rows.append((row.label, time, speed, error_cell(row), mse, peak, front))
    columns = ("backend", "time, ms", SPEED, "error", "MSE", "memory, MiB", "front")
    several = case.inputs != GAUSSIAN and len(single_names(case.inputs)) > 1
    notes = (
        *_error_notes(comparison),
        f"{_FRONT} Times and memory: on {timed_layer(case.inputs)}." if several else _FRONT,
        *calibration_note(comparison.records),
        *mark_notes(rows),
        *failure_notes(comparison.records),
    )
    return Table(f"Error, time and memory: {heading_of(comparison)}", columns, tuple(rows), notes).compared(
        errors=("error", "MSE"), costs=("time, ms", "memory, MiB"), speeds=(SPEED,)
    )


def heading_of(comparison: Comparison) -> str:
    """Inputs of a comparison, its length and setting."""
    return f"{inputs_words(comparison)}; {comparison.case.tokens} tokens, {setting(comparison.case)}"


def inputs_words(comparison: Comparison) -> str:
    """`encoder, layers 0, 1, 5`, or `errors on …` and their shape where times are of other inputs."""
    words = describe(comparison.inputs)
    if comparison.case.inputs != GAUSSIAN:
        return words
    return f"errors on {words}, {comparison.errors.num_heads} heads of {comparison.errors.head_dim}"


def error_cell(row: Contender | None) -> str:
    """Cell of the error with its range over layers, or its interval over draws on a single layer."""
    if row is None or row.error is None:
        failed = () if row is None else row.failed
        return next((record.status for record in failed if record.case.kind == "error"), NOT_MEASURED)
    middle, low, high = map(show_error, row.error[:3])
    return middle if low == high or row.worst < ROUNDING else f"{middle}\t{low} to {high}"


def _error_notes(comparison: Comparison) -> tuple[str, ...]:
    several = len(single_names(comparison.inputs)) > 1
    spread = f"range over {layer_words(comparison.inputs)}" if several else "95 % over the draws"
    compared = max((record.compared_queries or 0 for record in comparison.records), default=0)
    queries = f" at {compared} random queries per head" if compared else ""
    text = f"error: ‖out − exact‖ / ‖exact‖, exact softmax attention in float64{queries}, median over draws."
    return f"{text} Interval: {spread}.", _UNIFORM
