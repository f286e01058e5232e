"""A comparison as a table, the fastest backend first."""

from collections.abc import Sequence

from efficient_attn.report.error_table import (
    CONCATENATED,
    CONCATENATED_NOTE,
    describe,
    layer_words,
    show_error,
)
from efficient_attn.report.notes import calibration_note, failure_notes, setting
from efficient_attn.report.table import Table, show_ratio, show_spread, three_digits
from efficient_attn.runner.layers import single_names, timed_layer
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.studies.compare.analysis import ROUNDING, Comparison, Contender, comparisons
from efficient_attn.studies.view import Environment, record_tables

_MILLISECOND, _MEBIBYTE = 1e-3, 2.0**20

# Cell of a cost or an error that was not measured.
_NONE = "–"


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """One table for each comparison, the fastest first; without any the records as they are."""
    found = [_table(one) for one in comparisons(records)]
    return found or record_tables(records, environment)


def heading(one: Comparison) -> str:
    """`encoder, layer 1; 512 tokens, 12 heads of 32, float32, 2 CPU threads`."""
    return f"{describe(one.case.inputs)}; {one.case.tokens} tokens, {setting(one.case)}"


def show_speed(row: Contender, exact: Contender | None) -> str:
    """Speed-up over exact attention."""
    speed = row.speed(exact)
    return _NONE if speed is None else "1" if row is exact else show_ratio(speed)


def show_row_error(row: Contender) -> str:
    """The error with its range over layers, or with its interval over draws on a single layer."""
    if row.error is None:
        return next((record.status for record in row.failed if record.case.kind == "error"), _NONE)
    middle, low, high = map(show_error, row.error[:3])
    return middle if low == high or row.worst < ROUNDING else f"{middle} ({low} to {high})"


def _table(one: Comparison) -> Table:
    exact, fronts = one.exact, {"time": one.front("time_s"), "memory": one.front("peak_bytes")}
    rows = tuple(
        (
            row.label,
            _NONE if row.time_s is None else show_spread(*row.time_s[:3], unit=_MILLISECOND),
            show_speed(row, exact),
            show_row_error(row),
            _NONE if row.peak_bytes is None else three_digits(row.peak_bytes / _MEBIBYTE),
            ", ".join(name for name, front in fronts.items() if row in front),
        )
        for row in one.contenders
    )
    columns = ("backend", "time, ms", "speed, exact = 1", "error", "peak memory, MiB", "front")
    return Table(f"Error, time and memory: {heading(one)}", columns, rows, _notes(one))


def _notes(one: Comparison) -> tuple[str, ...]:
    several = len(single_names(one.case.inputs)) > 1
    draws = max((row.error.samples for row in one.contenders if row.error), default=1)
    range_ = f"range over {layer_words(one.case.inputs)}" if several else "95 % interval over the draws"
    return (
        "error: ‖out − exact‖ / ‖exact‖ against exact softmax attention in float64; of random features the "
        f"median of {draws} draws; in brackets the {range_}. front: nothing else has both less error and "
        f"less of that cost.{f' Times and memory: on {timed_layer(one.case.inputs)}.' if several else ''}",
        f"{MEAN_OF_VALUES}: every query gets the same; an error above it is worse than not attending.",
        *([CONCATENATED_NOTE] if one.case.inputs.startswith(CONCATENATED) else []),
        *calibration_note(one.records),
        *failure_notes(one.records),
    )
