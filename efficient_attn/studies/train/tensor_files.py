"""Files of tensors with a description: safetensors, written whole or not at all, checked when read."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save
from torch import Tensor, uint8

from efficient_attn.errors import DataError
from efficient_attn.report.files import write
from efficient_attn.strict import read_object
from efficient_attn.tensor_headers import load_tensors, read_header

_FORMAT, _ABOUT, _CHECKSUM = "format", "about", "sha256"


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


def check_like(path: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
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


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    """SHA-256 of the description and of names, dtypes, shapes and bytes of all tensors."""
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(uint8).numpy().data)
    return digest.hexdigest()
