"""Models trained in rounds: some steps of each, an evaluation, a checkpoint, and the next model.

Background load then slows all models alike, and at the end of a round all have done as many steps.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path

from efficient_attn.contained import contained, described
from efficient_attn.errors import AttentionError, DataError, OptionError
from efficient_attn.runner.interrupt import held
from efficient_attn.runner.records import Record, read
from efficient_attn.runner.variants import Variant
from efficient_attn.runner.worker import threads
from efficient_attn.studies.plan import Plan, Point
from efficient_attn.studies.run_folder import RECORDS
from efficient_attn.studies.train.analysis import held_out_of, percent, unit_of
from efficient_attn.studies.train.checkpoints import CHECKPOINTS, load_checkpoint, save_checkpoint
from efficient_attn.studies.train.config import TrainConfig
from efficient_attn.studies.train.replicas import Replicas, announce, follow, met, replicas
from efficient_attn.studies.train.tasks import Task
from efficient_attn.studies.train.trainer import Trainer

# Without a number of steps the budget alone ends a run.
_UNLIMITED = 10**9


class Rounds:
    """The models of a run, and the folder of their checkpoints, if there is one.

    Attributes:
        notes: Remarks on the run; complete when it ends.
    """

    def __init__(
        self, variants: Sequence[Variant], task: Task, config: TrainConfig, notes: Sequence[str] = ()
    ) -> None:
        self._asked = variants, task, config
        self._replicas = replicas(config.batch, config.device)
        with threads(config.threads):
            self._all = [_trainer(variant, task, config, self._replicas) for variant in variants]
        self._trainers = self._all
        self._folder: Path | None = None
        # Evaluations that all models had before this run, and rounds of each model in it.
        self._before, self._rounds = 0, Counter[str]()
        self.notes, self._most, self._interrupted = [*notes], _UNLIMITED, False

    def points(self, rounds: int | None) -> list[Point]:
        """One point per model; without a number of rounds the budget ends them."""
        self._most = _UNLIMITED if rounds is None else rounds
        return [
            Point(
                case=one.case,
                measure=partial(self._round, one),
                merge=itemgetter(-1),
                rounds=self._most,
                label=one.variant.label,
            )
            for one in self._trainers
        ]

    def attach(self, plan: Plan, folder: Path, *, resume: bool) -> Plan:
        """The plan continued from the checkpoints in the folder: models ahead of the others wait for them.

        Raises:
            DataError: If a checkpoint is damaged or of a run with other options; nothing was changed.
        """
        if (folder / CHECKPOINTS).exists() and not resume:
            raise DataError(
                f"out: {folder} holds {CHECKPOINTS} of another run. Go on with it by --resume, or name a "
                "new folder."
            )
        self._folder = folder
        keys = {point.case.key for point in plan.points}
        self._trainers = [one for one in self._trainers if one.case.key in keys]
        if not resume:
            return plan
        for one in self._trainers:
            load_checkpoint(folder, one)
        done = {one.variant.label: len(one.progress.curve) for one in self._trainers}
        self._before = min(done.values())
        recorded = _recorded_evaluations(folder)
        points = []
        for one, point in zip(self._trainers, plan.points, strict=True):
            left = (point.rounds or 0) - self._before
            if done[point.case.label] >= (point.rounds or 0):
                if recorded.get(point.case.key, 0) >= done[point.case.label]:
                    continue
                # A process that was killed may have left a checkpoint without its record.
                point, left = replace(point, measure=partial(_recorded, one)), 1
            points.append(replace(point, rounds=left))
        if not points:
            self.notes.append("Nothing was left to do: every model has had its steps; raise --steps.")
        return replace(plan, points=points)

    @contextmanager
    def training(self) -> Iterator[None]:
        """The threads of the run; every kind of step is tried once before the first that counts."""
        with threads(self._asked[-1].threads):
            _, task, config = self._asked
            for one in self._trainers:
                Trainer(one.variant, task, config).try_step()
            with met(config.device, self._all) if self._replicas.number > 1 else nullcontext():
                yield
        # A share has no rounds of the other models.
        trained = [one for one in self._trainers if one.failed is None and self._rounds[one.variant.label]]
        done = min((len(one.progress.curve) for one in trained), default=None)
        if done is not None and done < self._most < _UNLIMITED and not self._interrupted:
            self.notes.append(
                f"The budget ended training at step {done * config.every} of {self._most * config.every}: "
                "--budget raises it, --resume goes on."
            )

    def follow(self) -> None:
        """The part of a process that is not the first: the same steps, without evaluations and files."""
        config = self._asked[-1]
        with threads(config.threads), met(config.device, self._all):
            follow(self._all)

    def _round(self, one: Trainer, *, seconds: float = 0.0) -> Record:
        """Steps up to the next evaluation, and a checkpoint; an interruption waits for the end of a step."""
        self._rounds[one.variant.label] += 1
        if len(one.progress.curve) >= self._before + self._rounds[one.variant.label]:
            return one.record()
        try:
            while one.failed is None and not one.is_due:
                with held(), contained():
                    if self._replicas.number > 1:
                        announce(self._all.index(one), one.step)
                    one.advance()
            if one.failed is None:
                with held(), contained():
                    one.evaluate()
        except KeyboardInterrupt:
            self._interrupted = True
            self._save(one)
            raise
        except Exception as failure:  # External code may raise anything; the others are trained without it.
            one.failed = described(failure)
        if one.failed is None:
            self._save(one)
        return one.record()

    def _save(self, one: Trainer) -> None:
        if self._folder is not None:
            with held():
                save_checkpoint(self._folder, one)


def _recorded_evaluations(folder: Path) -> dict[str, int]:
    """Number of evaluations in the last record of each case."""
    path = folder / RECORDS
    records = read(path).records if path.exists() else []
    return {record.case.key: len(record.train_steps or ()) for record in records}


def _recorded(one: Trainer, *, seconds: float = 0.0) -> Record:
    """The record of the steps that a model has had."""
    return one.record()


def outcome(record: Record) -> str:
    """The last evaluation of a model in the progress display."""
    label = record.case.label
    if record.status != "ok":
        return f"{label} ended: {record.reason}"
    unit, curve = unit_of(record), held_out_of(record)
    if not curve or not record.train_steps:
        return label
    decoded = "" if record.accuracy is None else f", {percent(record.accuracy)} of tokens decoded right"
    return f"{label}, step {record.train_steps[-1]}: {curve[-1]:.3f} bits per {unit}{decoded}"


def _trainer(variant: Variant, task: Task, config: TrainConfig, shared: Replicas) -> Trainer:
    try:
        with contained():
            return Trainer(variant, task, config, shared)
    except AttentionError:
        raise
    except Exception as error:  # External code may raise anything.
        raise OptionError(f"{variant.label} cannot be built into a model: {described(error)}") from None
