"""Limits of all readers, which refuse larger inputs before parsing, and strict JSON."""

import errno
import os
from pathlib import Path
from typing import Any, BinaryIO

from efficient_attn.errors import DataError

# A record takes a few kilobytes, a run a few hundred lines; ten million samples take 240 megabytes.
RECORD_LINE_BYTES, RECORDS_BYTES = 1 << 24, 1 << 28

# Counts in records (tokens, heads, threads, answers, …), and other whole numbers, which fit into 64 bits.
COUNT, WHOLE_NUMBER = 1 << 40, (1 << 63) - 1

# Files whose tensors are read as a whole: captured activations.
TENSOR_FILE_BYTES = 1 << 34

# Text files: environment of a run, model configuration, text for a model, file of a tokenizer.
ENVIRONMENT_BYTES, CONFIG_BYTES, TEXT_BYTES, TOKENIZER_BYTES = 1 << 22, 1 << 22, 1 << 24, 1 << 28


def open_regular(path: Path) -> BinaryIO:
    # Reading a pipe or a device may take for ever.
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))
    return path.open("rb")


def read_bytes(path: Path, most: int) -> bytes:
    """Content of a file, of which at most one byte more than the limit is read.

    Raises:
        DataError: If the file is larger than `most` bytes.
        OSError: If the file cannot be read.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DataError(f"{path} is larger than {most} bytes, the limit for such a file.")
    return data


def check_header(path: Path, *, most: int | None = None, hint: str = "") -> None:
    """Refuse an invalid or too large safetensors file before the library reads it.

    Args:
        most: Largest size of the file; None: unlimited.
        hint: Advice for the error message on other files.
    """
    try:
        with open_regular(path) as file:
            size, start = os.fstat(file.fileno()).st_size, file.read(9)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None
    if start[8:] != b"{":
        raise DataError(f"{path} is not a valid safetensors file: it has no header{hint}.")
    if most is not None and size > most:
        raise DataError(f"{path} has {size} bytes; at most {most} are read.")


def read_object(text: bytes | str, source: str) -> dict[str, Any]:
    """Parse a JSON object. `source` names the input in error messages."""
    # The conformance suite runs without msgspec.
    import msgspec

    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{source} is no JSON object: {str(error)[:80]}.") from None
