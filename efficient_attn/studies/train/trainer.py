"""One model in training: a step, an evaluation, and everything that has to be kept to go on later.

A step depends on the model, the optimiser and its own number alone; so a run that was
interrupted anywhere goes on as if it had not been.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from efficient_attn.calibration import calibrate
from efficient_attn.contained import contained
from efficient_attn.measure.checked import backends_in, outputs_checked
from efficient_attn.measure.memory import parameter_bytes
from efficient_attn.ops.paths import observed_kernels
from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.variants import Variant
from efficient_attn.runner.worker import kernels_of
from efficient_attn.studies.train.config import TrainConfig, rate_at, seeded, update
from efficient_attn.studies.train.replicas import Replicas, distributed
from efficient_attn.studies.train.tasks import IGNORED, Task, bits, loss

# Step n keeps n / (n + 9) of the average at most.
_SHORT_AVERAGE = 9

_ALONE = Replicas()

_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class Point(NamedTuple):
    """One evaluation in bits per byte or token, with the mean training loss since the last one."""

    step: int
    trained_s: _NotNegative
    held_out: _NotNegative
    train: _NotNegative


class Progress(msgspec.Struct):
    """The curve of a model, kept in its checkpoint.

    Attributes:
        curve: The evaluations.
        held_out: Bits per byte or token of each held-out sequence at the last evaluation.
        mistakes: Number of wrong tokens of each of them as it was decoded; empty if nothing is decoded.
        recent: Training loss of each batch since then, in the same unit.
        trained_s: Seconds of all steps.
    """

    curve: list[Point] = []
    held_out: list[_NotNegative] = []
    mistakes: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    recent: list[_NotNegative] = []
    trained_s: _NotNegative = 0.0


class Trainer:
    """A model around one backend, with its optimiser and its progress.

    Args:
        replicas: Processes that share each batch.

    Attributes:
        failed: Reason why it does not go on; None: it does.
    """

    def __init__(
        self, variant: Variant, task: Task, config: TrainConfig, replicas: Replicas = _ALONE
    ) -> None:
        self.variant, self.task, self.config, self.replicas = variant, task, config, replicas
        self.case = _case(variant, task, config, replicas)
        self.model = task.model(variant).to(config.device)
        self._trained = self.model
        self.progress = Progress()
        self.failed: str | None = None
        self._optimiser = task.optimiser(self.model)
        named = self.model.named_parameters() if task.decay else ()
        self._average = {name: one.detach().clone() for name, one in named}
        calibrated = any(one.needs_calibration for one in backends_in(self.model))
        self._kernels: set[str] = set()
        self._calibrated_on = task.calibrated_on if calibrated else None
        calibrate(self.model, *task.batch(0).to(config.device).inputs)

    @property
    def step(self) -> int:
        """Number of steps that were done."""
        return len(self.progress.curve) * self.config.every + len(self.progress.recent)

    @property
    def is_due(self) -> bool:
        """Whether an evaluation comes next."""
        return len(self.progress.recent) >= self.config.every

    def try_step(self) -> None:
        """One warm-up step of a discarded model; an error recurs, and is recorded, in the first real step."""
        with suppress(Exception), contained():
            self.advance()

    def distribute(self) -> None:
        """Average the gradients of every step over the processes that share the batches."""
        self._trained = distributed(self.model)

    def advance(self, step: int | None = None) -> None:
        """One step: a batch, its loss, one update; a loss that is not finite ends the training.

        Args:
            step: Number of the step, from 0; omitted: the number of steps that were done.
        """
        start, config, step = time.perf_counter(), self.config, self.step if step is None else step
        batch, weight = self.replicas.part(self.task.batch(step).to(config.device))
        self.model.train()
        checks = nullcontext() if step else outputs_checked(self.model)
        with seeded((config.seed, step)), checks, observed_kernels() as names:
            own = weight * loss(self.task, self._trained, batch)
            nats = self.replicas.mean(own)
            rate = rate_at(step + 1, peak=config.learning_rate, warmup=self.task.warmup)
            if not nats.isfinite() or not update(self.model, self._optimiser, own, rate=rate):
                self.failed = f"loss or gradient of step {step + 1} are not finite"
                return
        self._kernels |= names
        # Early on the average is short: the initial weights leave it within a few steps.
        decay = min(self.task.decay, (step + 1) / (step + 1 + _SHORT_AVERAGE))
        for name, average in self._average.items():
            average.lerp_(self.model.get_parameter(name).detach(), 1 - decay)
        self.progress.recent.append(float(nats) / math.log(2))
        self.progress.trained_s += time.perf_counter() - start

    @torch.no_grad()
    def evaluate(self) -> None:
        """Note the bits per byte or token of the held-out sequences in the curve."""
        with self._averaged():
            self._evaluate()

    def _evaluate(self) -> None:
        progress = self.progress
        self.model.eval()
        parts = [*self.task.held_out.to(self.config.device).split(self.config.batch)]
        held_out = torch.cat([bits(self.model, part) for part in parts])
        point = Point(self.step, progress.trained_s, float(held_out.mean()), float(np.mean(progress.recent)))
        if math.isfinite(point.held_out):
            mistakes = [one for part in parts for one in self.task.mistakes(self.model, part)]
            progress.held_out, progress.mistakes, progress.recent = held_out.tolist(), mistakes, []
            progress.curve.append(point)
        else:
            self.failed = f"the loss of the held-out windows after step {self.step} is not finite"

    def tensors(self) -> dict[str, Tensor]:
        """All weights, the state of the optimiser and averages, by name."""
        kept = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            state = self._optimiser.state[parameter]
            kept |= {f"optimiser.{name}.{entry}": tensor for entry, tensor in state.items()}
        return kept | {f"average.{name}": tensor for name, tensor in self._average.items()}

    def restore(self, tensors: dict[str, Tensor], progress: Progress) -> None:
        """Restore the state returned by `tensors`; names and shapes were checked."""
        self.model.load_state_dict({name: tensors[f"model.{name}"] for name in self.model.state_dict()})
        for name, parameter in self.model.named_parameters():
            for entry, tensor in self._optimiser.state[parameter].items():
                tensor.copy_(tensors[f"optimiser.{name}.{entry}"])
        for name, average in self._average.items():
            average.copy_(tensors[f"average.{name}"])
        self.progress = progress

    def record(self) -> Record:
        """The curve as a record; of a model that failed as far as it got."""
        curve, unit = self.progress.curve, self.task.unit
        measured: dict[str, Any] = {
            f"train_bits_per_{unit}": tuple(point.train for point in curve),
            f"held_out_bits_per_{unit}": tuple(point.held_out for point in curve),
            f"held_out_bits_per_{unit}_windows": tuple(self.progress.held_out),
        }
        return Record(
            case=self.case,
            status="ok" if self.failed is None else "error",
            reason=self.failed,
            train_steps=tuple(point.step for point in curve),
            train_seconds_s=tuple(point.trained_s for point in curve),
            parameter_bytes=parameter_bytes(self.model),
            calibrated_on=self._calibrated_on,
            kernels=kernels_of(self.case, self._kernels),
            **measured,
            **self._decoded(),
        )

    def _decoded(self) -> dict[str, Any]:
        """Shares of right tokens and of sequences without a mistake at the last evaluation."""
        mistakes, answers = self.progress.mistakes, int((self.task.held_out.wanted != IGNORED).sum())
        if not mistakes:
            return {}
        right, accuracy = mistakes.count(0) / len(mistakes), 1 - sum(mistakes) / answers
        return {"accuracy": accuracy, "answers": answers, "sequence_accuracy": right}

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """The average in the place of the weights, if the task keeps one."""
        last = {name: self.model.get_parameter(name).detach().clone() for name in self._average}
        self.model.load_state_dict(self._average, strict=False)
        try:
            yield
        finally:
            self.model.load_state_dict(last, strict=False)


def _case(variant: Variant, task: Task, config: TrainConfig, replicas: Replicas) -> Case:
    """The case of a variant's learning curve."""
    return variant.case(
        kind="train",
        layers=config.num_layers,
        batch=config.batch,
        num_heads=config.num_heads,
        head_dim=config.model_dim // config.num_heads,
        tokens=config.tokens,
        backward=True,
        dtype="float32",
        device=config.device,
        threads=config.threads,
        seed=config.seed,
        ranks=None if replicas.number == 1 else replicas.number,
        **task.case,
    )
