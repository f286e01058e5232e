"""Associative recall after training: rows over seeds, as a table, in sentences and as a plot."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION, YARDSTICK, sized
from efficient_attn.report.figures import UNIFORM_STYLE, Axis, Chart, Plot, Series, line_styles
from efficient_attn.report.table import NOT_MEASURED, Table
from efficient_attn.report.text import failure_notes, heading
from efficient_attn.runs.study import Run, Settled
from efficient_attn.stats.estimates import grouped

# Fields that are equal for all rows of a contest.
_SHARED = ("inputs", "tokens", "causal", "batch", "num_heads", "head_dim", "dtype", "device", "threads")

# Accuracy from which a backend has learned the task.
_LEARNED = 0.99


class Learned(NamedTuple):
    """One backend at one size, over all seeds.

    Attributes:
        first: Record of the first seed that was trained.
        accuracies: Shares of right answers, one for each seed that was trained to the end.
        failed: Trainings without an accuracy.
    """

    first: Record
    accuracies: tuple[float, ...]
    failed: tuple[Record, ...]

    @property
    def accuracy(self) -> float:
        """Mean over seeds, or −1 without any."""
        return fmean(self.accuracies) if self.accuracies else -1.0

    @property
    def text(self) -> str:
        """Cell `0.731` with its range over seeds, or the reason why there is no accuracy."""
        if not self.accuracies:
            return self.failed[0].status if self.failed else NOT_MEASURED
        low, high = min(self.accuracies), max(self.accuracies)
        seeds = f"\t{low:.3f} to {high:.3f}" if len(self.accuracies) > 1 else ""
        return f"{self.accuracy:.3f}{seeds}"


Contest = tuple[Learned, ...]


def contests(records: Iterable[Record]) -> list[Contest]:
    """One contest per task and training configuration, its rows in descending order of accuracy."""
    trained = (record for record in records if record.case.kind == "recall")
    groups = (map(_row, grouped(group, "label")) for group in grouped(trained, *_SHARED))
    return [
        tuple(
            sorted(rows, key=lambda x: (-x.accuracy, x.first.case.backend != YARDSTICK, x.first.case.label))
        )
        for rows in groups
    ]


def _row(records: list[Record]) -> Learned:
    right = [record for record in records if record.status == "ok" and record.accuracy is not None]
    failed = tuple(record for record in records if record not in right)
    return Learned((right or records)[0], tuple(record.accuracy or 0.0 for record in right), failed)


def tables(records: Sequence[Record], run: Run[Settled]) -> list[Table]:
    """One table for each task and way to train, the most accurate first."""
    return [_table(contest) for contest in contests(records)]


def _table(contest: Contest) -> Table:
    rows = tuple(
        (row.first.case.label, row.text, str(row.first.floats_read or NOT_MEASURED)) for row in contest
    )
    seeds = max(len(row.accuracies) for row in contest)
    notes = (
        f"accuracy: mean and range over seeds ({seeds}), on held-out sequences. Chance: "
        f"{contest[0].first.chance or 0:.3g}. Dimmed or italic: worse than {UNIFORM_ATTENTION}.",
        "state: floats read per query and head.",
        *failure_notes(record for row in contest for record in row.failed),
    )
    title = f"Associative recall after training: {heading(contest[0].first.case)}"
    return Table(title, ("backend", "accuracy", "state, floats"), rows, notes).compared(scores=("accuracy",))


def sentences(records: Sequence[Record], run: Run[Settled]) -> list[str]:
    """Backends that learned the task, the smallest state first."""
    texts = []
    for contest in contests(records):
        learned = [row for row in contest if row.accuracy >= _LEARNED]
        learned = sorted(learned, key=lambda row: row.first.floats_read or 0)
        names = ", ".join(f"{row.first.case.label} (state {row.first.floats_read} floats)" for row in learned)
        if any(row.accuracies for row in contest):
            reached = f"Backends with accuracy ≥ {_LEARNED:g}, smallest state first: {names}."
            texts.append(reached if names else f"No backend reaches an accuracy of {_LEARNED:g}.")
    return texts


def plots(records: Sequence[Record], run: Run[Settled]) -> dict[str, Plot]:
    """One chart for each task, if anything was trained."""
    shown = [contest for contest in contests(records) if any(row.accuracies for row in contest)]
    if not shown:
        return {}
    heads = [heading(contest[0].first.case) for contest in shown]
    conditions = f"{heads[0] if len(shown) == 1 else ''}\nmean and range over seeds; dashed: chance"
    charts = [
        (_chart(contest, head if len(shown) > 1 else ""),) for contest, head in zip(shown, heads, strict=True)
    ]
    return {"recall": Plot("Associative recall accuracy after training", conditions, tuple(charts))}


def _chart(contest: Contest, title: str) -> Chart:
    """A line for each backend over its sizes, with the ranges over seeds."""
    groups: dict[str, list[Learned]] = {}
    for row in sorted(contest, key=lambda row: sized(row.first.case).size or 0):
        if row.accuracies and row.first.floats_read:
            groups.setdefault(sized(row.first.case).series, []).append(row)
    styles = line_styles(sorted((name, rows[0].first.case.backend) for name, rows in groups.items()))
    lines = [
        Series(
            name,
            [row.first.floats_read or 0 for row in rows],
            [row.accuracy for row in rows],
            styles[name],
            [min(row.accuracies) for row in rows],
            [max(row.accuracies) for row in rows],
            bars=True,
        )
        for name, rows in groups.items()
    ]
    reads = Axis("state per query and head, floats read", "log2", "{:.0f}".format)
    chance = Series("", (), (contest[0].first.chance or 0.0,), UNIFORM_STYLE)
    accuracy = Axis("accuracy after training", limits=(0, 1.04))
    return Chart(reads, accuracy, (chance, *lines), title=title)
