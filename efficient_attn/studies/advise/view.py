"""Views of an advice: errors and speeds of attention alone, or plans of a model."""

import json
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from efficient_attn.measure.variants import DENSE, MODEL, PLAN, UNIFORM_ATTENTION, YARDSTICK
from efficient_attn.report.figures import LIMIT_STYLE, UNIFORM_STYLE, Axis, Chart, Plot, Series, line_styles
from efficient_attn.report.table import NOT_MEASURED, PREDICTED, Table, brief
from efficient_attn.report.text import (
    calibration_note,
    compared,
    describe,
    failure_notes,
    mark_notes,
    setting,
    show_error,
    show_ratio,
)
from efficient_attn.runs.study import Run, Settled
from efficient_attn.stats.estimates import Typical, grouped, time_ratio
from efficient_attn.studies.advise.names import RANDOM_HEADS
from efficient_attn.studies.advise.outcomes import (
    LAYERS,
    attached_plan,
    is_time,
    model_sentences,
    outcomes_of,
    skipped_points,
)
from efficient_attn.studies.advise.record import AdviseRecord
from efficient_attn.studies.advise.targets import AdviseSettled, Targets, relative_recall
from efficient_attn.studies.bench.tables import crossover_cell
from efficient_attn.studies.bench.view import HIGHEST, MARKS, cost_plot
from efficient_attn.studies.swap.view import tables as swap_tables

# Fields that tell the shipped models apart.
SHAPE = ("num_heads", "head_dim", "causal")

_NOTES = (
    "error: ‖out − exact‖ / ‖exact‖, exact attention in float64, median over layers. "
    f"{UNIFORM_ATTENTION}: mean of the values. Dimmed or italic: worse than {UNIFORM_ATTENTION}.",
    "faster from: crossover length with exact, from measured and predicted speed-ups.",
)
# Plans that are verified, in the legend.
_VERIFIED = {PLAN: "the plan, other texts", RANDOM_HEADS: "random heads, other texts"}


def tables(records: Sequence[AdviseRecord], settled: AdviseSettled) -> list[Table]:
    """The tables of a model, or of attention alone."""
    if _of_model(records, settled):
        done = [record for record in records if record.case.of == MODEL and record.status != "skipped"]
        return swap_tables(done)
    return [table for shape in grouped(records, *SHAPE) for table in _attention_tables(shape)]


def sentences(records: Sequence[AdviseRecord], max_error: float, run: Run[AdviseSettled]) -> list[str]:
    """The verdict of each length of a model, or of each shape of attention alone."""
    if _of_model(records, run.settled):
        return model_sentences(records, run)
    shapes = grouped(records, *SHAPE)
    return [text for shape in shapes for text in _attention_sentences(shape, max_error, run.settled)]


def plots(records: Sequence[AdviseRecord], max_error: float, settled: AdviseSettled) -> dict[str, Plot]:
    """Times against tokens: of attention alone, with errors, or of the model.

    Of a plan of key heads, its divergence and recall in place of the times of one length.
    """
    if streaming := [record for record in records if record.streaming_heads and record.copy_recall_exact]:
        return {"advise": _heads_plot(streaming)}
    times = [record for record in records if record.case.kind == "time" and record.status == "ok"]
    if not times:
        return {}
    if _of_model(records, settled):
        return {"advise": cost_plot(times)}
    shapes = [shape for shape in grouped(records, *SHAPE) if _shown_times(shape)]
    return {"advise": _attention_plot(shapes, max_error)} if shapes else {}


def _heads_plot(records: Sequence[AdviseRecord]) -> Plot:
    """Divergence and recall against the number of streaming heads, at the longest length."""
    tokens = max(record.case.tokens for record in records)
    longest = [record for record in records if record.case.tokens == tokens]
    lines: dict[str, list[tuple[int, float | None, float]]] = {}
    for record in sorted(longest, key=lambda record: record.streaming_heads or 0):
        trial = f"by {record.ranked_by or 'rank'}, texts that choose"
        point = record.streaming_heads or 0, record.next_token_kl, 100 * relative_recall(record)
        lines.setdefault(_VERIFIED.get(record.case.label, trial), []).append(point)
    styles = line_styles([(label, label) for label in lines])
    axes = Axis("divergence, nats", "log", show_error), Axis("recall, % of exact")
    charts = []
    for column, axis in enumerate(axes, start=1):
        series = []
        for label, points in lines.items():
            x, y = tuple(point[0] for point in points), tuple(point[column] for point in points)
            series.append(Series(label, x, y, styles[label]))
        charts.append(Chart(Axis(f"streaming key heads, of {longest[0].key_heads}"), axis, tuple(series)))
    title = f"Key heads that stream, {tokens} tokens"
    return Plot(title, setting(longest[0].case), (tuple(charts),))


def files(records: Sequence[AdviseRecord], settled: AdviseSettled) -> dict[str, str]:
    """The plan of the longest length at which one is faster, as `attach` takes it."""
    faster = [outcome for outcome in outcomes_of(records, settled.target or Targets()) if outcome.side == 1]
    attached = attached_plan(faster[-1]) if faster else None
    return {} if attached is None else {LAYERS: json.dumps(attached, indent=2) + "\n"}


def _of_model(records: Sequence[AdviseRecord], settled: AdviseSettled) -> bool:
    return settled.target is not None or any(record.case.of == MODEL for record in records)


class Row(NamedTuple):
    """One backend: errors of the layers and speed-ups by length, which are predicted if without samples."""

    label: str
    backend: str
    errors: dict[int, list[float]]
    speeds: dict[int, Typical]


def rows_of(records: Sequence[AdviseRecord]) -> list[Row]:
    """All backends with an error or a time: exact attention, then the smallest error first."""
    rows = {record.case.label: Row(record.case.label, record.case.backend, {}, {}) for record in records}
    times = {(record.case.label, record.case.tokens): record for record in records if is_time(record)}
    exact = {record.case.tokens: record for record in times.values() if record.case.backend == YARDSTICK}
    for record in records:
        row, case = rows[record.case.label], record.case
        if case.kind == "error" and record.output_relative_error is not None:
            row.errors.setdefault(case.tokens, []).append(record.output_relative_error)
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


def _attention_tables(records: Sequence[AdviseRecord]) -> list[Table]:
    """Errors at every length, the speed at the longest length, and the crossover."""
    rows = rows_of(records)
    lengths = sorted({tokens for row in rows for tokens in row.errors})
    heads = [f"error at {tokens}, tokens" for tokens in lengths]
    longest = max((tokens for row in rows for tokens in row.speeds), default=0)
    body = []
    for row in rows:
        errors = (_show_errors(row.errors.get(tokens)) for tokens in lengths)
        body.append((row.label, *errors, _show_speed(row, longest), _start(row)))
    failures = failure_notes(record for record in records if record.status not in ("ok", "skipped"))
    notes = (*_NOTES, *mark_notes(body), *calibration_note(records), *failures)
    speed = f"speed at {longest}, exact 1×" if longest else "speed, exact 1×"
    columns = ("backend", *heads, speed, "faster from, tokens")
    sources = {record.case.inputs.partition("(")[0] for record in records if record.case.kind == "error"}
    inputs = f" ({describe(*sources)})" if len(sources) == 1 else ""
    table = Table(f"Attention alone{inputs}: {setting(records[0].case)}", columns, tuple(body), notes)
    return [table.compared(errors=heads, speeds=(speed,))] if rows else []


def _show_errors(errors: Sequence[float] | None) -> str:
    """Cell `0.19` of the median over layers, with the worst layer."""
    if errors is None:
        return NOT_MEASURED
    middle, worst = show_error(median(errors)), show_error(max(errors))
    return worst if worst == middle else f"{middle}\tworst {worst}"


def _show_speed(row: Row, tokens: int) -> str:
    """Cell `5.3×`, `~3.1×` if predicted."""
    speed = row.speeds.get(tokens)
    if speed is None:
        return "1×" if tokens and row.backend == YARDSTICK else NOT_MEASURED
    return f"{'' if speed.samples else PREDICTED}{show_ratio(speed)}"


def _start(row: Row) -> str:
    """Cell of the crossover, empty for a single length."""
    return crossover_cell(row.speeds) if len(row.speeds) > 1 else ""


def _attention_sentences(records: Sequence[AdviseRecord], limit: float, settled: Settled) -> list[str]:
    """The backends within the error limit on every layer and at every length, or the nearest one."""
    rows, times = rows_of(records), [record for record in records if record.case.kind == "time"]
    if not times:
        return []
    text = f"Attention alone ({setting(times[0].case)})"
    lengths = {tokens for row in rows for tokens in row.errors}
    if not lengths:
        return [f"{text}: nothing measured.{skipped_points(records)}"]
    # A backend that failed on a layer or at a length is not known to be near.
    layers = {tokens: max(len(row.errors.get(tokens, ())) for row in rows) for tokens in lengths}
    baselines = (YARDSTICK, DENSE, UNIFORM_ATTENTION)
    candidates = [row for row in rows if row.errors and row.backend not in baselines]
    near = [
        _in_words(row)
        for row in candidates
        if max(map(max, row.errors.values())) <= limit
        and {tokens: len(errors) for tokens, errors in row.errors.items()} == layers
    ]
    errors = [record for record in records if record.case.kind == "error"]
    failed = {record.case.label for record in errors if record.status not in ("ok", "skipped")}
    undecided = [
        row for row in candidates if row.label not in failed and max(map(max, row.errors.values())) <= limit
    ]
    refused = {record.case.label for record in records if record.status == "unsupported"}
    left = settled.missing({row.label for row in rows} | refused)
    if near:
        text += f" is within {100 * limit:g} % of exact on every layer with {', '.join(near)}."
    elif undecided:
        lacking = [n for n in layers if any(len(row.errors.get(n, ())) < layers[n] for row in undecided)]
        text += f": whether a backend is within {100 * limit:g} % of exact on every layer is not known "
        text += f"(skipped at {', '.join(map(str, sorted(lacking)))}); nearest: {_in_words(undecided[0])}."
    else:
        nearest = f"; nearest: {_in_words(candidates[0])}" if candidates else ""
        measured = "measured backend" if left else "backend"
        text += f": no {measured} is within {100 * limit:g} % of exact on every layer{nearest}."
    return [text + left + skipped_points(records)]


def _in_words(row: Row) -> str:
    """`window (error 0.52, speed 8× at 4096 tokens, faster from 360)`."""
    parts = [f"error {show_error(max(map(max, row.errors.values())))}"]
    if row.speeds:
        parts.append(f"speed {brief(_show_speed(row, max(row.speeds)))} at {max(row.speeds)} tokens")
    if (start := brief(_start(row)))[:1].isdigit():
        parts.append(f"faster from {start}")
    return f"{row.label} ({', '.join(parts)})"


def _shown_times(records: Sequence[AdviseRecord]) -> list[AdviseRecord]:
    """Times of the backends that have a row: a budget may end with times of exact attention alone."""
    labels = {row.label for row in rows_of(records)}
    return [record for record in records if is_time(record) and record.case.label in labels]


def _attention_plot(shapes: Sequence[Sequence[AdviseRecord]], max_error: float) -> Plot:
    """For each shape times of calls and errors of the worst layer, with one legend for all."""
    rows = []
    for shape in shapes:
        plot = cost_plot(_shown_times(shape))
        time, errors = _charts(plot.charts[0], rows_of(shape), max_error)
        words, _, intervals = plot.conditions.partition("; ")
        rows.append((time._replace(notes=(words,) if len(shapes) > 1 else ()), errors))
    conditions = plot.conditions if len(shapes) == 1 else intervals
    return Plot("Time and error of attention alone", conditions, tuple(rows))


def _charts(time: Chart, rows: Sequence[Row], max_error: float) -> tuple[Chart, Chart]:
    """Times with ticks at powers of two, and errors of the worst layer in the same styles."""
    styles = line_styles([(row.label, row.backend) for row in rows if row.backend != UNIFORM_ATTENTION])
    styles[UNIFORM_ATTENTION] = UNIFORM_STYLE
    series = [
        Series(
            row.label,
            # A line without marks shows nothing of a single point, and one without lengths crosses the chart.
            () if row.backend == UNIFORM_ATTENTION and len(row.errors) == 1 else tuple(row.errors),
            tuple(min(max(errors), HIGHEST) for errors in row.errors.values()),
            styles[row.label],
            hints=tuple(f"measured: {show_error(max(errors))}" for errors in row.errors.values()),
        )
        for row in rows
        if row.errors and row.backend not in (YARDSTICK, DENSE)
    ]
    values = [max_error, *(value or 0.0 for line in series for value in line.y)]
    series.append(Series(f"{100 * max_error:g} % of exact", (), (max_error,), LIMIT_STYLE))
    # A mark just below a word leaves no room for it.
    word, most = ({HIGHEST: f"> {HIGHEST:g}"}, HIGHEST / 2) if HIGHEST in values else ({}, HIGHEST)
    marks = {mark: f"{mark:g}" for mark in MARKS if min(values) <= mark <= most} | word
    lengths = sorted({tokens for line in series for tokens in line.x})
    errors = Chart(
        Axis("sequence length, tokens", "log2", "{:.0f}".format, lengths),
        Axis("relative output error, worst layer", "log", show_error, marks),
        tuple(series),
    )
    doublings = [tokens for tokens in time.x.ticks if math.log2(tokens).is_integer()]
    speeds = {row.label: row.speeds for row in rows}
    timed = tuple(
        _with_predictions(line, speeds[line.label])._replace(style=styles[line.label]) for line in time.series
    )
    return time._replace(x=time.x._replace(ticks=doublings or time.x.ticks), series=timed), errors


def _with_predictions(line: Series, speeds: Mapping[int, Typical]) -> Series:
    """Line of times with lengths that were only predicted, which have no place on its axis."""
    predicted = {
        tokens: speed for tokens, speed in speeds.items() if not speed.samples and tokens not in line.x
    }
    texts = tuple(f"predicted against exact: {compared(speed)}" for speed in predicted.values())
    y = (*line.y, *(None for _ in predicted))
    return line._replace(x=(*line.x, *predicted), y=y, hints=(*line.hints, *texts))
