"""The advice without a model: one row per backend with errors, speed and crossover, and the conclusion."""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import DENSE, MEAN_OF_VALUES, YARDSTICK
from efficient_attn.report.table import Table
from efficient_attn.report.text import (
    CONCATENATED,
    CONCATENATED_NOTE,
    calibration_note,
    describe,
    failure_notes,
    setting,
    show_error,
    show_range,
    show_ratio,
    three_digits,
)
from efficient_attn.stats.candidates import missing
from efficient_attn.stats.curves import curves
from efficient_attn.stats.noise_warnings import COULD_NOT_TELL, IDLE, disturbance
from efficient_attn.studies.advise.shapes import Shape, shape_of
from efficient_attn.studies.bench.comparison import error_limit
from efficient_attn.studies.bench.crossover import Gain, gains
from efficient_attn.studies.bench.tables import crossover_cells
from efficient_attn.studies.view import Environment

_NONE = "–"
_NOTES = (
    "error: ‖out − exact‖ / ‖exact‖ against exact attention in float64, median over layers and in brackets "
    f"the worst layer; {MEAN_OF_VALUES}: an error above it is worse than no attention.",
    "predicted: from calls of at most 1024 tokens and the counted operations, with an interval, which held "
    "207 of 207 measured speed-ups to 4096 tokens; backends that are slower by it are not timed beyond 1024 "
    "tokens, backends no nearer than the mean of V at no length.",
    "faster from: tokens above which a call is faster than one of exact.",
)

# Length and source of inputs.
Place = tuple[int, str]


class Row(NamedTuple):
    """One backend.

    Attributes:
        errors: Relative errors of the layers by length and source, the real length first.
        gain: Measured speed-up at the longest timed length; None: not timed.
        predicted: Record of the predicted speed-up at the longest length.
        crossover: Length from which it is faster, in words; empty if too few lengths were timed.
    """

    label: str
    backend: str
    errors: dict[Place, list[float]]
    gain: Gain | None
    predicted: Record | None
    crossover: str


def by_shape(records: Iterable[Record]) -> list[list[Record]]:
    """Records of attention of one shape each: of one shipped model."""
    found: dict[Shape, list[Record]] = {}
    for record in records:
        found.setdefault(shape_of(record.case), []).append(record)
    return list(found.values())


def attention_tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """One table for each shape, with errors at every length, speed at the longest, and the crossover."""
    return [table for group in by_shape(records) for table in _tables(group)]


def _tables(records: Sequence[Record]) -> list[Table]:
    rows = rows_of(records)
    places = sorted({place for row in rows for place in row.errors})
    heads = (f"error, {describe(source)}, {tokens} tokens" for tokens, source in places)
    body = tuple(
        (row.label, *(_error(row, place) for place in places), _speed(row), row.crossover) for row in rows
    )
    concatenated = any(source == CONCATENATED for _, source in places)
    failed = failure_notes(one for one in records if one.status not in ("ok", "skipped"))
    notes = (*_NOTES, *calibration_note(records), *([CONCATENATED_NOTE] if concatenated else ()), *failed)
    columns = ("backend", *heads, "speed, exact = 1", "faster from")
    return [Table(f"Attention alone: {setting(records[0].case)}", columns, body, notes)] if rows else []


def attention_sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """For each shape the backends within the error limit, and the length from which each is faster."""
    return [sentence for group in by_shape(records) for sentence in _sentences(group, environment)]


def _sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    rows, times = rows_of(records), [one for one in records if one.case.kind == "time"]
    if not times:
        return []
    limit = error_limit(environment)
    known = [row for row in rows if row.errors and row.backend not in (YARDSTICK, DENSE, MEAN_OF_VALUES)]
    places = sorted({place for row in rows for place in row.errors})
    # A backend that failed on a layer or at a length is not known to be near.
    layers = {place: max(len(row.errors.get(place, ())) for row in rows) for place in places}
    complete = [row for row in known if {place: len(found) for place, found in row.errors.items()} == layers]
    far = [row for row in known if max(map(max, row.errors.values())) > limit]
    near = [row for row in complete if row not in far]
    lengths: dict[str, list[str]] = {}
    for tokens, source in places:
        lengths.setdefault(source, []).append(str(tokens))
    at = _listed(f"{_listed(found)} tokens ({describe(source)})" for source, found in lengths.items())
    refused = {one.case.label for one in records if one.status == "unsupported"}
    left = missing(environment, {row.label for row in rows} | refused)
    named = {row.label for row in near or known[:1]} | {YARDSTICK}
    # Other backends decide nothing in the sentence.
    load = disturbance((one for one in times if one.case.label in named), environment)
    text = f"Attention alone on this machine ({setting(times[0].case)}), at {at or 'no length'}: "
    if not known:
        text += "no error was measured."
    elif near:
        text += f"within {100 * limit:g} % of exact on every layer: {_names(near, timed=load is None)}."
    else:
        text += f"nothing but exact is within {100 * limit:g} % of it on every layer"
        text += ", so stay with exact" if len(far) == len(known) and not left else " so far"
        text += f"; nearest: {_names(known[:1], timed=load is None)}."
    if load is not None:
        text += f" From which length anything is faster: {COULD_NOT_TELL}: {load}; {IDLE}."
    return [text + left + left_out(records)]


def left_out(records: Sequence[Record]) -> str:
    """A remark on points that did not fit; empty if all did."""
    measured = {_question(record) for record in records if record.status == "ok"}
    count = sum(record.status == "skipped" and _question(record) not in measured for record in records)
    return f" {count} points did not fit: --resume with a larger --budget measures them." if count else ""


def _question(record: Record) -> tuple[Any, ...]:
    """The case but for its options, in which a plan of a resumed run differs."""
    case = record.case
    return case.kind, case.label, case.inputs, case.tokens, case.layer


def rows_of(records: Sequence[Record]) -> list[Row]:
    """All backends with an error or a time, the smallest error first."""
    errors: dict[str, dict[Place, list[float]]] = {}
    for record in records:
        if record.case.kind == "error" and record.output_relative_error is not None:
            place = record.case.tokens, record.case.inputs.partition("(")[0]
            own = errors.setdefault(record.case.label, {})
            own.setdefault(place, []).append(record.output_relative_error)
    by_length = sorted(records, key=lambda record: record.case.tokens)
    times = curves(records, "time_s")
    starts, found = crossover_cells(times), {gain.label: gain for gain in gains(times)}
    predicted = {one.case.label: one for one in by_length if one.predicted_speed}
    made = [
        Row(
            label,
            backend,
            dict(sorted(errors.get(label, {}).items())),
            found.get(label),
            predicted.get(label),
            starts.get(label, ""),
        )
        for label, backend in {one.case.label: one.case.backend for one in records}.items()
        if label in errors or label in found
    ]
    return sorted(made, key=_order)


def _order(row: Row) -> tuple[bool, float]:
    """Exact attention, then the smallest error at the real length."""
    return row.backend != YARDSTICK, next((median(all_) for all_ in row.errors.values()), math.inf)


def _error(row: Row, place: Place) -> str:
    """`0.19 (0.22)`: the median over layers, and the worst layer."""
    errors = row.errors.get(place)
    if errors is None:
        return _NONE
    middle, worst = show_error(median(errors)), show_error(max(errors))
    return worst if worst == middle else f"{middle} ({worst})"


def _speed(row: Row) -> str:
    """`5.3x at 8192`, or `predicted 3.1x (2.2 to 4.4) at 8192` where it was not timed that far."""
    if row.backend == YARDSTICK:
        return "1"
    one = row.predicted
    if one is not None and (row.gain is None or row.gain.tokens < one.case.tokens):
        interval = show_range(one.predicted_speed_low or 0.0, one.predicted_speed_high or 0.0)
        return f"predicted {three_digits(one.predicted_speed)}x ({interval}) at {one.case.tokens}"
    return _NONE if row.gain is None else f"{show_ratio(row.gain.ratio)} at {row.gain.tokens}"


def _names(found: Iterable[Row], *, timed: bool) -> str:
    """`window (error 0.52 and 0.97; faster from: 360 (290 to 440); speed 8.5x at 4096, exact = 1)`."""
    texts = []
    for row in found:
        errors = _listed(show_error(max(all_)) for all_ in row.errors.values())
        start = f"; faster from: {row.crossover}" if row.crossover else ""
        speed = f"; speed {_speed(row)}, {YARDSTICK} = 1" if row.gain or row.predicted else ""
        texts.append(f"{row.label} (error {errors}{f'{start}{speed}' if timed else ''})")
    return ", ".join(texts)


def _listed(texts: Iterable[str]) -> str:
    """`512, 2048 and 4096`."""
    *first, last = [*texts] or [""]
    return f"{', '.join(first)} and {last}" if first else last
