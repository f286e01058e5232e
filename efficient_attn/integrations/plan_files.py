"""Plans: backends and options of a model's attentions, without tensors."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from efficient_attn.backend import Backend
from efficient_attn.backends import list_backends, spec
from efficient_attn.backends.by_head import NAME as BY_HEAD
from efficient_attn.backends.by_head import parts_of
from efficient_attn.errors import AttentionError, DataError, UnknownNameError
from efficient_attn.limits import CONFIG_BYTES, read_bytes
from efficient_attn.options import SEED
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import SPECS

PLAN_FORMAT = 1

# Numbers of a backend that no plan is refused for.
_ALWAYS = 1 << 24

# Options that count something are no larger in a plan, unless the sequence is longer.
_LARGEST = 1 << 16

_FIELDS: dict[str, Any] = {"backend": str, "options": dict, "max_tokens": (int, type(None))}


def plan_of_backends(backends: Mapping[str, Backend]) -> dict[str, Any] | None:
    """Plan of backends. None if a backend has no registered name."""
    if any(SPECS.get(x.spec.name) is not x.spec for x in backends.values()):
        return None
    layers = {
        name: {
            "backend": backend.spec.name,
            "options": asdict(backend.options),
            "max_tokens": backend.problem.max_tokens,
        }
        for name, backend in backends.items()
    }
    return {"format": PLAN_FORMAT, "layers": layers}


def is_plan_file(backend: Any) -> bool:
    """Whether an argument names a file of a plan rather than a backend."""
    return isinstance(backend, (str, Path)) and str(backend).endswith(".json")


def read_plan(path: str | Path) -> dict[str, dict[str, Any]]:
    """The layers of a plan in a file.

    Raises:
        DataError: If the file cannot be read or holds no plan.
    """
    try:
        plan = json.loads(read_bytes(Path(path), CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"Cannot read the plan {path}: {error}") from None
    return check_plan(plan, str(path))


def check_plan(plan: Any, place: str) -> dict[str, dict[str, Any]]:
    """The layers of a plan, checked.

    Raises:
        DataError: If it is no plan; `place` is its origin in the message.
    """
    version = plan.get("format") if isinstance(plan, Mapping) else None
    if version != PLAN_FORMAT or isinstance(version, bool):
        raise DataError(f"{place}: efficient_attn is not a plan of format {PLAN_FORMAT}.")
    layers = plan.get("layers")
    if layers == {}:
        raise DataError(f"{place}: efficient_attn names no layer.")
    if not isinstance(layers, Mapping) or not all(_has_fields(layer) for layer in layers.values()):
        raise DataError(f"{place}: a layer in efficient_attn lacks one of the fields {', '.join(_FIELDS)}.")
    # Only registered names, never an address such as file.py:object: loading a model runs none of its code.
    names = {entry["backend"] for layer in layers.values() for entry in _entries(layer, place)}
    if unknown := names - {*list_backends(), BY_HEAD}:
        raise DataError(
            f"{place} names the backend {min(unknown)!r}, which is not registered here; "
            f"known: {', '.join(list_backends())}."
        )
    return dict(layers)


def check_size(
    layer: Mapping[str, Any], problem: AttentionProblem, parameters: int, *, saved: int | None = None
) -> None:
    """Refuse unknown and huge options before memory is allocated.

    Args:
        parameters: Numbers of the model.
        saved: Numbers that were saved with the plan, which the backend must not exceed.

    Raises:
        UnknownNameError: If the backend has no such option.
        DataError: If the backend needs more numbers.
    """
    parts = _entries(layer, "The plan")[1:]
    for part in parts:
        check_size(part, replace(problem, num_heads=None), parameters, saved=saved)
    if parts:
        return
    chosen = spec(layer["backend"])
    names = [option.name for option in fields(chosen.options_type)]
    for option in layer["options"].keys() - {*names}:
        raise UnknownNameError(f"option of backend {chosen.name!r}", option, names)
    # Beyond the length, more steps, clusters or keys of a window take time and memory without effect.
    most = max(_LARGEST, problem.max_tokens or 0)
    numbers = {name: x for name, x in layer["options"].items() if isinstance(x, (int, float))}
    large = [name for name, x in numbers.items() if name != SEED and x > most]
    if large:
        raise DataError(f"{large[0]} of backend {chosen.name!r} is above {most}.")
    if chosen.operations is None:
        return
    counts = chosen.operations(problem, chosen.options_type(**layer["options"]), 1, problem.head_dim)
    if counts is None:
        return
    needed, limit = counts.learned + counts.drawn, max(parameters, _ALWAYS) if saved is None else saved
    if needed > limit:
        what = "are the most here" if saved is None else "are saved"
        raise DataError(f"backend {chosen.name!r} needs {needed} numbers, {limit} {what}.")


def _entries(layer: Mapping[str, Any], place: str) -> list[Mapping[str, Any]]:
    """A layer of a plan, and the backends of its key heads where they differ."""
    if layer["backend"] != BY_HEAD:
        return [layer]
    try:
        return [layer, *parts_of(layer["options"])]
    except (TypeError, AttentionError) as error:
        raise DataError(f"{place}: the options of {BY_HEAD!r} are none: {error}") from None


def _has_fields(layer: Any) -> bool:
    return (
        isinstance(layer, Mapping)
        and layer.keys() == _FIELDS.keys()
        and all(isinstance(layer[name], kind) for name, kind in _FIELDS.items())
    )
