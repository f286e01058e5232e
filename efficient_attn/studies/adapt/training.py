"""Adapted backends of a model: trained or calibrated once, with checkpoints in the folder of the run."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.contained import contained
from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.distillation import (
    Distillation,
    Fidelity,
    layer_fidelity,
    students_of,
)
from efficient_attn.integrations.transformers.low_rank import (
    Additions,
    LowRankDistillation,
    projections,
)
from efficient_attn.integrations.transformers.plans import plan_of
from efficient_attn.integrations.transformers.saving import save_backends
from efficient_attn.integrations.transformers.swapping import calibrate_on
from efficient_attn.report.files import slug
from efficient_attn.runner.interrupt import held
from efficient_attn.runner.variants import Variant
from efficient_attn.studies.adapt.checkpoints import Checkpoint
from efficient_attn.studies.adapt.labels import LORA
from efficient_attn.studies.swap.model import TextSubject

# Seconds of training that a killed process loses at most.
_CHECKPOINT_S = 20.0

# Windows that are read at once for a calibration; more add memory and hardly any knowledge.
_MOST_CALIBRATING = 16

# Learning rates that are tried: in MiniLM, projections of Linformer want 0.0003, maps of Hedgehog 0.1.
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)

# The same for LoRA, end to end.
LORA_RATES = (0.001, 0.003, 0.01)

# One of so many training windows validates.
_VALIDATING = 8


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of an adaptation.

    Attributes:
        learning_rate: Peak learning rate of backends; None: the best of `RATES` for each layer.
        lora: Rank of additions to the projections; 0: none.
    """

    steps: int
    learning_rate: float | None
    batch: int
    seed: int
    lora: int = 0


class Adapted(NamedTuple):
    """Adapted backends by path of their module.

    Attributes:
        loss: ‖student − teacher‖² / ‖teacher‖² on the validation windows, mean over layers; None: calibrated.
        rates: Learning rate of each layer, or of LoRA (None); None: no training made it better.
        additions: LoRA of the projections.
    """

    backends: Mapping[str, Backend]
    seconds_s: float
    steps: int = 0
    loss: float | None = None
    rates: Mapping[int | None, float | None] = {}
    additions: Additions | None = None


class Adaptations:
    """Adapted backends of several variants, each made when it is first asked for.

    Attributes:
        subject: The model with its held-out windows.
        folder: Folder of checkpoints and results; None: memory alone.
    """

    def __init__(self, subject: TextSubject, windows: list[Tensor], training: Training) -> None:
        self.subject = subject
        self.folder: Path | None = None
        self._training = training
        self._calibration = torch.cat(windows[:_MOST_CALIBRATING])
        # A single window has to train and to validate.
        self._validation = windows[_VALIDATING - 1 :: _VALIDATING] or windows[-1:]
        self._windows = [
            one for one in windows if not any(one is kept for kept in self._validation)
        ] or windows
        self._made: dict[tuple[str, bool], Adapted] = {}
        self._fidelity: dict[tuple[str, bool], list[dict[int, Fidelity]]] = {}

    def changes(self, variant: Variant) -> bool:
        """Whether the variant has parameters, or needs a calibration; False if it cannot be built."""
        return bool(parameters_of(self._first(variant))) or self.calibrates(variant)

    def calibrates(self, variant: Variant) -> bool:
        """Whether the variant needs a calibration, without which it has no output."""
        return any(one.needs_calibration for one in self._first(variant).values())

    @property
    def calibrated_on(self) -> str:
        count = len(self._calibration)
        return "1 training window" if count == 1 else f"{count} training windows"

    def adapted(self, variant: Variant, *, lora: bool = False) -> Adapted:
        """The adapted backends of a variant; training continues from a checkpoint in the folder.

        Args:
            lora: With low-rank additions to the projections, trained after the backends.
        """
        if (key := (variant.label, lora)) not in self._made:
            made = self._add(variant) if lora else self._adapt(variant)
            self._write(variant, made)
            self._made[key] = made
        return self._made[key]

    def fidelity(self, variant: Variant, *, adapted: bool) -> list[dict[int, Fidelity]]:
        """Fidelity of every layer alone, for each held-out window."""
        if (key := (variant.label, adapted)) not in self._fidelity:
            subject = self.subject
            backends = self.adapted(variant).backends if adapted else subject.build(variant)
            self._fidelity[key] = [
                layer_fidelity(subject.model, subject.sites, backends, ids) for ids in subject.texts
            ]
        return self._fidelity[key]

    def _first(self, variant: Variant) -> Mapping[str, Backend]:
        """The backends with the variant in the first layer alone; none if it cannot be built."""
        try:
            with contained():
                return self.subject.build(variant, layer=self.subject.layers[0])
        except Exception:  # the measurement records the failure
            return {}

    def _adapt(self, variant: Variant) -> Adapted:
        backends = self.subject.build(variant)
        return self._train(variant, backends) if parameters_of(backends) else self._calibrate(backends)

    def _calibrate(self, backends: Mapping[str, Backend]) -> Adapted:
        start, subject = time.perf_counter(), self.subject
        with installed(subject.model, subject.sites.every, backends):
            calibrate_on(subject.model.base_model, list(backends.values()), self._calibration)
        return Adapted(backends, time.perf_counter() - start)

    def _train(self, variant: Variant, backends: Mapping[str, Backend]) -> Adapted:
        training, subject = self._training, self.subject
        rates = RATES if training.learning_rate is None else (training.learning_rate,)
        students = students_of(subject.model, subject.sites, backends, rates)
        distillation = Distillation(
            subject.model, subject.sites, students, self._validation, steps=training.steps
        )
        seconds_s = self._run(distillation, self._checkpoint(variant))
        layers = {site.path: site.layer for site in subject.sites.swapped}
        losses = [student.loss for student in students.values() if student.loss is not None]
        rates_of: dict[int | None, float | None] = {
            layers[path]: student.rate for path, student in students.items()
        }
        return Adapted(backends, seconds_s, training.steps, fmean(losses), rates_of)

    def _add(self, variant: Variant) -> Adapted:
        """LoRA of the projections around the adapted backends."""
        training, subject = self._training, self.subject
        backends = self.adapted(variant).backends
        found = projections(subject.model, subject.sites)
        additions = Additions(found, rank=training.lora, seed=training.seed)
        distillation = LowRankDistillation(
            subject.model,
            subject.sites,
            backends,
            additions,
            self._validation,
            steps=training.steps,
            rates=LORA_RATES,
        )
        seconds_s = self._run(distillation, self._checkpoint(variant, LORA))
        (student,) = distillation.students.values()
        return Adapted(backends, seconds_s, training.steps, student.loss, {None: student.rate}, additions)

    def _run(self, distillation: Distillation, checkpoint: Checkpoint) -> float:
        """Take all steps that a checkpoint has not; returns the seconds of all."""
        training = self._training
        seconds_s = saved_s = checkpoint.restore(distillation)
        while distillation.step < training.steps:
            start = time.perf_counter()
            try:
                with held():
                    distillation.advance(self._batch(distillation.step))
                    seconds_s += time.perf_counter() - start
                    if seconds_s - saved_s > _CHECKPOINT_S or distillation.step == training.steps:
                        checkpoint.save(distillation, seconds_s)
                        saved_s = seconds_s
            except KeyboardInterrupt:
                checkpoint.save(distillation, seconds_s)
                raise
        return seconds_s

    def _checkpoint(self, variant: Variant, end: str = "") -> Checkpoint:
        options = {f"option {name}": value for name, value in variant.options.items()}
        label = f"{variant.label}{end}"
        about = {"label": label, "inputs": self.subject.shared["inputs"], **options}
        return Checkpoint(self.folder, label, about | asdict(self._training))

    def _batch(self, step: int) -> Tensor:
        """Windows of a step: consecutive entries of one permutation after another."""
        count, size = len(self._windows), self._training.batch
        chosen = []
        for place in range(step * size, (step + 1) * size):
            epoch, index = divmod(place, count)
            generator = torch.Generator().manual_seed(self._training.seed * 1_000_003 + epoch)
            chosen.append(self._windows[int(torch.randperm(count, generator=generator)[index])])
        return torch.cat(chosen)

    def _write(self, variant: Variant, made: Adapted) -> None:
        """Write the adapted backends and LoRA in the form that `load(folder, into=model)` reads."""
        subject, backends = self.subject, made.backends
        if self.folder is None or plan_of(subject.model, backends) is None:
            return
        place = self.folder / ("adapted" if made.additions is None else "lora") / slug(variant.label)
        place.mkdir(parents=True, exist_ok=True)
        with held(), installed(subject.model, subject.sites.every, backends):
            save_backends(subject.model, place)
            if made.additions is not None:
                made.additions.save(place)


def parameters_of(backends: Mapping[str, nn.Module]) -> int:
    """Number of parameters of all backends."""
    return sum(parameter.numel() for own in backends.values() for parameter in own.parameters())
