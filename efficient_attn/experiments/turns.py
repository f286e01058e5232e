"""Models trained by turns: some steps of each, an evaluation, a checkpoint, and the next one.

A slow spell of the machine then meets all of them, and at the end of a round all have done as many steps.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from efficient_attn.contained import contained, described
from efficient_attn.errors import DataError, OptionError
from efficient_attn.experiments.checkpoints import (
    CHECKPOINTS,
    MODELS,
    about,
    load_checkpoint,
    save_checkpoint,
)
from efficient_attn.experiments.course import Course
from efficient_attn.experiments.files import ENVIRONMENT, RECORDS, read_json
from efficient_attn.experiments.folder import describe
from efficient_attn.experiments.learner import Learner
from efficient_attn.problem import positive_count
from efficient_attn.report.files import write
from efficient_attn.sweep.amounts import show_seconds
from efficient_attn.sweep.interrupt import held
from efficient_attn.sweep.records import Record, line
from efficient_attn.sweep.records import read as read_records
from efficient_attn.sweep.run import Step


class Limit(NamedTuple):
    """Where a run ends.

    Attributes:
        budget_s: Seconds of training and evaluating, of all models and of the run that is gone on with too.
        rounds: Evaluations of each model; None: as many as the budget allows.
    """

    budget_s: float
    rounds: int | None

    @classmethod
    def of(cls, budget_s: float, steps: int | None, course: Course) -> "Limit":
        """The limit in rounds, for one in steps.

        Raises:
            OptionError: If a run cannot end there.
        """
        if not budget_s > 0:
            raise OptionError(f"budget_s is a number of seconds above 0, not {budget_s!r}.")
        if steps is None:
            return cls(budget_s, None)
        positive_count("steps", steps)
        if steps % course.every:
            near = [count for count in (steps // course.every, steps // course.every + 1) if count]
            allowed = " or ".join(str(count * course.every) for count in near)
            raise OptionError(
                f"steps={steps} does not end with an evaluation, one every {course.every} steps: {allowed}."
            )
        return cls(budget_s, steps // course.every)

    def allows(self, learners: Sequence[Learner]) -> bool:
        """Whether another round is begun."""
        return self.rounds_left(learners) >= 1

    def rounds_left(self, learners: Sequence[Learner]) -> float:
        """How many rounds there is room for, each taken to last as long as those before it."""
        going = [one for one in learners if one.failed is None]
        if not going:
            return 0.0
        done = min(len(one.curve) for one in going)
        left = float("inf") if self.rounds is None else self.rounds - done
        # Nobody knows how long the first one takes.
        if not done:
            return min(left, 1.0)
        round_s = sum(one.spent_s / len(one.curve) for one in going)
        return min(left, self.left_s(learners) / round_s)

    def left_s(self, learners: Sequence[Learner]) -> float:
        """Seconds of the budget that are left."""
        return max(self.budget_s - sum(one.spent_s for one in learners), 0.0)

    def notes(self, learners: Sequence[Learner]) -> list[str]:
        """What should be known of a run that did nothing."""
        if any(one.curve for one in learners) and not any(one.advanced for one in learners):
            return [
                f"Nothing was left to do: the run has had its {show_seconds(self.budget_s)}, or its steps. "
                "A larger budget takes it further."
            ]
        return []


class Book:
    """What a run writes: checkpoints one by one, and the curves of all after every round.

    Attributes:
        machine: Where the run was begun.
    """

    def __init__(self, folder: Path | None, learners: Sequence[Learner], machine: Mapping[str, Any]) -> None:
        self._folder, self._learners = folder, learners
        self._machine_now, self.machine = machine, dict(machine)
        self._others: list[Record] = []
        self._resumed = False

    def take_up(self, *, force: bool) -> list[str]:
        """Take every model to where its checkpoint is; notes on what changed meanwhile.

        Raises:
            DataError: If a checkpoint is damaged or of a run with other options; nothing was changed.
        """
        folder = self._folder
        assert folder is not None
        changed = [self._load(folder, one, force) for one in self._learners]
        if (folder / RECORDS).exists():
            own = {one.record().case.key for one in self._learners}
            kept = {record.case.key: record for record in read_records(folder / RECORDS).records}
            self._others = [record for key, record in kept.items() if key not in own]
        if (folder / ENVIRONMENT).exists():
            self.machine = read_json(folder / ENVIRONMENT)
        self._resumed = True
        notes = [f"Two environments are mixed here: {one}." for one in sorted({*changed} - {None}, key=str)]
        left = ", ".join(record.case.label for record in self._others)
        return notes + ([f"Left as they were, since they were not asked for: {left}."] if left else [])

    def begin(self, plan: str | None) -> None:
        """Describe the run in its folder.

        Raises:
            DataError: If another run of training has been there.
        """
        if self._folder is None:
            return
        begun = [name for name in (CHECKPOINTS, MODELS) if (self._folder / name).exists()]
        if begun and not self._resumed:
            raise DataError(
                f"out: {self._folder} holds {begun[0]} of another run. Go on with it by --resume, or name a "
                "new folder."
            )
        known = self._resumed and (self._folder / ENVIRONMENT).exists()
        describe(self._folder, None if known else self.machine, plan)

    def keep(self, learner: Learner) -> None:
        """Write the checkpoint of one model."""
        if self._folder is not None:
            save_checkpoint(self._folder, learner, about(learner, self._machine_now))

    def records(self) -> list[Record]:
        """The curves, after those that the folder has of other models."""
        return [*self._others, *(one.record() for one in self._learners)]

    def note(self) -> None:
        """Write the curves."""
        if self._folder is not None:
            write(self._folder / RECORDS, "".join(f"{line(record)}\n" for record in self.records()))

    def _load(self, folder: Path, learner: Learner, force: bool) -> str | None:
        return load_checkpoint(folder, learner, about(learner, self._machine_now), force=force)


def by_turns(
    learners: Sequence[Learner], limit: Limit, book: Book, progress: Callable[[Step], None] | None
) -> bool:
    """Train until the limit; False if it was ended from the keyboard, after every model was put down."""
    try:
        while limit.allows(learners):
            done = min(len(one.curve) for one in learners if one.failed is None)
            for one in learners:
                # After a sudden end some models are a turn ahead.
                if one.failed is None and len(one.curve) == done:
                    _take_turn(one, book)
                    _tell(one, learners, limit, progress)
            book.note()
    except KeyboardInterrupt:
        for one in learners:
            if one.advanced and one.failed is None:
                book.keep(one)
        book.note()
        return False
    book.note()
    return True


def _take_turn(learner: Learner, book: Book) -> None:
    """The steps up to the next evaluation, and a checkpoint; an interruption waits for the end of a step."""
    try:
        while learner.failed is None and not learner.is_due:
            with held(), contained():
                learner.advance()
        if learner.failed is None:
            with held(), contained():
                learner.evaluate()
    except Exception as failure:  # The backend may be anybody's code; the others go on without it.
        learner.failed = described(failure)
    if learner.failed is None:
        with held():
            book.keep(learner)


def _tell(
    learner: Learner, learners: Sequence[Learner], limit: Limit, progress: Callable[[Step], None] | None
) -> None:
    if progress is None:
        return
    turns = sum(len(one.curve) for one in learners)
    going = sum(one.failed is None for one in learners)
    total = turns + int(limit.rounds_left(learners)) * going
    name = learner.variant.label
    what = (
        f"{name} ended: {learner.failed}"
        if learner.failed or not learner.curve
        else f"{name}, step {learner.step}: {learner.curve[-1].held_out:.3f} bits per byte"
    )
    progress(Step(done=turns, total=total, remaining_s=limit.left_s(learners), doing=what))
