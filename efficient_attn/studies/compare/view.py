"""A comparison as a table, the fastest backend first, its verdict in one sentence, and its figure."""

from collections.abc import Iterable, Sequence

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import MEAN_OF_VALUES, single_names, timed_layer
from efficient_attn.report.table import Table
from efficient_attn.report.text import (
    CONCATENATED,
    CONCATENATED_NOTE,
    QUEUED_NOTE,
    calibration_note,
    describe,
    failure_notes,
    heading,
    layer_words,
    setting,
    show_error,
)
from efficient_attn.stats.candidates import missing, operations_sentence
from efficient_attn.stats.estimates import on_device
from efficient_attn.stats.noise_warnings import COULD_NOT_TELL, IDLE, disturbance
from efficient_attn.studies.compare.analysis import (
    ROUNDING,
    Comparison,
    Contender,
    asked_error,
    comparisons,
    nearest,
)
from efficient_attn.studies.compare.plot import comparison_plot
from efficient_attn.studies.view import NOT_MEASURED, Environment, Plots, cost_cells, record_tables


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The figure of all comparisons."""
    return {"comparison": comparison_plot(records, asked_error(environment))} if comparisons(records) else {}


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """One table for each comparison, the fastest first; without any the records as they are."""
    found = [_table(one) for one in comparisons(records)]
    return found or record_tables(records, environment)


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """For each comparison the verdict, and which candidates save no operations."""
    found = []
    for one in comparisons(records):
        found += [_verdict(one, environment), operations_sentence(one.records)]
    return [sentence for sentence in found if sentence is not None]


def _table(one: Comparison) -> Table:
    on_gpu = any(row.timed and row.timed.device_times_s for row in one.contenders)
    fronts = {"time": one.front("time_s"), "memory": one.front("peak_bytes")}
    rows = []
    for row in one.contenders:
        time, speed, peak = cost_cells(row.timed, one.exact and one.exact.timed, row.peak_bytes)
        front = ", ".join(name for name, front in fronts.items() if row in front)
        queued = _queued_cells(row, one.exact) if on_gpu else ()
        rows.append((row.label, time, speed, *queued, _error(row), peak, front))
    device = ("device time, ms", "device speed, exact = 1") if on_gpu else ()
    columns = ("backend", "time, ms", "speed, exact = 1", *device, "error", "peak memory, MiB", "front")
    return Table(f"Error, time and memory: {heading(one.case)}", columns, tuple(rows), _notes(one))


def _queued_cells(row: Contender, exact: Contender | None) -> tuple[str, str]:
    """Device time and speed-up by it."""
    timed = [None if one is None else one.timed for one in (row, exact)]
    own, its = (on_device(one) if one is not None and one.device_times_s else None for one in timed)
    return cost_cells(own, own if row is exact else its, None)[:2]


def _error(row: Contender) -> str:
    """The error with its range over layers, or with its interval over draws on a single layer."""
    if row.error is None:
        return next((record.status for record in row.failed if record.case.kind == "error"), NOT_MEASURED)
    middle, low, high = map(show_error, row.error[:3])
    return middle if low == high or row.worst < ROUNDING else f"{middle} ({low} to {high})"


def _notes(one: Comparison) -> tuple[str, ...]:
    several = len(single_names(one.case.inputs)) > 1
    draws = max((row.error.samples for row in one.contenders if row.error), default=1)
    range_ = f"range over {layer_words(one.case.inputs)}" if several else "95 % interval over the draws"
    return (
        "error: ‖out − exact‖ / ‖exact‖ against exact softmax attention in float64; of random features the "
        f"median of {draws} draws; in brackets the {range_}. front: nothing else has both less error and "
        f"less of that cost.{f' Times and memory: on {timed_layer(one.case.inputs)}.' if several else ''}",
        f"{MEAN_OF_VALUES}: every query gets the same; an error above it is worse than not attending.",
        *([QUEUED_NOTE.format(one.case.l2)] if one.case.l2 else []),
        *([CONCATENATED_NOTE] if one.case.inputs.startswith(CONCATENATED) else []),
        *calibration_note(one.records),
        *failure_notes(one.records),
    )


def _verdict(one: Comparison, environment: Environment) -> str:
    case, max_error = one.case, asked_error(environment)
    place = f"On this machine ({setting(case)}) at {case.tokens} tokens ({describe(case.inputs)})"
    exact, share = one.exact, f"{100 * max_error:g} %"
    if exact is None:
        return f"{place} exact attention was not measured, so nothing can be compared with it."
    everywhere = " on every layer" if len(single_names(case.inputs)) > 1 else ""
    near = one.near(max_error)
    load = disturbance([row.timed for row in (exact, *near) if row.timed], environment)
    finished = {row.label for row in one.contenders if row.failed or (row.error and row.timed)}
    left = missing(environment, finished)
    nothing = "nothing measured so far" if left else "nothing"
    both = f"both within {share} of exact{everywhere} and faster"
    untimed = [row for row in one.candidates if not row.timed and row.worst <= max_error]
    if not near and untimed:
        text = f"it is open whether anything is {both}; not timed: {_names(untimed)}"
    elif not near:
        text = f"{nothing} but exact is within {share} of it{everywhere}, whatever the times"
        text += f"; nearest: {_names([nearest(one.candidates)])}" if one.candidates else ""
    elif load is not None:
        text = f"it is open: {COULD_NOT_TELL} whether anything is {both}: {load}; {IDLE}. "
        text += f"Within {share}, which no load changes: {_names(near)}"
    elif faster := one.faster(near):
        text = f"{both}: {_names(faster, exact)}"
    elif alike := one.faster(near, side=0):
        names = ", ".join(row.label for row in alike)
        text = f"it is unclear whether anything is {both}: the times of {names} and exact overlap; more "
        text += "--rounds would settle it"
    else:
        answer = "" if left else ", so exact is the answer"
        fast = _names([nearest(one.faster(one.candidates))], exact)
        text = f"{nothing} is {both}{answer}; nearest of the faster backends: {fast}; "
        text += f"of the backends within {share}: {_names(near[:1], exact)}"
    return f"{place} {text}.{left}"


def _names(rows: Iterable[Contender | None], exact: Contender | None = None) -> str:
    """`window (error 0.3, 2.50x as fast)`; without exact attention the error alone."""
    texts = []
    for row in filter(None, rows):
        speed = f", {cost_cells(row.timed, exact.timed, None)[1]} as fast" if exact is not None else ""
        texts.append(f"{row.label} (error {_error(row)}{speed})")
    return ", ".join(texts) or "nothing"
