"""Tables of error, time and peak memory of every backend, with failures."""

from collections.abc import Mapping, Sequence

from efficient_attn.measure.record import DECODED, Record
from efficient_attn.measure.variants import CEILING, UNIFORM_ATTENTION, YARDSTICK, single_names, timed_layer
from efficient_attn.report.table import NOT_MEASURED, PREDICTED, UNDECIDED, Table
from efficient_attn.report.text import (
    CONCATENATED,
    CONCATENATED_NOTE,
    QUEUED_NOTE,
    READ_NOTE,
    calibration_note,
    describe,
    failure_notes,
    heading,
    layer_words,
    mark_notes,
    setting,
    show_error,
    show_growth,
    show_ratio,
    show_spread,
    three_digits,
)
from efficient_attn.stats.estimates import (
    DEVICE_TIME,
    FEWEST_ROUNDS,
    FURTHEST,
    RUN_SHIFT,
    Curve,
    SpeedUp,
    by_clock,
    by_subject,
    curves,
    on_device,
    speed_ups,
)
from efficient_attn.studies.bench.comparison import (
    GAUSSIAN,
    ROUNDING,
    Comparison,
    Contender,
    by_setting,
    comparisons,
)
from efficient_attn.studies.view import Environment, cost_cells

# Column of speed-ups.
SPEED = "speed, exact 1×"

_MILLISECOND, _MEBIBYTE = 1e-3, 2.0**20

_INTERVALS = (
    f"Interval: 95 % over rounds (at least {FEWEST_ROUNDS}, --rounds) and a shift of {100 * RUN_SHIFT:.0f} % "
    "(standard deviation) between runs."
)
_CROSSOVER = (
    f"faster from: crossover length with {YARDSTICK}, extrapolated to at most {FURTHEST} times the longest "
    "length."
)

_GROWTH = "growth: power of the tokens, from the third longest to the longest length."

_ALIKE = "Compiled calls are compared with compiled {}."

_ONE_TOKEN = "decoded: one new token after all tokens before it."

Cells = Mapping[str, str]


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """Time, peak memory and error at all lengths, and all of them at the longest length with an error."""
    groups = by_setting(comparisons(records))
    shown = []
    subjects = by_subject(records) if many_lengths(records) or not groups else {}
    for subject, group in subjects.items():
        place = "" if subject == "attention" else f" of the {subject}"
        for clock, timed in by_clock(group).items():
            if _begun(times := curves(timed, "time_s")):
                shown.append(_time_table(clock, place, times))
        if _begun(peaks := curves(group, "peak_bytes")):
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
            shown.append(_cost_table(title, peaks, _MEBIBYTE, columns, [_GROWTH]))
    for setting_group in groups:
        if len(setting_group) > 1:
            shown.append(_error_table(setting_group, records))
        shown.append(_comparison_table(setting_group[-1]))
    return shown


def _begun(all_curves: Sequence[Curve]) -> bool:
    """Whether any point was tried before the budget ended."""
    return any(point.record.status != "skipped" for curve in all_curves for point in curve.points)


def many_lengths(records: Sequence[Record]) -> bool:
    """Whether the costs of a backend were measured at more than one length."""
    return any(len(curve.points) > 1 for kind in ("time_s", "peak_bytes") for curve in curves(records, kind))


def _error_table(group: Sequence[Comparison], records: Sequence[Record]) -> Table:
    lengths, last = [row.case.tokens for row in group], group[-1]
    beyond = max(record.case.tokens for record in records) > lengths[-1]
    model = last.inputs.partition("(")[0]
    notes = _error_notes(last)
    if beyond:
        text = f"{model} has {lengths[-1]} tokens. Pass longer q, k and v with --inputs FILE."
        notes = (*notes, text)
    labels = dict.fromkeys(row.label for comparison in reversed(group) for row in comparison.contenders)
    place = f"{describe(last.inputs)}, {setting(last.errors)}"
    rows = tuple((label, *(error_cell(comparison.row(label)) for comparison in group)) for label in labels)
    heads = ("backend", *map(str, lengths))
    return Table(f"Relative error of the output: {place}", heads, rows, notes).compared(errors=heads[1:])


def _comparison_table(comparison: Comparison) -> Table:
    exact, case = comparison.exact, comparison.case
    on_gpu = any(row.timed and row.timed.device_times_s for row in comparison.contenders)
    sparse = any(row.shares and row.shares[0] < 1 for row in comparison.contenders)
    fronts = {"time": comparison.front("time_s"), "memory": comparison.front("peak_bytes")}
    contenders = comparison.contenders
    costs = [cost_cells(row.timed, exact and exact.timed, row.peak_bytes) for row in contenders]
    times, speeds, peaks = zip(*costs, strict=True)
    columns = {"backend": [row.label for row in contenders], "time, ms": times, SPEED: speeds}
    if on_gpu:
        queued = zip(*(_queued_cells(row, exact) for row in contenders), strict=True)
        columns |= zip(("device time, ms", "device speed, exact 1×"), queued, strict=True)
    columns["error"] = list(map(error_cell, contenders))
    columns["MSE"] = [NOT_MEASURED if row.mse is None else show_error(row.mse.median) for row in contenders]
    if sparse:
        shares = zip(*(row.shares or (None, None) for row in contenders), strict=True)
        for head, column in zip(("keys read, %", "weight read, %"), shares, strict=True):
            columns[head] = ["" if share is None else f"{100 * share:.3g}" for share in column]
    columns["memory, MiB"] = peaks
    columns["front"] = [
        ", ".join(name for name, front in fronts.items() if row in front) for row in contenders
    ]
    rows = tuple(zip(*columns.values(), strict=True))
    title = f"Error, time and memory: {heading_of(comparison)}"
    front = "front: no backend has both a smaller error and a smaller cost."
    several = case.inputs != GAUSSIAN and len(single_names(case.inputs)) > 1
    timed = f" Times and memory: on {timed_layer(case.inputs)}." if several else ""
    notes = (
        *_error_notes(comparison),
        *([READ_NOTE] if sparse else []),
        f"{front}{timed}",
        *([QUEUED_NOTE.format(case.l2)] if case.l2 else []),
        *([CONCATENATED_NOTE] if comparison.inputs.startswith(CONCATENATED) else []),
        *calibration_note(comparison.records),
        *mark_notes(rows),
        *failure_notes(comparison.records),
    )
    return Table(title, tuple(columns), rows, notes).compared(
        errors=("error", "MSE"),
        costs=("time, ms", "device time, ms", "memory, MiB"),
        speeds=[name for name in columns if "speed" in name],
    )


def heading_of(comparison: Comparison) -> str:
    """`encoder, layer 1; 512 tokens, 12 heads of 32, float32, 2 CPU threads`."""
    if comparison.case.inputs != GAUSSIAN:
        return heading(comparison.case)
    return f"{comparison.case.tokens} tokens, {setting(comparison.case)}; {inputs_words(comparison)}"


def inputs_words(comparison: Comparison) -> str:
    """`encoder, layers 0, 1, 5`, or `errors on …` and their shape where times are of other inputs."""
    words = describe(comparison.inputs)
    if comparison.case.inputs != GAUSSIAN:
        return words
    return f"errors on {words}, {comparison.errors.num_heads} heads of {comparison.errors.head_dim}"


def _queued_cells(row: Contender, exact: Contender | None) -> tuple[str, str]:
    timed, baseline = (
        on_device(side.timed) if side is not None and side.timed and side.timed.device_times_s else None
        for side in (row, exact)
    )
    return cost_cells(timed, timed if row is exact else baseline, None)[:2]


def error_cell(row: Contender | None) -> str:
    """Cell of the error with its range over layers, or its interval over draws on a single layer."""
    if row is None or row.error is None:
        failed = () if row is None else row.failed
        return next((record.status for record in failed if record.case.kind == "error"), NOT_MEASURED)
    middle, low, high = map(show_error, row.error[:3])
    return middle if low == high or row.worst < ROUNDING else f"{middle}\t{low} to {high}"


def _error_notes(comparison: Comparison) -> tuple[str, ...]:
    layers = single_names(comparison.inputs)
    draws = max((row.error.samples for row in comparison.contenders if row.error), default=1)
    spread = f"range over {layer_words(comparison.inputs)}" if len(layers) > 1 else "95 % over the draws"
    compared = {record.compared_queries for record in comparison.records} - {None}
    queries = f" at {max(compared)} random queries per head" if compared else ""
    return (
        f"error: ‖out − exact‖ / ‖exact‖, exact softmax attention in float64{queries}."
        f"{f' Median of {draws} draws.' if draws > 1 else ''} Interval: {spread}.",
        f"{UNIFORM_ATTENTION}: mean of the values. Dimmed or italic: worse than {UNIFORM_ATTENTION}.",
    )


def _time_table(clock: str, place: str, times: Sequence[Curve]) -> Table:
    """Times at all lengths with speeds and crossovers."""
    compared = speed_ups(times)
    speeds = {row.label: show_ratio(row.last) for row in compared}
    baselines = {curve.label: "1×" for curve in times if speeds and curve.backend == YARDSTICK}
    starts = crossover_cells(compared)
    columns: dict[str, Cells] = {SPEED: {**baselines, **speeds}, "faster from, tokens": starts}
    notes = [_INTERVALS, _GROWTH, *([_CROSSOVER] if starts else [])]
    cases = [curve.points[0].record.case for curve in times]
    if clock == DEVICE_TIME:
        notes.append(QUEUED_NOTE.format(" or ".join(sorted({case.l2 for case in cases if case.l2}))))
    executions = {case.execution for case in cases}
    notes += [_ALIKE.format(YARDSTICK)] if executions - {None, DECODED} else []
    notes += [_ONE_TOKEN] if DECODED in executions else []
    return _cost_table(f"{clock.capitalize()} per call{place}, ms", times, _MILLISECOND, columns, notes)


def crossover_cells(compared: Sequence[SpeedUp]) -> dict[str, str]:
    """{label: cell `910` with its interval, `never`, `< 256` or undecided}."""
    cells = {}
    for row in compared:
        first, last, (tokens, low, high) = min(row.ratios), max(row.ratios), row.crossover
        sides = {ratio.side_of_one for ratio in row.ratios.values()}
        open_below = low is None or low <= first
        if first == last or row.case.backend == CEILING:
            continue
        if tokens is None or tokens <= first:
            cell = f">{last}" if sides == {-1} else UNDECIDED
            cell = f"≤{first}" if sides == {1} else cell
        elif any(ratio.low is None for ratio in row.ratios.values()) or (open_below and high is None):
            cell = UNDECIDED
        else:
            # Two digits, the precision of timings.
            shown, low, high = (end and int(float(f"{end:.2g}")) for end in (tokens, low, high))
            edges = f"{f'below {first}' if open_below else low} {'or more' if high is None else f'to {high}'}"
            cell = f"{PREDICTED if tokens > last else ''}{shown}\t{edges}"
        cells[row.label] = cell
    return cells


def _cost_table(
    title: str,
    all_curves: Sequence[Curve],
    unit: float,
    columns: Mapping[str, Cells],
    notes: Sequence[str] = (),
) -> Table:
    lengths = sorted({point.tokens for curve in all_curves for point in curve.points})
    columns = {name: cells for name, cells in columns.items() if cells}
    rows = []
    for curve in all_curves:
        costs = {
            point.tokens: point.record.status
            if point.value is None
            else show_spread(point.value, point.low, point.high, unit=unit)
            for point in curve.points
        }
        rows.append(
            (
                curve.label,
                *(costs.get(tokens, "") for tokens in lengths),
                show_growth(curve.growth),
                *(cells.get(curve.label, "") for cells in columns.values()),
            )
        )
    failures = failure_notes([point.record for curve in all_curves for point in curve.points])
    heads = ("backend", *map(str, lengths), "growth", *columns)
    table = Table(title, heads, tuple(rows), (*notes, *mark_notes(rows), *failures))
    return table.compared(costs=tuple(map(str, lengths)), speeds=(SPEED,))
