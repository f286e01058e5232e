"""Files of tensors and what describes them: safetensors, written whole or not at all, checked when read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from efficient_attn.errors import DataError
from efficient_attn.report.files import write

_FORMAT, _ABOUT = "format", "about"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], *, format: str
) -> Path:
    """Write tensors, with what describes them as JSON in the file's metadata."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = {_FORMAT: format, _ABOUT: json.dumps(about, allow_nan=False, ensure_ascii=False)}
    return write(path, save(whole, metadata=described))


def read_tensors(path: Path, *, format: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, all finite, and what describes them.

    Raises:
        DataError: If it cannot be read, is cut off, or is no file of this format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from None
    except (SafetensorError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} is no whole safetensors file: {' '.join(str(error).split())[:200]}."
        ) from None
    if told.get(_FORMAT) != format:
        raise DataError(f"{path} has format {str(told.get(_FORMAT))[:40]!r}; wanted is {format!r}.")
    try:
        about = json.loads(told.get(_ABOUT, ""))
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise DataError(f"{path} does not say in its metadata what it holds.")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DataError(f"{path} holds {name[:80]!r} with entries that are not finite.")
    return tensors, about


def check_like(path: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse tensors of other names, shapes or dtypes than those wanted."""
    if unlike := sorted(tensors.keys() ^ wanted.keys()):
        has = "lacks" if unlike[0] in wanted else "has, beyond what is wanted,"
        raise DataError(f"{path} is of another model: it {has} {unlike[0][:80]!r}.")
    for name, tensor in wanted.items():
        found = tensors[name]
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise DataError(
                f"{path} is of another model: {name!r} is {found.dtype} {list(found.shape)}, "
                f"not {tensor.dtype} {list(tensor.shape)}."
            )
