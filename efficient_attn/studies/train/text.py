"""The text that a language model is trained on, byte by byte: a file, or Python's own standard library."""

import hashlib
import platform
import sysconfig
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np

from efficient_attn.errors import DataError
from efficient_attn.measure.texts import read_text as read_file

# One in ten files of the library, or the last tenth of a single text, is held out.
_PARTS = 10
# Fewest held-out windows for a meaningful evaluation.
_FEWEST_WINDOWS = 8
# Largest text, which is kept in memory.
_MOST_BYTES = 1 << 30

# Folders inside the library's folder that are not part of it: other packages, and tests with broken files.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class Text(NamedTuple):
    """Bytes to learn from, and bytes that nothing is learned from.

    Attributes:
        train: uint8.
        held_out: uint8.
        sha256: Digest of both parts.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    sha256: str


def read_text(path: str | Path | None, *, tokens: int) -> Text:
    """The text in a file, or the sources of the running Python's standard library, in two parts.

    Args:
        path: None: the standard library.
        tokens: Length of a window; each part holds several.

    Raises:
        DataError: If there is no such text, if it is none, or if it is too short.
    """
    if path is None:
        name = f"stdlib-{platform.python_version()}"
        parts = _library()
    else:
        name = PurePath(path).name
        data = read_file(Path(path), name="text", most_bytes=_MOST_BYTES).encode()
        end = len(data) - len(data) // _PARTS
        parts = data[:end], data[end:]
    size, needed = sum(map(len, parts)), _FEWEST_WINDOWS * (tokens + 1)
    if len(parts[1]) < needed:
        raise DataError(
            f"text: {path or 'the standard library'} has {size} bytes. Windows of {tokens} tokens need "
            f"{_PARTS * needed}, so that {_FEWEST_WINDOWS} can be held out: give a longer text or a smaller "
            "seq_len."
        )
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    train, held_out = (np.frombuffer(part, dtype=np.uint8) for part in parts)
    return Text(name, train, held_out, digest)


def windows(held_out: np.ndarray, count: int, *, tokens: int) -> np.ndarray:
    """At most `count` windows [windows tokens+1] at equal distances, none of which overlap."""
    most = len(held_out) // (tokens + 1)
    starts = np.linspace(0, len(held_out) - tokens - 1, min(count, most)).astype(int)
    return np.stack([held_out[start : start + tokens + 1] for start in starts])


def batch_at(step: int, text: Text, *, seed: int, batch: int, tokens: int) -> np.ndarray:
    """The windows [batch tokens+1] of one step: they depend on the seed and the step alone."""
    draw = np.random.default_rng((seed, step))
    starts = draw.integers(len(text.train) - tokens, size=batch)
    return np.stack([text.train[start : start + tokens + 1] for start in starts])


def _library() -> tuple[bytes, bytes]:
    """The sources of the standard library: whole files, in the order of their names, every tenth held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    if not files:
        raise DataError(f"text: Python's standard library has no sources in {root}; give a file of text.")
    texts = [path.read_bytes() for path in files]
    held_out = texts[::_PARTS]
    del texts[::_PARTS]
    return b"\n".join(texts), b"\n".join(held_out)
