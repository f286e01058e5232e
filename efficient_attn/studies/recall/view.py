"""Recall after training: rows over seeds, as a table, in sentences and as a plot."""

import math
import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION, YARDSTICK, sized
from efficient_attn.report.figures import MUTED, UNIFORM_STYLE, Axis, Chart, Plot, Series, line_styles
from efficient_attn.report.table import NOT_MEASURED, Table, full
from efficient_attn.report.text import failure_notes, heading, show_error, three_digits
from efficient_attn.stats.estimates import grouped, middle
from efficient_attn.studies.view import Environment, Plots

# Standard errors from chance within which a control is at chance: one alarm in a thousand is false.
_CONTROL_ERRORS = 3.29

# Fields that are equal for all rows of a contest.
_SHARED = ("inputs", "tokens", "causal", "batch", "num_heads", "head_dim", "dtype", "device", "threads")

# Accuracy from which a backend has learned the task.
_LEARNED = 0.99

_GREY_MARKS: tuple[Any, ...] = ((4, 1, 0), (4, 2, 0))


class Learned(NamedTuple):
    """One backend at one size, over all seeds.

    Attributes:
        first: Record of the first seed that was trained.
        accuracies: Shares of right answers, one for each seed that was trained to the end.
        answers: Number of answers of all seeds.
        step_s: Median seconds of a training step.
        untrained: Relative output error against exact attention before training, mean over seeds.
        failed: Trainings without an accuracy.
    """

    first: Record
    accuracies: tuple[float, ...]
    answers: int
    step_s: float | None
    untrained: float | None
    failed: tuple[Record, ...]

    @property
    def case(self) -> Case:
        return self.first.case

    @property
    def label(self) -> str:
        return self.case.label

    @property
    def accuracy(self) -> float | None:
        return fmean(self.accuracies) if self.accuracies else None

    @property
    def chance(self) -> float:
        return self.first.chance or 0.0

    @property
    def at_chance(self) -> bool:
        """Whether the accuracy does not differ significantly from chance."""
        if self.accuracy is None:
            return False
        error = math.sqrt(self.chance * (1 - self.chance) / self.answers)
        return abs(self.accuracy - self.chance) <= _CONTROL_ERRORS * error

    @property
    def is_control(self) -> bool:
        """Whether the backend cannot see the pairs: all keys alike, or a window within the gap."""
        case, window = self.case, self.case.options.get("window")
        gap = re.search(r"\bgap=(\d{1,9})\b", case.inputs)
        if case.backend != "window" or gap is None or not isinstance(window, int):
            return case.backend == UNIFORM_ATTENTION
        return (window - 1 if case.causal else window // 2) <= int(gap[1])


class Contest(NamedTuple):
    """Backends that learned the same task in the same way."""

    case: Case
    rows: tuple[Learned, ...]

    @property
    def exact(self) -> Learned | None:
        return next((row for row in self.rows if row.case.backend == YARDSTICK and row.accuracies), None)

    @property
    def compared(self) -> tuple[Learned, ...]:
        """Rows that are ranked: trained, neither exact attention nor a control."""
        return tuple(
            row
            for row in self.rows
            if row.accuracies and row.case.backend != YARDSTICK and not row.is_control
        )

    @property
    def controls(self) -> tuple[Learned, ...]:
        """Rows of backends that cannot see the pairs."""
        return tuple(row for row in self.rows if row.is_control)


def contests(records: Iterable[Record]) -> tuple[Contest, ...]:
    """One contest per task and training configuration, its rows in descending order of accuracy."""
    trained = (record for record in records if record.case.kind == "recall")
    groups = [sorted(map(_row, grouped(group, "label")), key=_place) for group in grouped(trained, *_SHARED)]
    return tuple(Contest(rows[0].case, tuple(rows)) for rows in groups)


def _row(records: list[Record]) -> Learned:
    right = [r for r in records if r.status == "ok" and r.accuracy is not None and r.answers]
    times_s = [time_s for r in right for time_s in r.times_s or ()]
    errors = [r.output_relative_error for r in records if r.output_relative_error is not None]
    return Learned(
        first=(right or records)[0],
        accuracies=tuple(r.accuracy or 0.0 for r in right),
        answers=sum(r.answers or 0 for r in right),
        step_s=middle(times_s).median if times_s else None,
        untrained=fmean(errors) if errors else None,
        failed=tuple(r for r in records if r not in right),
    )


def _place(row: Learned) -> tuple[float, bool, str]:
    return -(-1.0 if row.accuracy is None else row.accuracy), row.case.backend != YARDSTICK, row.label


def tables(records: Sequence[Record], environment: Environment | None = None) -> list[Table]:
    """One table for each task and way to train, the most accurate first."""
    return [_table(contest) for contest in contests(records)]


def sentences(records: Sequence[Record], environment: Environment | None = None) -> list[str]:
    """Accuracy of exact attention, of the controls and of the best backends."""
    return [
        sentence
        for contest in contests(records)
        for sentence in (_nearest(contest), _exact(contest), _controls(contest))
        if sentence
    ]


def show_accuracy(row: Learned) -> str:
    """Cell `0.731` with its range over seeds, or the reason why there is no accuracy."""
    if row.accuracy is None:
        return row.failed[0].status if row.failed else NOT_MEASURED
    low, high = min(row.accuracies), max(row.accuracies)
    seeds = f"\t{low:.3f} to {high:.3f}" if len(row.accuracies) > 1 else ""
    return f"{row.accuracy:.3f}{seeds}"


def _table(contest: Contest) -> Table:
    rows = tuple(
        (
            row.label,
            show_accuracy(row),
            NOT_MEASURED if row.untrained is None else show_error(row.untrained),
            NOT_MEASURED if row.step_s is None else three_digits(row.step_s * 1e3),
            NOT_MEASURED if row.first.floats_read is None else str(row.first.floats_read),
        )
        for row in contest.rows
    )
    columns = ("backend", "accuracy", "error, untrained", "step, ms", "state, floats")
    table = Table(f"Recall after training: {heading(contest.case)}", columns, rows, tuple(_notes(contest)))
    return table.compared(scores=("accuracy",), errors=("error, untrained",), costs=("step, ms",))


def _notes(contest: Contest) -> list[str]:
    seeds = max(len(row.accuracies) for row in contest.rows)
    controls = ", ".join(row.label for row in contest.controls)
    return [
        f"accuracy: mean and range over seeds ({seeds}), on held-out sequences. Chance: "
        f"{contest.rows[0].chance:.3g}. Dimmed or italic: worse than {UNIFORM_ATTENTION}.",
        "error, untrained: ‖out − exact‖ / ‖exact‖ before the first step.",
        "state: floats read per query and head.",
        f"Controls (blind to the pairs): {controls or 'none'}.",
        *failure_notes(record for row in contest.rows for record in row.failed),
    ]


def _exact(contest: Contest) -> str:
    if contest.exact is None or contest.exact.step_s is None:
        return f"No comparison: exact attention was not trained ({heading(contest.case)})."
    accuracy, step_ms = full(show_accuracy(contest.exact)), three_digits(contest.exact.step_s * 1e3)
    return (
        f"Exact attention: accuracy {accuracy}, {step_ms} ms per step, chance {contest.exact.chance:.3g} "
        f"({heading(contest.case)})."
    )


def _controls(contest: Contest) -> str:
    shown = [f"{row.label} {row.accuracy:.3f}" for row in contest.controls if row.accuracies]
    if not shown:
        return ""
    above = [row.label for row in contest.controls if row.accuracies and not row.at_chance]
    if above:
        return f"Invalid run: controls above chance although blind to the pairs: {', '.join(above)}."
    return f"Controls at chance: {', '.join(shown)}."


def _nearest(contest: Contest) -> str:
    """Backends that learned the task, the fewest numbers read first; otherwise the most accurate one."""
    rows = [row for row in contest.compared if (row.accuracy or 0.0) >= _LEARNED]
    if rows:
        rows.sort(key=lambda row: row.first.floats_read or 0)
        which = ", ".join(_read(row) for row in rows)
        return f"Accuracy {_LEARNED:g} or more, smallest state first: {which}."
    if not contest.compared:
        return ""
    best = contest.compared[0]
    return (
        f"Only exact attention reaches accuracy {_LEARNED:g}. Best approximation: {_read(best)}, accuracy "
        f"{full(show_accuracy(best))}."
    )


def _read(row: Learned) -> str:
    return (
        row.label if row.first.floats_read is None else f"{row.label} (state {row.first.floats_read} floats)"
    )


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """One chart for each task; no figure if nothing was trained."""
    if not any(record.status == "ok" for record in records):
        return {}
    shown = contests(records)
    several = len(shown) > 1
    plot = Plot(
        "Accuracy of recall after training",
        f"{'' if several else heading(shown[0].case)}\nmean and range over seeds; dashed: chance",
        tuple((_chart(contest, heading(contest.case) if several else ""),) for contest in shown),
    )
    return {"recall": plot}


def _chart(contest: Contest, head: str) -> Chart:
    reads = Axis("state size per query and head, floats read", "log2", "{:.0f}".format)
    guess = Series("", (), (contest.rows[0].chance,), UNIFORM_STYLE)
    accuracy = Axis("accuracy after training", limits=(0, 1.04))
    return Chart(reads, accuracy, (guess, *_series(contest)), title=head, apart=True)


def _series(contest: Contest) -> list[Series]:
    """One for each backend over its sizes, with intervals over seeds; controls are grey."""
    controls = [row.label for row in contest.controls]
    groups: dict[str, list[Learned]] = {}
    for row in sorted(contest.rows, key=lambda row: sized(row.case).size or 0):
        if row.accuracies:
            groups.setdefault(row.label if row.label in controls else sized(row.case).series, []).append(row)
    named = {name: rows[0].case.backend for name, rows in groups.items() if name not in controls}
    styles = line_styles(sorted(named.items()))
    for number, label in enumerate(controls):
        mark = _GREY_MARKS[number % 2]
        styles[label] = {"color": MUTED, "marker": mark, "linestyle": "none", "markersize": 7}
    series = []
    for name, rows in groups.items():
        points = [(place, row.accuracies) for row in rows if (place := row.first.floats_read)]
        places, shares = [place for place, _ in points], [accuracies for _, accuracies in points]
        edges = [*map(min, shares)], [*map(max, shares)]
        series.append(Series(name, places, [*map(fmean, shares)], styles[name], *edges, bars=True))
    return series
