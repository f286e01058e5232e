"""Models in training as a table, a few sentences and a plot."""

from collections.abc import Mapping, Sequence

from efficient_attn.report.error_table import describe
from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.notes import failure_notes, setting
from efficient_attn.report.palette import baseline_style, line_styles
from efficient_attn.report.table import Table, three_digits
from efficient_attn.runner.records import Record
from efficient_attn.runner.units import show_seconds
from efficient_attn.stats.curves import YARDSTICK
from efficient_attn.stats.noise_warnings import IDLE, disturbance
from efficient_attn.studies.train.analysis import (
    Mean,
    TrainingCurve,
    TrainingRun,
    held_out_of,
    percent,
    training_runs,
    unit_of,
)
from efficient_attn.studies.view import NOT_MEASURED, Environment, Plots

# The first evaluations are far above all others; from this share of a curve on it has to fit on the axis.
_SHOWN_FROM = 0.2

# Share of tokens from which a model copies.
_COPIED = 0.999


def tables(records: Sequence[Record], environment: Environment | None = None) -> list[Table]:
    """One table per run: final bits per byte or token, accuracy and speed."""
    return [_table(run) for run in training_runs(records)]


def sentences(records: Sequence[Record], environment: Environment | None = None) -> list[str]:
    """Models below exact attention after equal steps and equal time; of the task copy, accuracies."""
    return [
        sentence
        for run in training_runs(records)
        for sentence in ([_copied(run)] if _copies(run) else [_by_steps(run), _by_time(run, environment)])
        if sentence
    ]


def heading(run: TrainingRun) -> str:
    """Task and model: `book.txt, windows of 256 bytes; 2 blocks of 4 heads of 16, …`."""
    case = run.curves[0].record.case
    tokens = f"up to {case.tokens} tokens" if _copies(run) else f"windows of {case.tokens} bytes"
    blocks = f"{case.layers} + {case.layers} blocks" if _copies(run) else f"{case.layers} blocks"
    return f"{describe(case.inputs)}, {tokens}; {blocks} of {setting(case)}"


def _copies(run: TrainingRun) -> bool:
    return run.unit == "token"


def _table(run: TrainingRun) -> Table:
    common = "…" if run.common_s is None else show_seconds(run.common_s)
    decoded = ("tokens right", "copied exactly") if _copies(run) else ()
    columns = ("backend", "steps", *decoded, _axis(run), "beyond exact", f"in {common} each", "steps per s")
    count = max(len(held_out_of(one.record, "_windows") or ()) for one in run.curves)
    title, held_out, some = "Language models", "text that was", "windows of it"
    if decoded:
        title, held_out, some = "Sequences copied", "sequences that were", "sequences"
    notes = (
        *(["tokens right, copied exactly: as beam search decodes."] * bool(decoded)),
        f"On {held_out} held out; ± is the 95 % interval of the mean over {count} {some}, of differences on "
        f"the same {some.split()[0]}. Other seeds would move all of them.",
        *failure_notes(one.record for one in run.curves),
    )
    return Table(f"{title}: {heading(run)}", columns, tuple(map(_cells, run.curves)), notes)


def _cells(one: TrainingCurve) -> tuple[str, ...]:
    speed = one.steps_per_s
    return (
        one.label,
        str(one.steps[-1]) if one.steps else NOT_MEASURED,
        *_decoded(one.record),
        NOT_MEASURED if one.final is None else f"{one.final.value:.3f} ±{one.final.half:.3f}",
        _difference(one.beyond_exact),
        NOT_MEASURED if one.at_common_time is None else f"{one.at_common_time:.3f}",
        NOT_MEASURED if speed is None else three_digits(speed),
    )


def _decoded(record: Record) -> tuple[str, ...]:
    """Cells of shares of tokens and sequences, for models that decode."""
    shares = (record.accuracy, record.sequence_accuracy) if unit_of(record) == "token" else ()
    return tuple(NOT_MEASURED if one is None else percent(one) for one in shares)


def _difference(beyond: Mean | None) -> str:
    return "" if beyond is None else f"{beyond.value:+.3f} ±{beyond.half:.3f}".replace("-", "−", 1)


def _by_steps(run: TrainingRun) -> str | None:
    exact = run.exact
    if exact is None or exact.final is None:
        return None
    bits = f"{exact.final.value:.2f} bits per byte of held-out text"
    begin = f"After {exact.steps[-1]} steps exact attention is at {bits}"
    groups: dict[str, list[str]] = {"lower": [], "not significantly different": [], "higher": []}
    for one in run.curves:
        if (beyond := one.beyond_exact) is not None:
            side = "lower" if beyond.value < 0 else "higher"
            names = groups[side if beyond.is_clear else "not significantly different"]
            names.append(f"{one.label} ({_difference(beyond)})")
    return _joined(begin, groups)


def _joined(begin: str, groups: Mapping[str, Sequence[str]]) -> str:
    """`begin; side: one, other; …` as a sentence, without sides that have no names."""
    return (
        "; ".join([begin, *(f"{side}: {', '.join(names)}" for side, names in groups.items() if names)]) + "."
    )


def _copied(run: TrainingRun) -> str | None:
    """Shares of tokens that the models copy, exact attention first."""
    exact = run.exact
    if exact is None or exact.record.accuracy is None or not exact.steps:
        return None
    tokens, sequences = _decoded(exact.record)
    begin = (
        f"After {exact.steps[-1]} steps exact attention copies {tokens} of the tokens of unseen sequences, "
        f"{sequences} of sequences without a mistake"
    )
    share = f"{_COPIED:.1%} of tokens"
    groups: dict[str, list[str]] = {f"at least {share}": [], f"less than {share}": [], "not compared": []}
    enough, fewer, others = groups.values()
    for one in run.curves:
        accuracy, ended = one.record.accuracy, "" if one.record.status == "ok" else "ended "
        if one is exact:
            continue
        if accuracy is None or not one.steps:
            others.append(f"{one.label} ({ended}before an evaluation)")
        elif ended or one.steps[-1] != exact.steps[-1]:
            others.append(f"{one.label} ({ended}at step {one.steps[-1]})")
        else:
            (enough if accuracy >= _COPIED else fewer).append(f"{one.label} ({percent(accuracy)})")
    return _joined(begin, groups)


def _by_time(run: TrainingRun, environment: Environment | None) -> str | None:
    known = [(one.at_common_time, one) for one in run.curves if one.at_common_time is not None]
    if len(known) < 2 or run.common_s is None:
        return None
    load = disturbance([one.record for one in run.curves], environment)
    if load is not None:
        return f"After equal time: could not tell on this machine now: {load}; {IDLE}."
    lowest = [f"{one.label} ({bits:.2f})" for bits, one in sorted(known, key=lambda pair: pair[0])[:3]]
    return (
        f"After {show_seconds(run.common_s)} of training each, which the fastest took for all its steps, the "
        f"lowest are {', '.join(lowest)}."
    )


def training_plot(records: Sequence[Record]) -> Plot:
    """A row of two charts for each run."""
    runs = [run for run in training_runs(records) if any(one.steps for one in run.curves)]
    styles = line_styles([(one.label, one.backend) for run in runs for one in run.curves if one.steps])
    return Plot(
        f"Held-out {' and '.join(dict.fromkeys(_axis(run) for run in runs))} during training",
        f"{heading(runs[0]) if len(runs) == 1 else ''}\nthe same batches and initial weights for all",
        tuple(_charts(run, styles, heading(run) if len(runs) > 1 else "") for run in runs),
    )


def _axis(run: TrainingRun) -> str:
    return f"bits per {run.unit}"


def _charts(run: TrainingRun, styles: dict[str, dict[str, object]], head: str) -> tuple[Chart, ...]:
    drawn = [one for one in run.curves if one.steps]
    y = Axis(_axis(run), limits=_limits(drawn))
    common = [] if run.common_s is None else [Series("", (run.common_s,), (), baseline_style(2))]
    shown = [(styles[one.label], one) for one in drawn]
    steps = [_series(one, one.steps, style) for style, one in shown]
    seconds = [_series(one, one.seconds_s, style) for style, one in shown]
    return (
        Chart(Axis("steps", "log", "{:.0f}".format), y, tuple(steps), head),
        Chart(Axis("seconds of training", "log", show_seconds), y, (*seconds, *common)),
    )


def _series(one: TrainingCurve, x: Sequence[float], style: dict[str, object]) -> Series:
    """A line without markers: the points are as many as evaluations; exact attention lies on top."""
    exact = one.backend == YARDSTICK
    own = {**style, "marker": "", "linewidth": 2.4 if exact else 1.5, "zorder": 3 if exact else 2}
    return Series(one.label, x, one.held_out, own)


def _limits(drawn: Sequence[TrainingCurve]) -> tuple[float, float]:
    """From a little below the lowest value up to where curves are when their first steps are over."""
    low = min(min(one.held_out) for one in drawn)
    high = max(one.held_out[int(_SHOWN_FROM * (len(one.held_out) - 1))] for one in drawn)
    margin = 0.05 * max(high - low, 0.1)
    return low - margin, high + margin


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The only plot."""
    known = any(record.train_steps for record in records)
    return {"training": training_plot(records)} if known else {}
