"""A comparison as one table and one sentence, both computed from the same records."""

from collections.abc import Mapping, Sequence
from typing import Any

from efficient_attn.analysis.candidates import candidates, not_measured, saves_little
from efficient_attn.analysis.comparison import ROUNDING, Comparison, Contender, comparisons
from efficient_attn.analysis.doubts import IDLE, disturbance
from efficient_attn.report.cost_table import show_ratio, show_spread
from efficient_attn.report.error_table import (
    CONCATENATED,
    CONCATENATED_NOTE,
    describe,
    layer_words,
    show_error,
)
from efficient_attn.report.table import Table, three_digits
from efficient_attn.sweep.layers import single_names, timed_layer
from efficient_attn.sweep.records import Record
from efficient_attn.sweep.sizes import MEAN_OF_VALUES, ORACLE

_MILLISECOND, _MEBIBYTE = 1e-3, 2.0**20

# What a cell says of a cost or an error that was not measured.
_NONE = "–"

# Names of candidates that were not measured, before the rest is only counted.
_MOST_NAMES = 12


def comparison_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each comparison, the fastest first."""
    return [_table(one) for one in comparisons(records)]


def comparison_sentences(
    records: Sequence[Record], max_error: float, environment: Mapping[str, Any] | None = None
) -> list[str]:
    """For each comparison the verdict, and which candidates save no operations.

    Args:
        environment: Of the run: its load and its candidates decide how far the verdict goes.
    """
    told = []
    for one in comparisons(records):
        told += [_sentence(one, max_error, environment), operations_sentence(one.records)]
    return [sentence for sentence in told if sentence is not None]


def heading(one: Comparison) -> str:
    """`encoder, layer 1; 512 tokens, 12 heads of 32, float32, 2 CPU threads`."""
    return f"{describe(one.case.inputs)}; {one.case.tokens} tokens, {_setting(one)}"


def costs_of(one: Comparison) -> dict[str, set[str]]:
    """{label: the costs on whose front it is}."""
    fronts = {"time": one.front("time_s"), "memory": one.front("peak_bytes")}
    return {row.label: {name for name, front in fronts.items() if row in front} for row in one.contenders}


def _setting(one: Comparison) -> str:
    case = one.case
    heads = "1 head" if case.num_heads == 1 else f"{case.num_heads} heads"
    threads = "1 CPU thread" if case.threads == 1 else f"{case.threads} CPU threads"
    where = threads if case.device == "cpu" else case.device
    return f"{heads} of {case.head_dim}, {case.dtype}, {where}"


def _table(one: Comparison) -> Table:
    fronts = costs_of(one)
    exact = one.exact
    rows = tuple(
        (
            row.label,
            _time(row),
            _speed(row, exact),
            _error(row),
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


def _speed(row: Contender, exact: Contender | None) -> str:
    """How many times as fast as exact attention."""
    speed = row.speed(exact)
    return _NONE if speed is None else "1" if row is exact else show_ratio(speed)


def _error(row: Contender) -> str:
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
    labels = {row.label: row.backend for row in one.contenders}
    if MEAN_OF_VALUES in labels.values():
        notes.append(
            f"{MEAN_OF_VALUES}: every query gets the same; an error above it is worse than not attending."
        )
    if ORACLE in labels.values():
        notes.append(
            f"{ORACLE}: the matrix of rank r nearest to the exact weights; finding it takes them, so it is "
            "no method and has no time."
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


def _sentence(one: Comparison, max_error: float, environment: Mapping[str, Any] | None) -> str:
    place = f"On this machine ({_setting(one)}) at {one.case.tokens} tokens ({describe(one.case.inputs)})"
    exact, share = one.exact, f"{100 * max_error:g} %"
    if exact is None:
        return f"{place} exact attention was not measured, so nothing can be compared with it."
    verdict = one.verdict(max_error)
    load = disturbance([row.timed for row in (exact, *verdict.near) if row.timed], environment)
    left = not_measured(environment, one.finished)
    nothing = "nothing measured so far" if left else "nothing"
    both = f"both within {share} of exact{_everywhere(one)} and faster"
    if not verdict.near:
        told = f"{nothing} but exact is within {share} of it{_everywhere(one)}, whatever the times"
        told += "" if one.nearest is None else f"; nearest: {_wrong(one.nearest)}"
    elif load is not None:
        near = ", ".join(_wrong(row) for row in verdict.near)
        told = f"the times do not show now whether anything is {both}: {load}; {IDLE}. "
        told += f"Within {share}, which no load changes: {near}"
    elif verdict.both:
        told = f"{both}: {', '.join(_told(row, exact) for row in verdict.both)}{_alike(verdict.alike)}"
    elif verdict.alike:
        names = ", ".join(row.label for row in verdict.alike)
        told = f"it is unclear whether anything is {both}: the times of {names} overlap those of exact; "
        told += "more --rounds would settle it"
    else:
        answer = "" if left else ", so exact is the answer"
        told = f"{nothing} is {both}{answer}; nearest among what is faster: {_told(verdict.fast, exact)}; "
        told += f"among what is within {share}: {_told(verdict.accurate, exact)}"
    if verdict.partly and load is None:
        told += f"; within {share} on some of the layers only: "
        told += ", ".join(_told(row, exact) for row in verdict.partly)
    return f"{place} {told}.{missing(left, environment)}"


def _everywhere(one: Comparison) -> str:
    return " on every layer" if len(single_names(one.case.inputs)) > 1 else ""


def missing(labels: Sequence[str], environment: Mapping[str, Any] | None) -> str:
    """` Not measured (2 of 5 candidates): window, linformer.`; empty if nothing is missing."""
    if not labels:
        return ""
    more = f" and {len(labels) - _MOST_NAMES} more" if len(labels) > _MOST_NAMES else ""
    names = f"{', '.join(labels[:_MOST_NAMES])}{more}"
    return f" Not measured ({len(labels)} of {len(candidates(environment))} candidates): {names}."


def operations_sentence(records: Sequence[Record]) -> str | None:
    """Which approximations save few operations or none at the length measured."""
    found = saves_little(records)
    if not found:
        return None
    names = ", ".join(f"{label} ({share:.2f}x)" for label, share in found.items())
    return (
        f"Operations, exact attention = 1, of what saves few or none at {records[0].case.tokens} tokens: "
        f"{names}."
    )


def _wrong(row: Contender | None) -> str:
    return "nothing" if row is None else f"{row.label} (error {_error(row)})"


def _told(row: Contender | None, exact: Contender) -> str:
    if row is None:
        return "nothing"
    return f"{row.label} (error {_error(row)}, {_speed(row, exact)} as fast)"


def _alike(rows: Sequence[Contender]) -> str:
    """Those nearly exact whose times overlap those of exact attention."""
    names = ", ".join(row.label for row in rows)
    return f"; the samples do not tell whether {names} is faster" if rows else ""
