"""Writes docs/results.md, the tables of all reference runs, whenever the site is built."""

import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
PAGE = HERE / "results.md"

_HEAD = """\
# Tables of the reference runs

Tables of the runs in `results/`, as the commands wrote them; `results/README.md` lists commands,
machines and commits.
"""
_TABLES = ("README.md", "table.md", "tables.md", "intervals.md", "diff.md")
_LINK = re.compile(r"\]\((?:\.\./)+results/(?:[\w-]+/)*?([\w-]+)/[\w-]+\.md\)")


def page() -> str:
    """The whole page: one section for each folder with tables."""
    sections = [f"## {folder.name}\n\n{_text(folder)}" for folder in sorted(folders())]
    return "\n".join([_HEAD, *sections])


def folders() -> Iterator[Path]:
    """Folders of runs and of other findings."""
    yield from (path for path in RESULTS.glob("*/*") if path.is_dir() and _files(path))
    yield from (path for path in RESULTS.iterdir() if path.is_dir() and _files(path))


def linked(text: str) -> str:
    """A page whose links to files of results lead to their sections on the site."""
    return _LINK.sub(r"](results.md#\1)", text).replace("](../../docs/", "](")


def _files(folder: Path) -> list[Path]:
    return [path for name in _TABLES if (path := folder / name).exists()]


def _text(folder: Path) -> str:
    """The tables of a folder, without titles and below the heading of the section."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in _files(folder))
    return re.sub(r"^#+ ", "#\\g<0>", re.sub(r"^# .*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
