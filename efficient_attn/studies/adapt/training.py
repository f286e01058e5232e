"""Adapted backends of a model: trained or calibrated once, with checkpoints in the folder of the run."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.contained import contained
from efficient_attn.errors import DataError
from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.distillation import (
    Distillation,
    Fidelity,
    layer_fidelity,
)
from efficient_attn.integrations.transformers.loading import Opened, token_windows
from efficient_attn.integrations.transformers.plans import plan_of
from efficient_attn.integrations.transformers.saving import save_backends
from efficient_attn.integrations.transformers.swapping import calibrate_on
from efficient_attn.report.files import slug
from efficient_attn.runner.interrupt import held
from efficient_attn.runner.variants import Variant
from efficient_attn.studies.adapt.checkpoints import Checkpoint
from efficient_attn.studies.swap.model import TextSubject
from efficient_attn.studies.workload import Workload

# Seconds of training that a killed process loses at most.
_CHECKPOINT_S = 20.0

# Windows that are read at once for a calibration; more add memory and hardly any knowledge.
_MOST_CALIBRATING = 16

# Learning rates that are tried: in MiniLM, projections of Linformer want 0.0003, maps of Hedgehog 0.1.
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)

# One of so many training windows validates.
_VALIDATING = 8


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of an adaptation.

    Attributes:
        learning_rate: Peak learning rate; None: the best of `RATES` for each layer.
    """

    steps: int
    learning_rate: float | None
    batch: int
    seed: int


class Adapted(NamedTuple):
    """Adapted backends by path of their module.

    Attributes:
        loss: ‖backend − exact‖² / ‖exact‖² on the validation windows, mean over layers; None: calibrated.
        rates: Learning rate of each layer; None: no training made it better.
    """

    backends: Mapping[str, Backend]
    seconds_s: float
    steps: int = 0
    loss: float | None = None
    rates: Mapping[int, float | None] = {}


def held_out_subject(
    opened: Opened, texts: Mapping[str, str], workload: Workload, *, seq_len: int | None, held_out: int
) -> tuple[TextSubject, list[Tensor]]:
    """The model on the last windows of the texts, and the windows before them for training.

    Raises:
        DataError: If the texts have no window for training.
    """
    subject = TextSubject.of(opened, texts, workload, seq_len=seq_len)
    tokens = subject.shared["tokens"]
    windows = [one for text in texts.values() for one in token_windows(opened, text, tokens=tokens)]
    if len(windows) <= held_out:
        raise DataError(
            f"The texts have {len(windows)} windows of {tokens} tokens, of which {held_out} are held out; "
            "name longer texts, or a smaller seq_len or held_out."
        )
    shared = {**subject.shared, "inputs": f"{subject.shared['inputs']}, last {held_out} windows"}
    held = tuple(windows[-held_out:])
    return replace(subject, texts=held, shared=shared), windows[:-held_out]


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
        self._made: dict[str, Adapted] = {}
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

    def adapted(self, variant: Variant) -> Adapted:
        """The adapted backends of a variant; training continues from a checkpoint in the folder."""
        if variant.label not in self._made:
            backends = self.subject.build(variant)
            trained = parameters_of(backends) > 0
            made = self._train(variant, backends) if trained else self._calibrate(backends)
            self._write(variant, made.backends)
            self._made[variant.label] = made
        return self._made[variant.label]

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

    def _calibrate(self, backends: Mapping[str, Backend]) -> Adapted:
        start, subject = time.perf_counter(), self.subject
        with installed(subject.model, subject.sites.every, backends):
            calibrate_on(subject.model.base_model, list(backends.values()), self._calibration)
        return Adapted(backends, time.perf_counter() - start)

    def _train(self, variant: Variant, backends: Mapping[str, Backend]) -> Adapted:
        training, subject, checkpoint = self._training, self.subject, self._checkpoint(variant)
        rates = RATES if training.learning_rate is None else (training.learning_rate,)
        distillation = Distillation(
            subject.model, subject.sites, backends, self._validation, steps=training.steps, rates=rates
        )
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
        layers = {site.path: site.layer for site in subject.sites.swapped}
        students = {layers[path]: student for path, student in distillation.students.items()}
        losses = [student.loss for student in students.values() if student.loss is not None]
        rates_of = {layer: student.rate for layer, student in students.items()}
        return Adapted(backends, seconds_s, training.steps, fmean(losses), rates_of)

    def _checkpoint(self, variant: Variant) -> Checkpoint:
        options = {f"option {name}": value for name, value in variant.options.items()}
        about = {"label": variant.label, "inputs": self.subject.shared["inputs"], **options}
        return Checkpoint(self.folder, variant.label, about | asdict(self._training))

    def _batch(self, step: int) -> Tensor:
        """Windows of a step: consecutive entries of one permutation after another."""
        count, size = len(self._windows), self._training.batch
        chosen = []
        for place in range(step * size, (step + 1) * size):
            epoch, index = divmod(place, count)
            generator = torch.Generator().manual_seed(self._training.seed * 1_000_003 + epoch)
            chosen.append(self._windows[int(torch.randperm(count, generator=generator)[index])])
        return torch.cat(chosen)

    def _write(self, variant: Variant, backends: Mapping[str, Backend]) -> None:
        """Write the adapted backends in the form that `load(folder, into=model)` reads."""
        subject = self.subject
        if self.folder is None or plan_of(subject.model, backends) is None:
            return
        place = self.folder / "adapted" / slug(variant.label)
        place.mkdir(parents=True, exist_ok=True)
        with held(), installed(subject.model, subject.sites.every, backends):
            save_backends(subject.model, place)


def parameters_of(backends: Mapping[str, Backend]) -> int:
    """Number of parameters of all backends."""
    return sum(parameter.numel() for own in backends.values() for parameter in own.parameters())
