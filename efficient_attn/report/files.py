"""Atomic writes of files, and safe file names."""

import os
import re
from pathlib import Path

from efficient_attn.errors import DataError
from efficient_attn.runner.records import sync_names

_LONGEST = 80

# Windows opens these names as devices, whatever follows the first dot.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", flags=re.IGNORECASE)


def slug(text: str) -> str:
    """The text as a part of a file name: ASCII letters, digits, `._-`; never empty, hidden or a device."""
    kept = re.sub(r"[^A-Za-z0-9._-]+", "-", text[:1000]).strip("-.")[:_LONGEST].rstrip("-.")
    return kept if kept and not _DEVICES.match(kept) else f"run-{kept}".rstrip("-")


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, whole or not at all; a link that stands in its place is replaced and not followed.

    Raises:
        DataError: If it cannot be written.
    """
    # A lone surrogate, which UTF-8 cannot encode, becomes a question mark.
    data = content if isinstance(content, bytes) else content.encode("utf-8", errors="replace")
    # A random name that must not exist: no existing file is written to.
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}.part")
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            # Without fsync a power failure may leave the name with an empty file.
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_names(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DataError(f"Cannot write {path}: {error.strerror}.") from None
    return path
