"""Language models in training as a table and a few sentences."""

from collections.abc import Sequence

from efficient_attn.report.error_table import describe
from efficient_attn.report.table import Table, three_digits
from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.units import show_bytes, show_seconds
from efficient_attn.stats.noise_warnings import IDLE, disturbance
from efficient_attn.studies.train.analysis import Mean, TrainingCurve, TrainingRun, training_runs
from efficient_attn.studies.view import Environment


def tables(records: Sequence[Record], environment: Environment | None = None) -> list[Table]:
    """One table per run: final bits per byte, speed and size of the streaming state."""
    return [_table(run) for run in training_runs(records)]


def sentences(records: Sequence[Record], environment: Environment | None = None) -> list[str]:
    """Who is lower than exact attention after as many steps, and who is lowest after as many seconds."""
    return [
        sentence
        for run in training_runs(records)
        for sentence in (_by_steps(run), _by_time(run, environment))
        if sentence
    ]


def heading(run: TrainingRun) -> str:
    """Model and text of the training."""
    case = run.curves[0].record.case
    return f"{describe(case.inputs)}, windows of {case.tokens} bytes; {model(case)}"


def model(case: Case) -> str:
    """`2 blocks of 4 heads of 16, batch 8, 2 CPU threads`."""
    threads = "1 CPU thread" if case.threads == 1 else f"{case.threads} CPU threads"
    where = threads if case.device == "cpu" else case.device
    return f"{case.layers} blocks of {case.num_heads} heads of {case.head_dim}, batch {case.batch}, {where}"


def _table(run: TrainingRun) -> Table:
    common = "…" if run.common_s is None else show_seconds(run.common_s)
    columns = (
        "backend",
        "steps",
        "bits per byte",
        "beyond exact",
        f"in {common} each",
        "steps per s",
        f"state after {run.curves[0].record.case.tokens} bytes",
    )
    windows = max(len(one.record.held_out_bits_per_byte_windows or ()) for one in run.curves)
    failed = [
        f"{one.label}: {one.record.status}: {one.record.reason}" for one in run.curves if one.record.reason
    ]
    notes = (
        f"On text that was held out; ± is the 95 % interval of the mean over {windows} windows of it, of "
        "differences on the same windows. Other seeds would move all of them.",
        *failed,
    )
    return Table(f"Language models: {heading(run)}", columns, tuple(map(_cells, run.curves)), notes)


def _cells(one: TrainingCurve) -> tuple[str, ...]:
    speed = one.steps_per_s
    return (
        one.label,
        str(one.steps[-1]) if one.steps else "–",
        "–" if one.final is None else f"{one.final.value:.3f} ±{one.final.half:.3f}",
        _difference(one.beyond_exact),
        "–" if one.at_common_time is None else f"{one.at_common_time:.3f}",
        "–" if speed is None else three_digits(speed),
        "–" if one.record.state_bytes is None else show_bytes(one.record.state_bytes),
    )


def _difference(beyond: Mean | None) -> str:
    return "" if beyond is None else f"{beyond.value:+.3f} ±{beyond.half:.3f}".replace("-", "−", 1)


def _by_steps(run: TrainingRun) -> str | None:
    exact = run.exact
    if exact is None or exact.final is None:
        return None
    bits = f"{exact.final.value:.2f} bits per byte of held-out text"
    begin = f"After {exact.steps[-1]} steps exact attention is at {bits}"
    known = [(one.beyond_exact, one) for one in run.curves if one.beyond_exact is not None]
    lower = [one for beyond, one in known if beyond.is_clear and beyond.value < 0]
    alike = [one for beyond, one in known if not beyond.is_clear]
    higher = [one for beyond, one in known if beyond.is_clear and beyond.value > 0]
    told = [
        f"lower: {_listed(lower)}" if lower else "nothing is lower" if known else "",
        f"not significantly different: {_listed(alike)}" if alike else "",
        f"higher: {_listed(higher)}" if higher else "",
    ]
    return "; ".join([begin, *filter(None, told)]) + "."


def _by_time(run: TrainingRun, environment: Environment | None) -> str | None:
    known = [(one.at_common_time, one) for one in run.curves if one.at_common_time is not None]
    if len(known) < 2 or run.common_s is None:
        return None
    load = disturbance([one.record for one in run.curves], environment)
    if load is not None:
        return f"After equal time: could not tell on this machine now: {load}; {IDLE}."
    told = [f"{one.label} ({bits:.2f})" for bits, one in sorted(known, key=lambda pair: pair[0])[:3]]
    return (
        f"After {show_seconds(run.common_s)} of training each, which the fastest took for all its steps, the "
        f"lowest are {', '.join(told)}."
    )


def _listed(curves: Sequence[TrainingCurve]) -> str:
    return ", ".join(f"{one.label} ({_difference(one.beyond_exact)})" for one in curves)
