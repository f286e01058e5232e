"""Adapted backends of a model: trained or calibrated once, with checkpoints in the folder of the run."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.calibration import calibrate
from efficient_attn.contained import contained
from efficient_attn.errors import DataError
from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.attend import SUBMODULE
from efficient_attn.integrations.transformers.distillation import (
    Distillation,
    Fidelity,
    layer_fidelity,
)
from efficient_attn.integrations.transformers.loading import Opened, data_errors, token_windows
from efficient_attn.integrations.transformers.plans import plan_of
from efficient_attn.integrations.transformers.saving import save_backends
from efficient_attn.report.files import slug
from efficient_attn.runner.interrupt import held
from efficient_attn.runner.variants import Variant
from efficient_attn.studies.swap.model import TextSubject
from efficient_attn.studies.train.checkpoints import checksum, write_tensors
from efficient_attn.studies.workload import Workload
from efficient_attn.tensor_headers import load_tensors, read_header

_KIND = "efficient-attn adaptation 1"

# Seconds of training that a killed process loses at most.
_CHECKPOINT_S = 20.0

# Windows that are read at once for a calibration; more add memory and hardly any knowledge.
_MOST_CALIBRATING = 16


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of an adaptation."""

    steps: int
    learning_rate: float
    batch: int
    seed: int


class Adapted(NamedTuple):
    """Adapted backends by path of their module.

    Attributes:
        loss: Loss of the last step, mean over layers; None: calibrated.
    """

    backends: Mapping[str, Backend]
    seconds_s: float
    steps: int
    loss: float | None


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
    return (
        replace(
            subject,
            texts=held,
            shared=shared,
            calibration=windows[0],
            calibrated_on="the first training window",
        ),
        windows[:-held_out],
    )


class Adaptations:
    """Adapted backends of several variants, each made when it is first asked for.

    Attributes:
        subject: The model with its held-out windows.
        folder: Folder of checkpoints and results; None: memory alone.
    """

    def __init__(self, subject: TextSubject, windows: list[Tensor], training: Training) -> None:
        self.subject = subject
        self.folder: Path | None = None
        self._windows, self._training = windows, training
        self._made: dict[str, Adapted] = {}
        self._fidelity: dict[tuple[str, bool], list[dict[int, Fidelity]]] = {}

    def changes(self, variant: Variant) -> bool:
        """Whether the variant has parameters, or a calibration; False if it cannot be built."""
        try:
            with contained():
                layer = self.subject.layers[0]
                backends = self.subject.build(variant, layer=layer)
        except Exception:  # the measurement records the failure
            return False
        return _has_parameters(backends) or _has_calibration(backends)

    def adapted(self, variant: Variant) -> Adapted:
        """The adapted backends of a variant; training continues from a checkpoint in the folder."""
        if variant.label not in self._made:
            backends = self.subject.build(variant)
            trained = _has_parameters(backends)
            made = self._train(variant, backends) if trained else self._calibrate(backends)
            self._write(variant, made.backends)
            self._made[variant.label] = made
        return self._made[variant.label]

    def fidelity(self, variant: Variant, *, adapted: bool) -> list[dict[int, Fidelity]]:
        """Fidelity of every layer alone, for each held-out window."""
        if (key := (variant.label, adapted)) not in self._fidelity:
            subject = self.subject
            backends = self.adapted(variant).backends if adapted else self._initial(variant)
            self._fidelity[key] = [
                layer_fidelity(subject.model, subject.sites, backends, ids) for ids in subject.texts
            ]
        return self._fidelity[key]

    def _initial(self, variant: Variant) -> Mapping[str, Backend]:
        """The backends of a variant before its adaptation."""
        with self.subject.replaced(variant):
            return {site.path: getattr(site.module, SUBMODULE) for site in self.subject.sites.every}

    def _calibrate(self, backends: Mapping[str, Backend]) -> Adapted:
        start, subject = time.perf_counter(), self.subject
        with installed(subject.model, subject.sites.every, backends), torch.no_grad():
            calibrate(subject.model.base_model, input_ids=torch.cat(self._windows[:_MOST_CALIBRATING]))
        return Adapted(backends, time.perf_counter() - start, 0, None)

    def _train(self, variant: Variant, backends: Mapping[str, Backend]) -> Adapted:
        training, subject = self._training, self.subject
        distillation = Distillation(
            subject.model,
            subject.sites,
            backends,
            steps=training.steps,
            learning_rate=training.learning_rate,
        )
        seconds_s, losses = self._restore(variant, distillation)
        saved_s = seconds_s
        while distillation.step < training.steps:
            start = time.perf_counter()
            try:
                with held():
                    distillation.advance(self._batch(distillation.step))
                    losses = distillation.losses
                    seconds_s += time.perf_counter() - start
                    if seconds_s - saved_s > _CHECKPOINT_S or distillation.step == training.steps:
                        self._save(variant, distillation, seconds_s)
                        saved_s = seconds_s
            except KeyboardInterrupt:
                self._save(variant, distillation, seconds_s)
                raise
        return Adapted(backends, seconds_s, training.steps, sum(losses.values()) / max(len(losses), 1))

    def _batch(self, step: int) -> Tensor:
        """Windows of a step: consecutive entries of one permutation after another."""
        count, size = len(self._windows), self._training.batch
        chosen = []
        for place in range(step * size, (step + 1) * size):
            epoch, index = divmod(place, count)
            generator = torch.Generator().manual_seed(self._training.seed * 1_000_003 + epoch)
            chosen.append(self._windows[int(torch.randperm(count, generator=generator)[index])])
        return torch.cat(chosen)

    def _about(self, variant: Variant) -> dict[str, Any]:
        options = {f"option {name}": value for name, value in variant.options.items()}
        return {"label": variant.label, "inputs": self.subject.shared["inputs"], **options} | asdict(
            self._training
        )

    def _save(self, variant: Variant, distillation: Distillation, seconds_s: float) -> None:
        if self.folder is None:
            return
        path = _checkpoint(self.folder, variant)
        path.parent.mkdir(exist_ok=True)
        progress = {"step": distillation.step, "seconds_s": seconds_s, "losses": distillation.losses}
        about = {**self._about(variant), "progress": progress}
        write_tensors(path, distillation.tensors(), about, kind=_KIND)

    def _restore(self, variant: Variant, distillation: Distillation) -> tuple[float, dict[str, float]]:
        """Seconds and last losses of an earlier training.

        Raises:
            DataError: If its checkpoint is damaged, or of other settings.
        """
        if self.folder is None or not (path := _checkpoint(self.folder, variant)).exists():
            return 0.0, {}
        described, metadata = read_header(path)
        tensors = load_tensors(path, described)
        if metadata.get("format") != _KIND or metadata.get("sha256") != checksum(
            tensors, metadata.get("about", "")
        ):
            raise DataError(f"{path} is damaged or no checkpoint; delete it to adapt {variant.label} again.")
        about = json.loads(metadata["about"])
        progress = about.pop("progress")
        if about != self._about(variant):
            raise DataError(f"{path} is of another adaptation; name a new folder.")
        with data_errors(f"{path} does not fit {variant.label}"):
            distillation.restore(tensors, progress["step"])
        return progress["seconds_s"], progress["losses"]

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
    """Number of parameters, shared ones once."""
    return sum(parameter.numel() for own in backends.values() for parameter in own.parameters())


def _has_parameters(backends: Mapping[str, Backend]) -> bool:
    return parameters_of(backends) > 0


def _has_calibration(backends: Mapping[str, Backend]) -> bool:
    return any(hasattr(own.core, "calibrate") for own in backends.values())


def _checkpoint(folder: Path, variant: Variant) -> Path:
    return folder / "checkpoints" / f"{slug(variant.label)}.safetensors"
