"""Where a run of training keeps its models: of each a checkpoint to go on from, and the best one to use."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from efficient_attn.backends import list_backends, spec
from efficient_attn.errors import DataError
from efficient_attn.problem import AttentionProblem
from efficient_attn.report.files import slug
from efficient_attn.runner.sizes import SEED
from efficient_attn.runner.variants import Variant
from efficient_attn.studies.train.tensor_files import (
    check_like,
    describe_tensors,
    read_tensors,
    write_tensors,
)
from efficient_attn.studies.train.trainer import Trainer, under
from efficient_attn.transformer.language_model import LanguageModel

CHECKPOINTS, MODELS = "checkpoints", "models"
_CHECKPOINT, _MODEL = "efficient-attn training 2", "efficient-attn language model 2"

# Entries that may differ with --force-resume; the curve is then no longer bitwise reproducible.
_ENVIRONMENT = ("torch", "processor", "threads", "device")


def _about(trainer: Trainer, machine: Mapping[str, Any]) -> dict[str, Any]:
    """All that the curve of a trainer follows from."""
    return {
        "backend": trainer.variant.label,
        **{f"{trainer.variant.backend}.{name}": value for name, value in trainer.variant.options.items()},
        **asdict(trainer.config),
        "text": trainer.text.sha256,
        "torch": torch.__version__,
        "processor": machine.get("processor"),
    }


def save_checkpoint(folder: Path, trainer: Trainer, machine: Mapping[str, Any]) -> None:
    """Write the checkpoint, and the model if its last evaluation is its best."""
    for kind in (CHECKPOINTS, MODELS):
        (folder / kind).mkdir(exist_ok=True)
    if trainer.curve and not trainer.recent and trainer.best == trainer.curve[-1]:
        _save_model(model_path(folder, trainer.variant), trainer)
    write_tensors(
        _file(folder, CHECKPOINTS, trainer.variant),
        trainer.tensors(),
        _about(trainer, machine),
        format=_CHECKPOINT,
    )


def load_checkpoint(folder: Path, trainer: Trainer, machine: Mapping[str, Any], *, force: bool) -> None:
    """Restore a trainer from its checkpoint, if there is one.

    Args:
        force: Accept a checkpoint of another environment.

    Raises:
        DataError: If the checkpoint is damaged, or of a run with other options.
    """
    path = _file(folder, CHECKPOINTS, trainer.variant)
    if not path.exists():
        return
    described = describe_tensors(path, format=_CHECKPOINT)
    known, now = described.about, _about(trainer, machine)
    unlike = {name for name in {*known, *now} if known.get(name) != now.get(name)}
    for name in sorted(unlike - set(_ENVIRONMENT)):
        told = "another text" if name == "text" else f"{name}={known.get(name)}, not {now.get(name)}"
        raise DataError(
            f"out: {folder} was begun with {told[:100]} ({trainer.variant.label}). Give the options of that "
            "run, or name a new folder; nothing there was changed."
        )
    changed = "; ".join(
        f"{name} was {known.get(name)}, is {now.get(name)}" for name in _ENVIRONMENT if name in unlike
    )
    if changed and not force:
        raise DataError(
            f"out: {folder} was begun in another environment: {changed[:200]}. Name a new folder, or mix "
            "them with --force-resume."
        )
    _check_shapes(path, described.tensors, trainer)
    tensors = read_tensors(described)
    _check_curve(path, tensors, trainer)
    trainer.restore(tensors)


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
        _check_size(path, about, described.tensors, name if backend is None else None)
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
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path} does not hold a model that can be built: {told}") from None
    return model.eval()


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
        "held_out_bits_per_byte": trainer.curve[-1].held_out,
    }
    write_tensors(path, trainer.model.state_dict(), about, format=_MODEL)


def model_path(folder: Path, variant: Variant) -> Path:
    """Where the best model of a variant is, once there is one."""
    return _file(folder, MODELS, variant)


def _file(folder: Path, kind: str, variant: Variant) -> Path:
    return folder / kind / f"{slug(variant.label)}.safetensors"


def _check_shapes(path: Path, tensors: Mapping[str, Tensor], trainer: Trainer) -> None:
    """Refuse a checkpoint of another model before its tensors are read."""
    wanted = trainer.tensors()
    for name, parameter in trainer.model.named_parameters():
        wanted |= _moments(f"optimiser.{name}.", parameter, tensors)
    for name in ("curve", "held_out", "recent"):
        # Any number of rows, each of the expected shape.
        rows = tensors[name].shape[:1] if name in tensors else ()
        wanted[name] = wanted[name].to("meta").new_empty((*rows, *wanted[name].shape[1:]))
    check_like(path, tensors, wanted)


def _check_curve(path: Path, tensors: Mapping[str, Tensor], trainer: Trainer) -> None:
    """Refuse a curve that this trainer cannot have written."""
    every, curve = trainer.config.every, tensors["curve"]
    steps = [every * number for number in range(1, len(curve) + 1)]
    numbers = [tensors[name].flatten() for name in ("curve", "held_out", "recent", "seconds")]
    if (
        curve[:, 0].tolist() != steps
        or len(tensors["recent"]) > every
        or bool((torch.cat(numbers) < 0).any())
    ):
        raise DataError(f"{path} is damaged: its curve cannot be that of this run.")


def _moments(prefix: str, parameter: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State of AdamW for a parameter; empty before its first gradient."""
    if not under(prefix, dict(tensors)):
        return {}
    like = parameter.detach().cpu()
    return {f"{prefix}step": torch.tensor(0.0), f"{prefix}exp_avg": like, f"{prefix}exp_avg_sq": like}


def _check_size(
    path: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor], backend: str | None
) -> None:
    """Refuse a description of more than the file holds, before memory is taken for it."""
    embedding, numbers = tensors.get("embedding.weight"), sum(map(Tensor.numel, tensors.values()))
    layers = sum(name.endswith(".attention.in_proj_weight") for name in tensors)
    if (
        embedding is None
        or list(embedding.shape) != [256, about["model_dim"]]
        or layers != about["num_layers"]
    ):
        raise DataError(f"{path}: its tensors belong to another model.")
    if about["positions"] == "learned" and about["max_tokens"] * about["model_dim"] > numbers:
        raise DataError(f"{path} describes more numbers than it holds.")
    if backend is None:
        return
    chosen = spec(backend)
    known = {field.name for field in fields(chosen.options_type)}
    if chosen.operations is None or not known >= about["options"].keys():
        return
    problem = AttentionProblem(head_dim=about["model_dim"] // about["num_heads"], causal=True)
    counts = chosen.operations(problem, chosen.options_type(**about["options"]), 1, problem.head_dim)
    if counts.learned + counts.drawn > numbers:
        raise DataError(f"{path} describes more numbers than it holds.")
