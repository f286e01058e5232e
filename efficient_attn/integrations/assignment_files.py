"""Assignments: backends and options of a model's attentions, without tensors."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from efficient_attn.backend import Backend
from efficient_attn.backends import list_backends, spec
from efficient_attn.backends.by_head import NAME as BY_HEAD
from efficient_attn.backends.by_head import parts_of
from efficient_attn.errors import AttentionError, DataError
from efficient_attn.limits import CONFIG_BYTES, read_bytes
from efficient_attn.options import SEED
from efficient_attn.registry import SPECS

ASSIGNMENT_FORMAT = 1

# Numbers among the options are no larger, unless the sequence is longer.
_LARGEST = 1 << 16

_FIELDS: dict[str, Any] = {"backend": str, "options": dict, "max_tokens": (int, type(None))}


def assignment_of_backends(backends: Mapping[str, Backend]) -> dict[str, Any] | None:
    """Assignment of backends. None if a backend has no registered name."""
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
    return {"format": ASSIGNMENT_FORMAT, "layers": layers}


def is_assignment_file(backend: Any) -> bool:
    """Whether an argument names the file of an assignment rather than a backend."""
    return isinstance(backend, (str, Path)) and str(backend).endswith(".json")


def read_assignment(path: str | Path) -> dict[str, dict[str, Any]]:
    """The layers of an assignment in a file."""
    try:
        assignment = json.loads(read_bytes(Path(path), CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"Cannot read the plan {path}: {error}") from None
    return check_assignment(assignment, str(path))


def check_assignment(assignment: Any, place: str) -> dict[str, dict[str, Any]]:
    """The layers of an assignment, checked. Messages call its origin `place`."""
    version = assignment.get("format") if isinstance(assignment, Mapping) else None
    if version != ASSIGNMENT_FORMAT or isinstance(version, bool):
        raise DataError(f"{place}: efficient_attn is not a plan of format {ASSIGNMENT_FORMAT}.")
    layers = assignment.get("layers")
    if layers == {}:
        raise DataError(f"{place}: efficient_attn names no layer.")
    if not isinstance(layers, Mapping) or not all(_has_fields(layer) for layer in layers.values()):
        raise DataError(f"{place}: a layer in efficient_attn lacks one of the fields {', '.join(_FIELDS)}.")
    for layer in layers.values():
        entries = [layer]
        if layer["backend"] == BY_HEAD:
            with _named_options(BY_HEAD, place):
                entries += parts_of(layer["options"])
        for entry in entries:
            _check_entry(entry, place, most=max(_LARGEST, layer["max_tokens"] or 0))
    return dict(layers)


def _check_entry(entry: Mapping[str, Any], place: str, *, most: int) -> None:
    """Refuse foreign backends and options that are wrong or huge."""
    name, options = entry["backend"], entry["options"]
    # Only registered names, never an address such as file.py:object: an assignment runs no code.
    if name not in (*list_backends(), BY_HEAD):
        raise DataError(
            f"{place} names the backend {name!r}, which is not registered here; "
            f"known: {', '.join(list_backends())}."
        )
    with _named_options(name, place):
        spec(name).options_type(**options)
    large = [key for key, x in options.items() if isinstance(x, int) and key != SEED and x > most]
    if large:
        raise DataError(f"{place}: {large[0]} of backend {name!r} is above {most}.")


@contextmanager
def _named_options(backend: str, place: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, AttentionError) as error:
        raise DataError(f"{place}: the options of {backend!r} are wrong: {error}") from None


def _has_fields(layer: Any) -> bool:
    return (
        isinstance(layer, Mapping)
        and layer.keys() == _FIELDS.keys()
        and all(isinstance(layer[name], kind) for name, kind in _FIELDS.items())
    )
