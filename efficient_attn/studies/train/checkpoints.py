"""Checkpoints of training and the best models: safetensors files with a description and a checksum."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor

from efficient_attn.backends import list_backends
from efficient_attn.errors import DataError
from efficient_attn.report.files import slug, write
from efficient_attn.runner.sizes import SEED
from efficient_attn.runner.variants import Variant
from efficient_attn.strict import read_object
from efficient_attn.studies.train.trainer import Progress, Trainer
from efficient_attn.tensor_headers import load_tensors, read_header
from efficient_attn.transformer.language_model import LanguageModel

CHECKPOINTS, MODELS = "checkpoints", "models"
_CHECKPOINT, _MODEL = "efficient-attn training 3", "efficient-attn language model 2"
_FORMAT, _ABOUT, _CHECKSUM, _PROGRESS = "format", "about", "sha256", "progress"

# Entries of the configuration that may differ with --force-resume; the folder of the run checks them.
_ENVIRONMENT = ("threads", "device")


class Described(NamedTuple):
    """Description of a file, read before its tensors.

    Attributes:
        tensors: Shape and dtype of each, without data.
        about: The description that was written with them.
        metadata: The texts of the file's header.
    """

    path: Path
    tensors: dict[str, Tensor]
    about: dict[str, Any]
    metadata: dict[str, str]


def save_checkpoint(folder: Path, trainer: Trainer) -> None:
    """Write the checkpoint, and the model if its last evaluation is its best."""
    for kind in (CHECKPOINTS, MODELS):
        (folder / kind).mkdir(exist_ok=True)
    progress = trainer.progress
    best = min(progress.curve, key=lambda point: point.held_out, default=None)
    if best is not None and not progress.recent and best == progress.curve[-1]:
        _save_model(_file(folder, MODELS, trainer.variant), trainer)
    about = {**_about(trainer), _PROGRESS: msgspec.to_builtins(progress)}
    write_tensors(_file(folder, CHECKPOINTS, trainer.variant), trainer.tensors(), about, format=_CHECKPOINT)


def load_checkpoint(folder: Path, trainer: Trainer) -> None:
    """Restore a trainer from its checkpoint, if there is one.

    Raises:
        DataError: If the checkpoint is damaged, or of a run with other options.
    """
    path = _file(folder, CHECKPOINTS, trainer.variant)
    if not path.exists():
        return
    described = describe_tensors(path, format=_CHECKPOINT)
    known, now = described.about, _about(trainer)
    for name in sorted(name for name in now if known.get(name) != now[name]):
        other = "another text" if name == "text" else f"{name}={known.get(name)}, not {now[name]}"
        raise DataError(
            f"out: {folder} was begun with {other[:100]} ({trainer.variant.label}). Give the options of that "
            "run, or name a new folder; nothing there was changed."
        )
    _check_like(path, described.tensors, trainer.tensors())
    try:
        progress = msgspec.convert(known.get(_PROGRESS), Progress)
    except msgspec.ValidationError as error:
        raise DataError(f"{path} is damaged: its progress is not readable: {str(error)[:200]}.") from None
    every = trainer.config.every
    steps = [every * number for number in range(1, len(progress.curve) + 1)]
    if [point.step for point in progress.curve] != steps or len(progress.recent) > every:
        raise DataError(f"{path} is damaged: its curve cannot be that of this run.")
    trainer.restore(read_tensors(described), progress)


def _about(trainer: Trainer) -> dict[str, Any]:
    """All that the curve of a trainer follows from."""
    config = {name: value for name, value in asdict(trainer.config).items() if name not in _ENVIRONMENT}
    options = {f"{trainer.variant.backend}.{name}": one for name, one in trainer.variant.options.items()}
    return {"backend": trainer.variant.label, **options, **config, "text": trainer.text.sha256}


def _save_model(path: Path, trainer: Trainer) -> None:
    config, variant = trainer.config, trainer.variant
    about = {
        "backend": variant.backend,
        # The draws are among the tensors.
        "options": {name: value for name, value in variant.options.items() if name != SEED},
        **{name: getattr(config, name) for name in ("model_dim", "num_heads", "num_layers", "positions")},
        "max_tokens": config.tokens,
        "text": trainer.text.name,
        "step": trainer.step,
        "held_out_bits_per_byte": trainer.progress.curve[-1].held_out,
    }
    write_tensors(path, trainer.model.state_dict(), about, format=_MODEL)


def read_model(path: str | Path, *, backend: Any = None) -> LanguageModel:
    """The language model in a file that training wrote, ready to read and to generate bytes.

    Args:
        backend: Whatever `build` takes; None: the one that the file names, which is one of the table.

    Raises:
        DataError: If it is no such file.
    """
    path = Path(path)
    described = describe_tensors(path, format=_MODEL)
    about = described.about
    name = about.get("backend")
    if backend is None and name not in list_backends():
        raise DataError(f"{path} has a model around {str(name)[:80]!r}, which is in no table; give backend=.")
    try:
        _check_size(path, about, described.tensors)
        with torch.random.fork_rng(devices=()):
            model = LanguageModel(
                about["model_dim"],
                about["num_heads"],
                name if backend is None else backend,
                num_layers=about["num_layers"],
                positions=about["positions"],
                max_tokens=about["max_tokens"],
                **about["options"],
            )
        # Checks names and shapes; the shapes of calibrated features follow from the file.
        model.load_state_dict(read_tensors(described))
    except DataError:
        raise
    except Exception as error:  # A description that was made up can make them raise anything.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path} does not hold a model that can be built: {reason}") from None
    return model.eval()


def _check_size(path: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse a description of more than the file holds, before memory is taken for it."""
    embedding, held = tensors.get("embedding.weight"), sum(map(Tensor.numel, tensors.values()))
    shape = None if embedding is None else list(embedding.shape)
    layers = sum(name.endswith(".attention.in_proj_weight") for name in tensors)
    if shape != [256, about["model_dim"]] or layers != about["num_layers"]:
        raise DataError(f"{path}: its tensors belong to another model.")
    sizes = [value for value in about["options"].values() if isinstance(value, int)]
    if about["positions"] == "learned":
        sizes.append(about["max_tokens"] * about["model_dim"])
    if max(sizes, default=0) > held:
        raise DataError(f"{path} describes more numbers than it holds.")


def _file(folder: Path, kind: str, variant: Variant) -> Path:
    return folder / kind / f"{slug(variant.label)}.safetensors"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], *, format: str
) -> Path:
    """Write tensors, with a description as JSON and a checksum in the file's metadata."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = {_FORMAT: format, _ABOUT: json.dumps(about, allow_nan=False, ensure_ascii=False)}
    described[_CHECKSUM] = _checksum(whole, described[_ABOUT])
    return write(path, save(whole, metadata=described))


def describe_tensors(path: Path, *, format: str) -> Described:
    """The shapes of the tensors in a file and their description; no tensor is read.

    Raises:
        DataError: If it cannot be read, is cut off, exceeds a limit, or is no file of this format.
    """
    tensors, metadata = read_header(path)
    if metadata.get(_FORMAT) != format:
        raise DataError(f"{path} has format {str(metadata.get(_FORMAT))[:40]!r}; wanted is {format!r}.")
    about = read_object(metadata.get(_ABOUT, ""), f"The description in {path}")
    return Described(path, tensors, about, metadata)


def read_tensors(described: Described) -> dict[str, Tensor]:
    """The tensors of a file, all finite and as they were written.

    Raises:
        DataError: If a bit of them or of their description is another one.
    """
    path = described.path
    tensors = load_tensors(path, described.tensors)
    if described.metadata.get(_CHECKSUM) != _checksum(tensors, described.metadata[_ABOUT]):
        raise DataError(
            f"{path} is damaged: its contents do not match its checksum. Restore the file from a copy, or "
            "delete it and train this model again."
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DataError(f"{path} holds {name[:80]!r} with entries that are not finite.")
    return tensors


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
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
