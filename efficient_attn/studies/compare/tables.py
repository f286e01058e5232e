"""A comparison as a table, the fastest backend first."""

from collections.abc import Sequence

from efficient_attn.report.error_table import (
    CONCATENATED,
    CONCATENATED_NOTE,
    describe,
    layer_words,
    show_error,
)
from efficient_attn.report.table import Table, show_ratio, show_spread, three_digits
from efficient_attn.runner.layers import single_names, timed_layer
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.studies.compare.analysis import ROUNDING, Comparison, Contender
from efficient_attn.studies.compare.grouping import comparisons

_MILLISECOND, _MEBIBYTE = 1e-3, 2.0**20

# Cell of a cost or an error that was not measured.
_NONE = "–"


def comparison_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each comparison, the fastest first."""
    return [_table(one) for one in comparisons(records)]


def heading(one: Comparison) -> str:
    """`encoder, layer 1; 512 tokens, 12 heads of 32, float32, 2 CPU threads`."""
    return f"{describe(one.case.inputs)}; {one.case.tokens} tokens, {setting(one)}"


def costs_of(one: Comparison) -> dict[str, set[str]]:
    """{label: the costs on whose front it is}."""
    fronts = {"time": one.front("time_s"), "memory": one.front("peak_bytes")}
    return {row.label: {name for name, front in fronts.items() if row in front} for row in one.contenders}


def setting(one: Comparison) -> str:
    case = one.case
    heads = "1 head" if case.num_heads == 1 else f"{case.num_heads} heads"
    threads = "1 CPU thread" if case.threads == 1 else f"{case.threads} CPU threads"
    where = threads if case.device == "cpu" else case.device
    unusual = (
        f", batch {case.batch}" * (case.batch > 1)
        + ", causal" * case.causal
        + ", forward and backward" * case.backward
    )
    return f"{heads} of {case.head_dim}, {case.dtype}, {where}{unusual}"


def _table(one: Comparison) -> Table:
    fronts = costs_of(one)
    exact = one.exact
    rows = tuple(
        (
            row.label,
            _time(row),
            show_speed(row, exact),
            show_row_error(row),
            _NONE if row.peak_bytes is None else three_digits(row.peak_bytes / _MEBIBYTE),
            ", ".join(sorted(fronts[row.label], reverse=True)),
        )
        for row in one.contenders
    )
    error = "error (range)" if len(single_names(one.case.inputs)) > 1 else "error"
    columns = ("backend", "time, ms", "speed, exact = 1", error, "peak memory, MiB", "front")
    return Table(f"Error, time and memory: {heading(one)}", columns, rows, tuple(_notes(one)))


def _time(row: Contender) -> str:
    if row.time_s is None:
        return _NONE
    return show_spread(*row.time_s[:3], unit=_MILLISECOND)


def show_speed(row: Contender, exact: Contender | None) -> str:
    """How many times as fast as exact attention."""
    speed = row.speed(exact)
    return _NONE if speed is None else "1" if row is exact else show_ratio(speed)


def show_row_error(row: Contender) -> str:
    if row.error is None:
        return next((record.status for record in row.failed if record.case.kind == "error"), _NONE)
    shown = show_error(row.error.median)
    if row.layers > 1:
        low, high = show_error(row.error.low), show_error(row.error.high)
        return shown if low == high == shown or row.worst < ROUNDING else f"{shown} ({low} to {high})"
    if row.error.samples == 1 or not row.error.median:
        return shown
    spread = max(row.error.high - row.error.median, row.error.median - row.error.low) / row.error.median
    return f"{shown} ±{spread:.0%}"


def _notes(one: Comparison) -> list[str]:
    notes = [
        "error: ‖out − exact‖ / ‖exact‖ against exact softmax attention in float64. front: nothing else has "
        "both less error and less of that cost.",
        *_layers_note(one),
    ]
    if one.case.inputs.startswith(CONCATENATED):
        notes.append(CONCATENATED_NOTE)
    if any(row.backend == MEAN_OF_VALUES for row in one.contenders):
        notes.append(
            f"{MEAN_OF_VALUES}: every query gets the same; an error above it is worse than not attending."
        )
    draws = {row.error.samples for row in one.contenders if row.drawn and row.error is not None}
    if draws - {1} and len(single_names(one.case.inputs)) == 1:
        notes.append(f"± of errors: over {max(draws)} draws of the random features. ± of times: over rounds.")
    calibrated = [row.label for row in one.contenders if row.calibrated_on]
    if calibrated:
        on = next(row.calibrated_on for row in one.contenders if row.calibrated_on)
        notes.append(f"Calibrated on {on}, outside the time: {', '.join(calibrated)}.")
    return [*notes, *_failures(one)]


def _layers_note(one: Comparison) -> list[str]:
    """The layers of the errors, and the one layer of times and memory."""
    names = single_names(one.case.inputs)
    if len(names) == 1:
        return []
    draws = max((row.error.samples for row in one.contenders if row.drawn and row.error), default=1)
    return [
        f"Errors: median and range over {layer_words(one.case.inputs)}, of random features medians of "
        f"{draws} draws. Times and memory: on {timed_layer(one.case.inputs)}."
    ]


def _failures(one: Comparison) -> list[str]:
    told = (f"{row.label}: {bad.status}: {bad.reason}" for row in one.contenders for bad in row.failed)
    return list(dict.fromkeys(told))
