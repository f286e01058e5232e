"""Views of an advice: of attention alone, errors, speeds and crossovers; of a model, its plans."""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from statistics import median
from typing import Any, NamedTuple

from efficient_attn.errors import DataError
from efficient_attn.limits import read_object
from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import DENSE, MODEL, OWN, PLAN, UNIFORM_ATTENTION, YARDSTICK
from efficient_attn.report.figures import (
    UNIFORM_STYLE,
    Axis,
    Chart,
    Plot,
    Series,
    baseline_style,
    line_styles,
)
from efficient_attn.report.table import Table
from efficient_attn.report.text import (
    calibration_note,
    describe,
    failure_notes,
    setting,
    show_error,
    show_ratio,
)
from efficient_attn.stats.candidates import missing
from efficient_attn.stats.estimates import RUN_SHIFT, Typical, time_ratio
from efficient_attn.stats.predicted_time import crossover
from efficient_attn.studies.advise.plan import BOUND, LIMIT, LOSSLESS, SLIDING
from efficient_attn.studies.bench.comparison import error_limit
from efficient_attn.studies.bench.view import HIGHEST, MARKS, cost_plot
from efficient_attn.studies.swap.analysis import KL, MEAN_POOL, NAMES, OUTPUT_COSINE
from efficient_attn.studies.swap.view import show_quantity
from efficient_attn.studies.swap.view import tables as swap_tables
from efficient_attn.studies.view import NOT_MEASURED, Environment, Plots

# Name of the file that `attach` and `intercept.replace` take.
LAYERS = "layers.json"

# Losses below this are rounding of float32.
_ROUNDING = 1e-8

_NOTES = (
    "error: ‖out − exact‖ / ‖exact‖ against exact attention in float64, median over layers and in brackets "
    f"the worst layer; {UNIFORM_ATTENTION}: an error above it is worse than no attention.",
    "predicted: from calls of at most 1024 tokens and the counted operations, with an interval, which held "
    "207 of 207 measured speed-ups to 4096 tokens; backends that are slower by it are not timed beyond 1024 "
    "tokens, backends no nearer than uniform attention at no length.",
    "faster from: tokens above which a call is faster than one of exact, by the same speed-ups, measured and "
    "predicted, at all lengths.",
)


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """The tables of a model, or of attention alone."""
    if _of_model(records, environment):
        done = [record for record in records if record.case.of == MODEL and record.status != "skipped"]
        return swap_tables(done, environment)
    return [table for shape in _by_shape(records) for table in _attention_tables(shape)]


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The conclusion."""
    if _of_model(records, environment):
        return _model_sentences(records, environment)
    return [text for shape in _by_shape(records) for text in _attention_sentences(shape, environment)]


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """Times against tokens: of attention alone, and of the model; errors if there is no model."""
    times = [record for record in records if record.case.kind == "time" and record.status == "ok"]
    if not times:
        return {}
    if _of_model(records, environment):
        return {"advise": cost_plot(times)}
    return {"advise": _attention_plot(records, error_limit(environment))}


def files(records: Sequence[Record], environment: Environment) -> dict[str, str]:
    """The plan of the longest length at which one is faster, as `attach` takes it."""
    faster = [outcome for outcome in _outcomes(records, environment) if outcome.side == 1]
    attached = _attached(faster[-1]) if faster else None
    return {} if attached is None else {LAYERS: json.dumps(attached, indent=2) + "\n"}


def _of_model(records: Sequence[Record], environment: Environment) -> bool:
    return LIMIT in environment or any(record.case.of == MODEL for record in records)


class Row(NamedTuple):
    """One backend, attention alone.

    Attributes:
        errors: Relative errors of the layers by length and source, the real length first.
        speeds: Speed-ups over exact attention by length, measured or else predicted, without samples.
    """

    label: str
    backend: str
    errors: dict[tuple[int, str], list[float]]
    speeds: dict[int, Typical]


def _by_shape(records: Iterable[Record]) -> list[list[Record]]:
    """Records of attention of the shape of one shipped model each."""
    shapes: dict[tuple[int, int, bool], list[Record]] = {}
    for record in records:
        case = record.case
        shapes.setdefault((case.num_heads, case.head_dim, case.causal), []).append(record)
    return list(shapes.values())


def rows_of(records: Sequence[Record]) -> list[Row]:
    """All backends with an error or a time: exact attention, then the smallest error first."""
    rows = {record.case.label: Row(record.case.label, record.case.backend, {}, {}) for record in records}
    times = {(record.case.label, record.case.tokens): record for record in records if _is_time(record)}
    exact = {record.case.tokens: record for record in times.values() if record.case.backend == YARDSTICK}
    for record in records:
        row, case = rows[record.case.label], record.case
        if case.kind == "error" and record.output_relative_error is not None:
            place = case.tokens, case.inputs.partition("(")[0]
            row.errors.setdefault(place, []).append(record.output_relative_error)
        elif case.kind == "prediction" and record.predicted_speed:
            ends = record.predicted_speed_low, record.predicted_speed_high
            row.speeds[case.tokens] = Typical(record.predicted_speed, *ends, samples=0)
    for (label, tokens), record in times.items():
        if record.case.backend != YARDSTICK and tokens in exact:
            speed, speeds = time_ratio(record, exact[tokens]), rows[label].speeds
            # Too few rounds for an interval say less than a prediction.
            speeds[tokens] = speed if speed.low is not None else speeds.get(tokens, speed)
    ordered = [
        row._replace(errors=dict(sorted(row.errors.items())), speeds=dict(sorted(row.speeds.items())))
        for row in rows.values()
        if row.errors or row.speeds
    ]
    return sorted(ordered, key=lambda row: (row.backend != YARDSTICK, *map(median, row.errors.values())))


def _is_time(record: Record) -> bool:
    return record.case.kind == "time" and record.status == "ok" and bool(record.times_s)


def _attention_tables(records: Sequence[Record]) -> list[Table]:
    """Errors at every length, the speed at the longest length, and the crossover."""
    rows = rows_of(records)
    places = sorted({place for row in rows for place in row.errors})
    heads = (f"error, {describe(source)}, {tokens} tokens" for tokens, source in places)
    body = tuple(
        (
            row.label,
            *(_show_errors(row.errors.get(place)) for place in places),
            "1" if row.backend == YARDSTICK else _show_speed(row) or NOT_MEASURED,
            _show_crossover(row),
        )
        for row in rows
    )
    failures = failure_notes(record for record in records if record.status not in ("ok", "skipped"))
    notes = (*_NOTES, *calibration_note(records), *failures)
    columns = ("backend", *heads, "speed, exact = 1", "faster from")
    return [Table(f"Attention alone: {setting(records[0].case)}", columns, body, notes)] if rows else []


def _show_errors(errors: Sequence[float] | None) -> str:
    """`0.19 (0.22)`: the median over layers, and the worst layer."""
    if errors is None:
        return NOT_MEASURED
    middle, worst = show_error(median(errors)), show_error(max(errors))
    return worst if worst == middle else f"{middle} ({worst})"


def _show_speed(row: Row) -> str:
    """`5.3x at 8192`, or `predicted 3.1x (2.2 to 4.4) at 8192` where it was not timed that far."""
    if not row.speeds:
        return ""
    tokens, speed = list(row.speeds.items())[-1]
    return f"{'' if speed.samples else 'predicted '}{show_ratio(speed)} at {tokens}"


def _show_crossover(row: Row) -> str:
    """`910 (850 to 990)`, or the lengths that it lies beyond; empty if fewer than two were measured."""
    speeds = {tokens: speed for tokens, speed in row.speeds.items() if speed.low is not None}
    if len(speeds) < 2:
        return "unclear" if len(row.speeds) > 1 else ""
    value, low, high = crossover(speeds)
    first, *_, last = speeds
    if low is None:
        return f"none up to {last}"
    if value is None:
        return f"above {last} ({_two_digits(low)} or more)"
    if high == first:
        return f"all from {first}"
    start = f"below {first}" if low == first else _two_digits(low)
    interval = f"{start} or more" if high is None else f"{start} to {_two_digits(high)}"
    return f"below {first} ({interval})" if value == first else f"{_two_digits(value)} ({interval})"


def _two_digits(tokens: float) -> str:
    """Tokens to two digits, the precision of timings."""
    return str(int(float(f"{tokens:.2g}")))


def _attention_sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The backends within the error limit, and the length from which each is faster."""
    rows, times = rows_of(records), [record for record in records if record.case.kind == "time"]
    if not times:
        return []
    limit = error_limit(environment)
    known = [row for row in rows if row.errors and row.backend not in (YARDSTICK, DENSE, UNIFORM_ATTENTION)]
    places = sorted({place for row in rows for place in row.errors})
    # A backend that failed on a layer or at a length is not known to be near.
    layers = {place: max(len(row.errors.get(place, ())) for row in rows) for place in places}
    far = [row for row in known if max(map(max, row.errors.values())) > limit]
    near = [
        row
        for row in known
        if row not in far and {place: len(errors) for place, errors in row.errors.items()} == layers
    ]
    lengths: dict[str, list[str]] = {}
    for tokens, source in places:
        lengths.setdefault(source, []).append(str(tokens))
    at = _listed(f"{_listed(sizes)} tokens ({describe(source)})" for source, sizes in lengths.items())
    refused = {record.case.label for record in records if record.status == "unsupported"}
    left = missing(environment, {row.label for row in rows} | refused)
    text = f"Attention alone on this machine ({setting(times[0].case)}), at {at or 'no length'}: "
    if not known:
        text += "no error was measured."
    elif near:
        text += f"within {100 * limit:g} % of exact on every layer: {', '.join(map(_in_words, near))}."
    else:
        text += f"nothing but exact is within {100 * limit:g} % of it on every layer"
        text += ", so stay with exact" if len(far) == len(known) and not left else " so far"
        text += f"; nearest: {_in_words(known[0])}."
    return [text + left + _left_out(records)]


def _in_words(row: Row) -> str:
    """`window (error 0.52 and 0.97; faster from: 360 (290 to 440); speed 8.5x at 4096, exact = 1)`."""
    text = f"{row.label} (error {_listed(show_error(max(errors)) for errors in row.errors.values())}"
    if start := _show_crossover(row):
        text += f"; faster from: {start}"
    if speed := _show_speed(row):
        text += f"; speed {speed}, {YARDSTICK} = 1"
    return f"{text})"


def _listed(texts: Iterable[str]) -> str:
    """`512, 2048 and 4096`."""
    *first, last = [*texts] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _left_out(records: Sequence[Record]) -> str:
    """A remark on points that did not fit; empty if all did."""
    # Of a resumed run the skipped plan may be another plan than the measured one.
    count = sum(record.status == "skipped" for record in records if record.case.backend != PLAN)
    return f" {count} points did not fit: --resume with a larger --budget measures them." if count else ""


def _attention_plot(records: Sequence[Record], max_error: float) -> Plot:
    """For each shape times of calls and errors of the worst layer, with one legend for all."""
    plots = []
    for shape in _by_shape(records):
        if times := [record for record in shape if _is_time(record)]:
            plot = cost_plot(times)
            plots.append(plot._replace(rows=(_charts(plot.charts[0], rows_of(shape), max_error),)))
    first, *further = plots
    if not further:
        return first._replace(title="Time and error of attention alone")
    rows = []
    for plot in plots:
        time, errors = plot.rows[0]
        assert time is not None
        rows.append((time._replace(notes=(plot.conditions.partition(";")[0],)), errors))
    conditions = f"median with its 95 % interval, with a shift of {RUN_SHIFT:.0%} between runs"
    return Plot("Time and error of attention alone", conditions, tuple(rows))


def _charts(time: Chart, rows: Sequence[Row], max_error: float) -> tuple[Chart, Chart]:
    """The chart of times at doublings of the length, and errors in the same styles."""
    styles = line_styles([(row.label, row.backend) for row in rows if row.backend != UNIFORM_ATTENTION])
    styles[UNIFORM_ATTENTION] = UNIFORM_STYLE
    series = [
        Series(
            row.label,
            tuple(tokens for tokens, _ in row.errors),
            tuple(min(max(errors), HIGHEST) for errors in row.errors.values()),
            styles[row.label],
        )
        for row in rows
        if row.errors and row.backend not in (YARDSTICK, DENSE)
    ]
    values = [max_error, *(value or 0.0 for line in series for value in line.y)]
    series.append(Series(f"{100 * max_error:g} % of exact", (), (max_error,), baseline_style()))
    marks = {mark: f"{mark:g}" for mark in MARKS if min(values) <= mark}
    if HIGHEST in values:
        # A mark just below the word leaves no room for it.
        marks = {mark: text for mark, text in marks.items() if 2 * mark <= HIGHEST} | {HIGHEST: "higher"}
    lengths = sorted({tokens for line in series for tokens in line.x})
    tokens_axis = Axis("sequence length, tokens", "log2", "{:.0f}".format, lengths)
    errors = Chart(
        tokens_axis, Axis("relative output error, worst layer", "log", show_error, marks), tuple(series)
    )
    doublings = [tokens for tokens in time.x.ticks if math.log2(tokens).is_integer()]
    timed = tuple(line._replace(style=styles[line.label]) for line in time.series)
    return time._replace(x=time.x._replace(ticks=doublings or time.x.ticks), series=timed), errors


class Outcome(NamedTuple):
    """Outcome of an advice for a model at one length.

    Attributes:
        side: 1: the plan is within the target and clearly faster; −1: no attention is clearly faster, there
            is no plan, it misses the target, or it is clearly slower; 0: its times leave it open; None: the
            run ended before.
        text: Speed, loss and layers of the plan, or why there is none.
        plan: Record of the plan on held-out inputs.
    """

    tokens: int
    side: int | None
    text: str
    plan: Record | None


def _target(environment: Mapping[str, Any]) -> tuple[str, float]:
    """Quantity and limit of the loss."""
    entry = environment.get(LIMIT)
    entry = entry if isinstance(entry, Mapping) else {}
    limit, quantity = entry.get("limit"), entry.get("quantity")
    sound = isinstance(limit, (int, float)) and 0 <= limit <= sys.float_info.max
    return quantity if quantity in (KL, OUTPUT_COSINE) else MEAN_POOL, float(limit or 0.0) if sound else 0.0


def _outcomes(records: Sequence[Record], environment: Mapping[str, Any]) -> list[Outcome]:
    """One outcome per length, the shortest first."""
    groups: dict[int, list[Record]] = {}
    for record in records:
        if record.case.of == MODEL:
            group = groups.setdefault(record.case.tokens, [])
            group += [record] if record.status == "ok" else []
    return [_outcome(tokens, groups[tokens], *_target(environment)) for tokens in sorted(groups)]


def _outcome(tokens: int, records: Sequence[Record], quantity: str, limit: float) -> Outcome:
    swaps = [record for record in records if record.case.kind == "swap" and record.case.layer is None]
    # A resumed run may choose another plan; the last one counts.
    plan = next((record for record in reversed(swaps) if record.case.label == PLAN), None)
    layers = None if plan is None else parsed_layers(plan.chosen_layers)
    loss = None if plan is None else getattr(plan, quantity)
    bounds = {record.case.label: record for record in records if record.case.kind == BOUND and record.times_s}
    speeds = {label: time_ratio(record, bounds[OWN]) for label, record in bounds.items() if OWN in bounds}
    bound = speeds.get(UNIFORM_ATTENTION)
    side: int | None = None
    text = "not measured to the end"
    if plan is not None and layers and loss is not None:
        lossless = speeds.get(LOSSLESS) if {*layers.values()} == {SLIDING} else None
        side, text = _verification(plan, records, lossless, misses=loss > limit)
        text += f", {NAMES[quantity]} {show_quantity(quantity, loss)}, with {in_ranges(layers)}"
    elif layers == {}:
        side, text = -1, "no plan"
    elif plan is None and bound is not None and bound.low is not None and bound.low <= 1:
        side, text = min(bound.side_of_one, 0), "no attention is clearly faster"
    if LOSSLESS in speeds:
        text += f"; with windows in its sliding layers alone {show_ratio(speeds[LOSSLESS])}"
    if bound is not None and side != 1:
        share = max(1 - 1 / (bound.median or 1.0), 0.0)
        text += f"; attention takes {share:.0%} of the time, so at most {show_ratio(bound)}"
    losses = [
        (value, record.case.label)
        for record in swaps
        if record.case.backend not in (UNIFORM_ATTENTION, PLAN)
        and (value := getattr(record, quantity)) is not None
        and value > _ROUNDING
    ]
    if losses and not layers:
        value, label = min(losses)
        text += f"; nearest: {label} in all layers, {NAMES[quantity]} {show_quantity(quantity, value)}"
    return Outcome(tokens, side, text, plan)


def _verification(
    plan: Record, records: Sequence[Record], lossless: Typical | None, *, misses: bool
) -> tuple[int | None, str]:
    """Side and words of the speed of a plan on held-out inputs, of windows alone on the choosing ones too."""
    times = [record for record in records if _is_time(record) and record.case.inputs == plan.case.inputs]
    models = [record for record in times if record.case.backend == OWN]
    planned = [record for record in times if record.case.options == plan.case.options]
    if misses:
        return -1, "the plan misses the target on held-out inputs"
    gain = time_ratio(planned[-1], models[-1]) if models and planned else lossless
    if gain is None:
        return None, "not timed"
    return gain.side_of_one, f"{'' if gain.side_of_one else 'undecided: '}{show_ratio(gain)} as fast"


def _model_sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The shortest length from which a plan is faster, the outcome of every length, and code for the plan."""
    outcomes, (quantity, limit) = _outcomes(records, environment), _target(environment)
    faster = [outcome for outcome in outcomes if outcome.side == 1]
    # A plan pays from the first of the last lengths that all have one.
    lasting = list(takewhile(lambda outcome: outcome.side == 1, reversed(outcomes)))
    if lasting:
        text = f"Faster from {lasting[-1].tokens} tokens"
    elif faster:
        text = f"Faster at {_listed(str(outcome.tokens) for outcome in faster)} tokens only"
    elif outcomes and all(outcome.side == -1 for outcome in outcomes):
        text = "Nothing is faster on this machine: stay with exact"
    else:
        text = "Nothing is known to be faster"
    text = f"{text} ({NAMES[quantity]} {show_quantity(quantity, limit)})."
    for outcome in outcomes:
        text += f" At {outcome.tokens} tokens {outcome.text}."
    text += _left_out(records)
    return [text, _in_python(faster[-1], environment)] if faster else [text]


def _in_python(outcome: Outcome, environment: Environment) -> str:
    """The lines of Python that use a plan: its file, or a mapping where a backend has no registered name."""
    origin = environment.get(MODEL)
    origin = origin if isinstance(origin, Mapping) else {}
    parts = origin.get("parts")
    request = f'"{LAYERS}"' if _attached(outcome) else "{layer: (backend, options), …}"
    if origin.get("sites") is not None:
        replace = f"efficient_attn.intercept.replace(model, {request}, example=lambda: model(*inputs))"
        code = f"import efficient_attn; {replace}"
        if isinstance(parts, list) and parts:
            modules = ", ".join(f"{name!r}: …" for name in map(str, parts))
            code += f", where model is torch.nn.ModuleDict({{{modules}}}) of the modules that the call runs"
    else:
        code = f"from efficient_attn.integrations.transformers import attach; attach(model, {request})"
        if outcome.plan is not None and outcome.plan.calibrated_on is not None:
            code += "; import efficient_attn; efficient_attn.calibrate(model, **batch)"
    return f"The plan for {outcome.tokens} tokens in Python: {code}"


def _attached(outcome: Outcome) -> dict[str, Any] | None:
    """The plan as `attach` takes it; None with a backend without a registered name, or damaged."""
    try:
        text = "" if outcome.plan is None else outcome.plan.attached_layers or ""
        return read_object(text, "attached_layers")
    except DataError:
        return None


def parsed_layers(text: str | None) -> dict[int, str] | None:
    """{layer: label} of the field `chosen_layers`; None if it is missing or damaged."""
    try:
        layers = {int(layer): label for layer, label in json.loads(text or "null").items()}
    except (ValueError, AttributeError, RecursionError):
        return None
    return layers if all(isinstance(label, str) for label in layers.values()) else None


def in_ranges(chosen: Mapping[int, str]) -> str:
    """`window in layers 0, 2–5 and linformer in layer 1`."""
    groups: dict[str, list[list[int]]] = {}
    for layer in sorted(chosen):
        runs = groups.setdefault(chosen[layer], [])
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    texts = []
    for label, runs in groups.items():
        ranges = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
        texts.append(f"{label} in layer{'s' if sum(map(len, runs)) > 1 else ''} {ranges}")
    return " and ".join(texts)
