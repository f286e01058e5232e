"""The files of a run: their names, their folder, and JSON for human readers."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from efficient_attn.errors import DataError
from efficient_attn.limits import ENVIRONMENT_BYTES, read_bytes
from efficient_attn.report.escape import plain, short
from efficient_attn.report.files import write
from efficient_attn.runner.records import NO_LINK
from efficient_attn.strict import read_object

RECORDS, ENVIRONMENT, COMMAND, PLAN = "records.jsonl", "environment.json", "command.txt", "plan.toml"


def open_folder(folder: str | Path, *, name: str = "folder", fresh: bool = False) -> Path:
    """The folder, made if need be and tried by writing to it.

    Args:
        name: Name of the argument in messages.
        fresh: Refuse a folder that holds records already.
    """
    if str(folder) in ("", "-"):
        raise DataError(f"{name} is a folder, not {str(folder)!r}; --json - writes to stdout.")
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / ".trial"
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | NO_LINK, 0o644))
        trial.unlink()
    except (OSError, ValueError) as error:
        raise DataError(f"{name}: cannot write to {folder}: {_told(error)}.") from None
    if fresh and (folder / RECORDS).exists():
        raise DataError(f"{name}: {folder} holds records of another run already; name a new folder.")
    return folder


def _told(error: Exception) -> str:
    """The system's error message; Python itself refuses an impossible name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def run_folder(command: str) -> Path:
    """The default folder of a command: `runs/<command>-<UTC time>`.

    A number distinguishes runs started in the same second.
    """
    folder = Path("runs") / f"{command}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(one for one in chain([folder], numbered) if not one.exists())


def write_json(path: Path, value: Mapping[str, Any]) -> Path:
    """Write indented strict JSON."""
    return write(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def differences(
    old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], paths: Mapping[str, Sequence[str]]
) -> str:
    """`torch was 2.5, is 2.6; …` for entries in which environments differ; empty if a side has none."""
    if not (old and new):
        return ""
    pairs = {
        name: [" or ".join(dict.fromkeys(_entry(run, path) for run in side)) for side in (old, new)]
        for name, path in paths.items()
    }
    return "; ".join(f"{name} was {then}, is {now}" for name, (then, now) in pairs.items() if then != now)


def _entry(environment: Any, path: Sequence[str]) -> str:
    """One entry as a line of text; `unknown` if there is none."""
    for name in path:
        environment = environment.get(name) if isinstance(environment, Mapping) else None
    return "unknown" if environment is None else short(plain(str(environment)))


def read_text(path: Path) -> str:
    """The text of a file that need not be there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run."""
    try:
        return read_object(read_bytes(path, ENVIRONMENT_BYTES), str(path))
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None
