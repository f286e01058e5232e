"""One model in training: a step, an evaluation, and everything that has to be kept to go on later.

A step depends on the model, the optimiser and its own number alone; so a run that was
interrupted anywhere goes on as if it had not been.
"""

import math
import time
from contextlib import nullcontext, suppress
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.calibration import calibrate
from efficient_attn.contained import contained
from efficient_attn.measure.checked import backends_in, outputs_checked
from efficient_attn.measure.memory import parameter_bytes
from efficient_attn.runner.records import Record
from efficient_attn.runner.variants import Variant
from efficient_attn.studies.train.config import (
    WARMUP,
    TrainConfig,
    build_model,
    curve_case,
    optimiser,
    rate_at,
    seeded,
    update,
)
from efficient_attn.studies.train.text import Text, batch_at, windows
from efficient_attn.transformer.language_model import LanguageModel

_CALIBRATED_ON = "a batch of the training text"

_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class Point(NamedTuple):
    """One evaluation, in bits per byte; the training loss is the mean over the batches since the last one."""

    step: int
    trained_s: _NotNegative
    held_out: _NotNegative
    train: _NotNegative


class Progress(msgspec.Struct):
    """The curve of a model, kept in its checkpoint.

    Attributes:
        curve: The evaluations.
        held_out: Bits per byte of each held-out window at the last evaluation.
        recent: Bits per byte of each batch since then.
        trained_s: Seconds of all steps.
    """

    curve: list[Point] = []
    held_out: list[_NotNegative] = []
    recent: list[_NotNegative] = []
    trained_s: _NotNegative = 0.0


class Trainer:
    """A language model around one backend, with its optimiser and its progress.

    Attributes:
        failed: Reason why it does not go on; None: it does.
    """

    def __init__(self, variant: Variant, text: Text, config: TrainConfig) -> None:
        self.variant, self.text, self.config = variant, text, config
        self.case = curve_case(variant, text.name, config)
        self.model = build_model(variant, config).to(config.device)
        self.progress = Progress()
        self.failed: str | None = None
        self._optimiser = optimiser(self.model)
        self._windows = self._ids(windows(text.held_out, config.windows, tokens=config.tokens))
        calibrated = any(one.needs_calibration for one in backends_in(self.model))
        self._calibrated_on = _CALIBRATED_ON if calibrated else None
        calibrate(self.model, self._batch()[:, :-1])

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

    def advance(self) -> None:
        """One step: a batch, its loss, one update; a loss that is not finite ends the training."""
        start, config = time.perf_counter(), self.config
        ids = self._batch()
        self.model.train()
        with seeded((config.seed, self.step)), nullcontext() if self.step else outputs_checked(self.model):
            loss = F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            rate = rate_at(self.step + 1, peak=config.learning_rate, warmup=WARMUP)
            if not loss.isfinite() or not update(self.model, self._optimiser, loss, rate=rate):
                self.failed = f"loss or gradient of step {self.step + 1} are not finite"
                return
        self.progress.recent.append(float(loss.detach()) / math.log(2))
        self.progress.trained_s += time.perf_counter() - start

    @torch.no_grad()
    def evaluate(self) -> None:
        """Note the bits per byte of the held-out windows in the curve."""
        progress = self.progress
        self.model.eval()
        parts = self._windows.split(self.config.batch)
        bits = torch.cat([_bits_per_byte(self.model, part) for part in parts])
        point = Point(self.step, progress.trained_s, float(bits.mean()), float(np.mean(progress.recent)))
        if math.isfinite(point.held_out):
            progress.held_out, progress.recent = bits.tolist(), []
            progress.curve.append(point)
        else:
            self.failed = f"the loss of the held-out windows after step {self.step} is not finite"

    def tensors(self) -> dict[str, Tensor]:
        """All weights and the state of the optimiser, by name."""
        kept = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            state = self._optimiser.state[parameter]
            kept |= {f"optimiser.{name}.{entry}": tensor for entry, tensor in state.items()}
        return kept

    def restore(self, tensors: dict[str, Tensor], progress: Progress) -> None:
        """Restore the state returned by `tensors`; names and shapes were checked."""
        self.model.load_state_dict({name: tensors[f"model.{name}"] for name in self.model.state_dict()})
        for name, parameter in self.model.named_parameters():
            for entry, tensor in self._optimiser.state[parameter].items():
                tensor.copy_(tensors[f"optimiser.{name}.{entry}"])
        self.progress = progress

    def record(self) -> Record:
        """The curve as a record; of a model that failed as far as it got."""
        curve = self.progress.curve
        return Record(
            case=self.case,
            status="ok" if self.failed is None else "error",
            reason=self.failed,
            train_steps=tuple(point.step for point in curve),
            train_seconds_s=tuple(point.trained_s for point in curve),
            train_bits_per_byte=tuple(point.train for point in curve),
            held_out_bits_per_byte=tuple(point.held_out for point in curve),
            held_out_bits_per_byte_windows=tuple(self.progress.held_out),
            parameter_bytes=parameter_bytes(self.model),
            calibrated_on=self._calibrated_on,
        )

    def _batch(self) -> Tensor:
        config = self.config
        drawn = batch_at(self.step, self.text, seed=config.seed, batch=config.batch, tokens=config.tokens)
        return self._ids(drawn)

    def _ids(self, bytes_: np.ndarray) -> Tensor:
        return torch.from_numpy(bytes_.astype(np.int64)).to(self.config.device)


def _bits_per_byte(model: LanguageModel, ids: Tensor) -> Tensor:
    """The mean over each window [windows tokens+1], in float64."""
    nats = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
    return nats.double().mean(dim=-1).cpu() / math.log(2)
