"""Texts that a model reads: files of UTF-8, the shipped texts, or texts by name."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from efficient_attn.errors import DataError, DtypeError, OptionError
from efficient_attn.measure.texts import shipped_texts

Texts = Mapping[str, str] | Sequence[str]

# A file of more bytes is no text for one sequence.
_MOST_BYTES = 1 << 24


def read_text(path: Path, *, name: str = "--text") -> str:
    """The text of a file.

    Raises:
        DataError: If it cannot be read, is not UTF-8, or is longer than any sequence.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(
                f"{name}: {path} is larger than {_MOST_BYTES} bytes; cut it to the part to be read."
            )
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{name}: cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise DataError(f"{name}: {path} is no UTF-8 text.") from None


def read_texts(files: Sequence[str] | None, *, name: str) -> dict[str, str] | None:
    """{name of the file: text}; None if none was given."""
    paths = [Path(file) for file in files or ()]
    doubled = {path.name for path in paths if [other.name for other in paths].count(path.name) > 1}
    if doubled:
        raise OptionError(f"{name}: two files are called {min(doubled)!r}; give them names of their own.")
    return {path.name: read_text(path, name=name) for path in paths} or None


def named_texts(texts: Texts | None) -> dict[str, str]:
    """{name: text} of a mapping or a list; the shipped texts for None."""
    if texts is None:
        return shipped_texts()
    named = dict(texts) if isinstance(texts, Mapping) else {f"text {i}": text for i, text in enumerate(texts)}
    if isinstance(texts, str) or not named or not all(isinstance(text, str) for text in named.values()):
        raise DtypeError("texts is a list of texts, or a mapping from names to texts; at least one.")
    return named


def digest(texts: Mapping[str, str]) -> str:
    """Number and hash of the texts: records of other texts are another measurement."""
    hashed = sha256("\0".join(texts.values()).encode()).hexdigest()[:8]
    return f"{len(texts)} {'text' if len(texts) == 1 else 'texts'} #{hashed}"
