"""Plans: the backend of every attention module, as configurations of saved models and files hold them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from efficient_attn.backend import Backend
from efficient_attn.backends import list_backends, spec
from efficient_attn.errors import AttentionError, DataError, UnknownNameError
from efficient_attn.integrations.transformers.assignment import Choice, build_all
from efficient_attn.integrations.transformers.attention_sites import AttentionSite
from efficient_attn.integrations.transformers.loading import data_errors
from efficient_attn.limits import CONFIG_BYTES, read_bytes
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import SPECS

PLAN_FORMAT = 1

# Saved tensors of the backend of each attention module, by their names in the backend.
Kept = dict[str, dict[str, Tensor]]

# Numbers of a backend that no plan is refused for.
_ALWAYS = 1 << 24

_FIELDS: dict[str, Any] = {"backend": str, "options": dict, "max_tokens": (int, type(None))}


def is_plan_file(backend: Any) -> bool:
    """Whether an argument names a file of a plan rather than a backend."""
    return isinstance(backend, (str, Path)) and str(backend).endswith(".json")


def read_plan(path: str | Path) -> dict[str, dict[str, Any]]:
    """The layers of a plan in a file.

    Raises:
        DataError: If the file cannot be read or holds no plan.
    """
    try:
        return check_plan(json.loads(read_bytes(Path(path), CONFIG_BYTES)), str(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"Cannot read the plan {path}: {error}") from None


def check_plan(plan: Any, place: str) -> dict[str, dict[str, Any]]:
    """The layers of a plan, in the form that `attach` writes, checked.

    Raises:
        DataError: If it is no plan; `place` is its origin in the message.
    """
    if not isinstance(plan, Mapping) or plan.get("format") != PLAN_FORMAT:
        raise DataError(f"{place}: efficient_attn is not a plan of format {PLAN_FORMAT}.")
    layers = plan.get("layers")
    if not isinstance(layers, Mapping) or not all(_is_layer(layer) for layer in layers.values()):
        raise DataError(f"{place}: a layer in efficient_attn lacks one of the fields {', '.join(_FIELDS)}.")
    # Only registered names, never an address such as file.py:object: loading a model runs none of its code.
    unknown = {layer["backend"] for layer in layers.values()} - set(list_backends())
    if unknown:
        raise DataError(
            f"{place} names the backend {min(unknown)!r}, which is not registered here; "
            f"known: {', '.join(list_backends())}."
        )
    return dict(layers)


def _is_layer(layer: Any) -> bool:
    return (
        isinstance(layer, Mapping)
        and layer.keys() == _FIELDS.keys()
        and all(isinstance(layer[name], kind) for name, kind in _FIELDS.items())
    )


def build_plan(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    layers: Mapping[str, Mapping[str, Any]],
    place: str,
    kept: Kept | None = None,
) -> dict[str, Backend]:
    """Build the planned backend of every attention module.

    Args:
        place: Origin of the plan, for messages.
        kept: Saved tensors, whose numbers the backends must not exceed; None: as many as the model has.
    """
    named = {name_in_plan(model, site.path): site for site in sites}
    if named.keys() != layers.keys():
        raise DataError(f"{place}: the layers in efficient_attn belong to another model.")
    backends: dict[str, Backend] = {}
    for name, site in named.items():
        layer = layers[name]
        choice = {site.path: Choice(layer["backend"], layer["options"])}
        numbers = max(model.num_parameters(), _ALWAYS)
        if kept is not None:
            numbers = sum(tensor.numel() for tensor in kept[site.path].values())
        try:
            with data_errors(f"backend {layer['backend']!r} cannot be built"):
                _check_size(site, layer, numbers, "are saved" if kept is not None else "are the most here")
                backends |= build_all([site], choice, layer["max_tokens"], None)
        except AttentionError as error:
            raise DataError(f"{place}, {site.path}: {error}") from None
    return backends


def _check_size(site: AttentionSite, layer: Mapping[str, Any], numbers: int, source: str) -> None:
    """Refuse unknown options, and more numbers than these, before memory is allocated for them."""
    chosen = spec(layer["backend"])
    known = [one.name for one in fields(chosen.options_type)]
    for option in layer["options"].keys() - {*known}:
        raise UnknownNameError(f"option of backend {chosen.name!r}", option, known)
    if chosen.operations is None:
        return
    problem = AttentionProblem(
        head_dim=site.head_dim,
        num_heads=site.num_heads,
        max_tokens=layer["max_tokens"] or site.max_tokens,
        causal=site.pattern.causal,
    )
    counts = chosen.operations(problem, chosen.options_type(**layer["options"]), 1, site.head_dim)
    if counts.learned + counts.drawn > numbers:
        raise DataError(
            f"backend {chosen.name!r} needs {counts.learned + counts.drawn} numbers, {numbers} {source}."
        )


def plan_of(model: PreTrainedModel, backends: Mapping[str, Backend]) -> dict[str, Any] | None:
    """Plan of the attached backends for the configuration; None if a backend has no registered name."""
    if any(SPECS.get(own.spec.name) is not own.spec for own in backends.values()):
        return None
    layers = {
        name_in_plan(model, path): {
            "backend": own.spec.name,
            "options": asdict(own.options),
            "max_tokens": own.problem.max_tokens,
        }
        for path, own in backends.items()
    }
    return {"format": PLAN_FORMAT, "layers": layers}


def name_in_plan(model: PreTrainedModel, path: str) -> str:
    """The path relative to the base model, so that a plan fits a model with and without its head."""
    return path.removeprefix(f"{model.base_model_prefix}.")
