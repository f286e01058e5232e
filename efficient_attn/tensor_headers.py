"""Validation of safetensors headers before any tensor is allocated.

The safetensors library checks shapes and offsets against the file size, but accepts headers of 100 MB, which
take seconds and half a gigabyte.
"""

import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from efficient_attn.errors import DataError
from efficient_attn.limits import TENSOR_FILE_BYTES, TENSOR_HEADER_BYTES, TENSORS
from efficient_attn.strict import read_object

_LENGTH_BYTES, _MOST_AXES = 8, 16
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Header(NamedTuple):
    """Header of a tensor file.

    Attributes:
        tensors: Shape and dtype of each tensor, as tensors on the meta device, which hold no data.
        metadata: Metadata strings.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_header(path: Path, *, hint: str = "") -> Header:
    """Read the header of a file whose tensors will be read as a whole.

    Args:
        hint: Advice for the error message on other files.

    Raises:
        DataError: If the file cannot be read, is not a safetensors file, or exceeds a limit.
    """
    entries, metadata, size = _read(path, hint)
    if size > TENSOR_FILE_BYTES:
        raise DataError(f"{path} has {size} bytes; at most {TENSOR_FILE_BYTES} are read.")
    return Header({name: _described(path, name, entry, size) for name, entry in entries.items()}, metadata)


def check_header(path: Path) -> None:
    """Refuse a file with a header above the limits, before another library reads it."""
    _read(path)


def load_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """The named tensors of a file whose header has been read."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    # PyTorch raises a RuntimeError if the file cannot be mapped into memory.
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise _broken(path, " ".join(str(error).split())[:200]) from None


def _read(path: Path, hint: str = "") -> tuple[dict[str, Any], dict[str, str], int]:
    """Entries and metadata of a header, and the size of the file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH_BYTES)
            (length,) = struct.unpack("<Q", start.ljust(_LENGTH_BYTES, b"\0"))
            text = file.read(min(length, TENSOR_HEADER_BYTES))
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None
    if not text.startswith(b"{"):
        raise _broken(path, f"it has no header{hint}")
    if length > TENSOR_HEADER_BYTES:
        raise DataError(f"{path} has a header of {length} bytes; at most {TENSOR_HEADER_BYTES} are read.")
    if len(text) < length:
        raise _broken(path, "its header is truncated")
    entries = read_object(text, f"{path} is not a valid safetensors file: its header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(path, "its metadata are not strings")
    if len(entries) > TENSORS:
        raise DataError(f"{path} holds {len(entries)} tensors; at most {TENSORS} are read.")
    return entries, metadata, size


def _described(path: Path, name: str, entry: Any, size: int) -> Tensor:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    if (
        not isinstance(shape, list)
        or len(shape) > _MOST_AXES
        or not all(type(length) is int and 0 <= length <= size for length in shape)
    ):
        raise _broken(path, f"{name[:80]!r} has no shape that fits its data")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise DataError(
            f"{path} holds {name[:80]!r} as {str(dtype)[:40]!r}; dtypes are {', '.join(_DTYPES)}."
        )
    if math.prod(shape) * _DTYPES[dtype].itemsize > size:
        raise _broken(path, f"{name[:80]!r} is larger than the file")
    return torch.empty(shape, dtype=_DTYPES[dtype], device="meta")


def _broken(path: Path, reason: str) -> DataError:
    return DataError(f"{path} is not a valid safetensors file: {reason}.")
