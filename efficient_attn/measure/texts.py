"""Texts for language models: files of UTF-8, and public-domain prose of at least 512 tokens each."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

from efficient_attn.errors import DataError, DtypeError, OptionError
from efficient_attn.limits import TEXT_BYTES, read_bytes

Texts = Mapping[str, str] | Sequence[str | Path]

NAMES = ("alice", "pride", "sawyer", "opticks", "moby", "origin")


def shipped_texts() -> dict[str, str]:
    """{name: text} of the shipped texts, whose sources are in PROVENANCE.md of the data folder."""
    folder = resources.files("efficient_attn.data")
    return {name: folder.joinpath(f"{name}.txt").read_text(encoding="utf-8") for name in NAMES}


def long_texts() -> dict[str, str]:
    """{name: text} of some 5 000 and 9 000 tokens: all the prose, and a chapter of Python's manual."""
    manual = resources.files("efficient_attn.data").joinpath("types.txt")
    return {"prose": "\n\n".join(shipped_texts().values()), "types": manual.read_text(encoding="utf-8")}


def read_text(path: Path, *, name: str = "--text") -> str:
    """The text of a file."""
    try:
        return read_bytes(path, TEXT_BYTES).decode("utf-8")
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{name}: cannot read {path} as UTF-8 text: {error}.") from None


def named_texts(texts: Texts | None) -> dict[str, str]:
    """{name: text} of a mapping, of texts or of paths of files, or of the shipped texts for None."""
    if texts is None:
        return shipped_texts()
    if isinstance(texts, Sequence) and texts and all(isinstance(text, Path) for text in texts):
        from_files: dict[str, str] = {}
        for path in map(Path, texts):
            if path.name in from_files:
                raise OptionError(
                    f"--text: two files are called {path.name!r}; give them names of their own."
                )
            from_files[path.name] = read_text(path)
        return from_files
    pairs = texts.items() if isinstance(texts, Mapping) else ((f"text {i}", x) for i, x in enumerate(texts))
    named: dict[str, Any] = dict(pairs)
    if isinstance(texts, str) or not named or not all(isinstance(text, str) for text in named.values()):
        raise DtypeError("texts is a list of texts, or a mapping from names to texts; at least one.")
    return named


def digest(texts: Mapping[str, str]) -> str:
    """Number and hash of the texts, which identify the measurement."""
    hashed = sha256("\0".join(texts.values()).encode()).hexdigest()[:8]
    return f"{len(texts)} {'text' if len(texts) == 1 else 'texts'} #{hashed}"
