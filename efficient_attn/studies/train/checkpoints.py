"""Checkpoints of training: safetensors files with a description and a checksum."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor

from efficient_attn.errors import DataError
from efficient_attn.report.files import slug, write
from efficient_attn.strict import read_object
from efficient_attn.studies.train.language import POSITIONS, WARMUP
from efficient_attn.studies.train.trainer import Progress, Trainer
from efficient_attn.tensor_headers import load_tensors, read_header

CHECKPOINTS = "checkpoints"
_FORMAT = "efficient-attn training 3"

# Former options of training, which have one value now, and a later option's value before it.
_FIXED = {"positions": POSITIONS, "warmup": WARMUP, "task": "text"}

# Entries of the configuration that may differ with --force-resume; the folder of the run checks them.
_ENVIRONMENT = ("threads", "device")


def save_checkpoint(folder: Path, trainer: Trainer) -> None:
    """Write everything to go on from."""
    path = _file(folder, trainer)
    path.parent.mkdir(exist_ok=True)
    about = {**_about(trainer), "progress": msgspec.to_builtins(trainer.progress)}
    write_tensors(path, trainer.tensors(), about)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], *, kind: str = _FORMAT
) -> None:
    """Write tensors, with a description as JSON and a checksum in the file's metadata."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(about, allow_nan=False, ensure_ascii=False)
    metadata = {"format": kind, "about": text, "sha256": checksum(whole, text)}
    write(path, save(whole, metadata=metadata))


def load_checkpoint(folder: Path, trainer: Trainer) -> None:
    """Restore a trainer from its checkpoint, if there is one.

    Raises:
        DataError: If the checkpoint is damaged, or of a run with other options.
    """
    path = _file(folder, trainer)
    if not path.exists():
        return
    described, metadata = read_header(path)
    if metadata.get("format") != _FORMAT:
        raise DataError(f"{path} has format {str(metadata.get('format'))[:40]!r}; wanted is {_FORMAT!r}.")
    known = {**_FIXED, **read_object(metadata.get("about", ""), f"The description in {path}")}
    now = {**_FIXED, **_about(trainer)}
    names = sorted((known.keys() | now.keys()) - {"progress"})
    for name in (name for name in names if known.get(name) != now.get(name)):
        other = "another text" if name == "text" else f"{name}={known.get(name)}, not {now.get(name)}"
        raise DataError(
            f"out: {folder} was begun with {other[:100]} ({trainer.variant.label}). Give the options of that "
            "run, or name a new folder; nothing there was changed."
        )
    _check_like(path, described, trainer.tensors())
    progress = _progress(path, known.get("progress"), every=trainer.config.every)
    tensors = load_tensors(path, described)
    if metadata.get("sha256") != checksum(tensors, metadata["about"]):
        raise DataError(
            f"{path} is damaged: its contents do not match its checksum. Restore the file from a copy, or "
            "delete it and train this model again."
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DataError(f"{path} holds {name[:80]!r} with entries that are not finite.")
    trainer.restore(tensors, progress)


def _about(trainer: Trainer) -> dict[str, Any]:
    """All that the curve of a trainer follows from."""
    config = {name: value for name, value in asdict(trainer.config).items() if name not in _ENVIRONMENT}
    options = {f"{trainer.variant.backend}.{name}": one for name, one in trainer.variant.options.items()}
    if trainer.replicas.number > 1:
        config["processes"] = trainer.replicas.number
    return {"backend": trainer.variant.label, **options, **config, "text": trainer.task.digest}


def _file(folder: Path, trainer: Trainer) -> Path:
    return folder / CHECKPOINTS / f"{slug(trainer.variant.label)}.safetensors"


def _progress(path: Path, value: Any, *, every: int) -> Progress:
    """The progress that a checkpoint describes, with an evaluation every so many steps."""
    try:
        progress = msgspec.convert(value, Progress)
    except msgspec.ValidationError as error:
        raise DataError(f"{path} is damaged: its progress is not readable: {str(error)[:200]}.") from None
    steps = [every * number for number in range(1, len(progress.curve) + 1)]
    if [point.step for point in progress.curve] != steps or len(progress.recent) > every:
        raise DataError(f"{path} is damaged: its curve cannot be that of this run.")
    return progress


def checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    """SHA-256 of the description and of names, dtypes, shapes and bytes of all tensors."""
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_like(path: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse tensors of other names, shapes or dtypes than expected."""
    if unlike := sorted(tensors.keys() ^ wanted.keys()):
        has = "lacks" if unlike[0] in wanted else "has the unexpected tensor"
        raise DataError(f"{path} is of another model: it {has} {unlike[0][:80]!r}.")
    for name, tensor in wanted.items():
        found = tensors[name]
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise DataError(
                f"{path} is of another model: {name!r} is {found.dtype} {list(found.shape)}, "
                f"not {tensor.dtype} {list(tensor.shape)}."
            )
