"""The folder of a run: one writer at a time, and an interrupted run can be resumed."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from efficient_attn.errors import DataError
from efficient_attn.report.files import write
from efficient_attn.runner.records import Case, Record, append, line
from efficient_attn.studies.results import read
from efficient_attn.studies.run_files import (
    COMMAND,
    ENVIRONMENT,
    PLAN,
    RECORDS,
    differences,
    read_json,
    write_json,
)

LOCK = ".lock"

# Entries of the environment that change results; a run with another value is another experiment.
_DECISIVE = {
    "torch": ("torch", "version"),
    "processor": ("processor",),
    "GPU": ("gpu", "name"),
    "the model's weights": ("model", "weights_sha256"),
}


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """State of an earlier run in a folder.

    Attributes:
        records: The last record of each case, by the key of the case.
        environment: Environment of the records; None if there is none yet.
        notes: Remarks on the records, such as a dropped line.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    environment: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()


class Book:
    """The records of a run, each on the disk as soon as it exists."""

    def __init__(self, folder: Path | None, earlier: Mapping[str, Record]) -> None:
        self._folder = folder
        self._records = dict(earlier)

    @property
    def records(self) -> tuple[Record, ...]:
        """The last record of each case."""
        return tuple(self._records.values())

    def has(self, case: Case) -> bool:
        """Whether the case was measured."""
        record = self._records.get(case.key)
        return record is not None and record.status == "ok"

    def add(self, record: Record) -> None:
        """Store and write a record; its continuation replaces it, a repeated failure is not written twice."""
        known = self._records.get(record.case.key)
        self._records[record.case.key] = record
        if self._folder is None or known == record:
            return
        if known is not None and known.status == "ok":
            write(self._folder / RECORDS, "".join(f"{line(one)}\n" for one in self.records))
        else:
            append(self._folder / RECORDS, record)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder against other writers; the system releases it however this process ends.

    Raises:
        DataError: If another process holds it; the message names it.
    """
    from filelock import FileLock, Timeout

    path = folder / LOCK
    lock, holder = FileLock(path), ""
    try:
        lock.acquire(blocking=False)
        # Windows keeps a locked file from being read and written: its holder stays unknown there.
        with suppress(PermissionError):
            path.write_text(f"{os.getpid()}\n")
    except Timeout:
        with suppress(PermissionError):
            holder = path.read_text(errors="replace").strip()
        holder = holder or "of unknown number"
        raise DataError(
            f"out: {folder} is being written by process {holder}; wait for it or name another folder."
        ) from None
    except OSError as error:
        lock.release()
        raise DataError(f"out: cannot write to {path}: {error.strerror}.") from None
    try:
        yield
    finally:
        lock.release()


def begin(
    folder: Path,
    cases: Sequence[Case],
    machine: Mapping[str, Any],
    *,
    resume: bool,
    force: bool,
    plan: str | None = None,
) -> Earlier:
    """The earlier records if the run is resumed; the files that describe the run are written."""
    earlier = _take_up(folder, cases, machine, force=force) if resume else Earlier()
    describe(folder, machine if earlier.environment is None else None, plan)
    return earlier


def describe(folder: Path, machine: Mapping[str, Any] | None, plan: str | None) -> None:
    """Write the environment, the command and the plan file."""
    if machine is not None:
        write_json(folder / ENVIRONMENT, machine)
        write(folder / COMMAND, " ".join(machine["command"]) + "\n")
    if plan is not None:
        write(folder / PLAN, plan)


def _take_up(folder: Path, cases: Sequence[Case], machine: Mapping[str, Any], *, force: bool) -> Earlier:
    """The records in the folder, made ready for more: a last line that was cut off is removed.

    Args:
        force: Go on although the environment is another one.

    Raises:
        DataError: If it was measured with another torch, other threads or on another processor.
    """
    path = folder / RECORDS
    if not path.exists() or not path.stat().st_size:
        return Earlier()
    records = {record.case.key: record for record in read(path).records}
    known = read_json(folder / ENVIRONMENT) if (folder / ENVIRONMENT).exists() else {}
    found = [differences([known], [machine], _DECISIVE), _other_threads(records.values(), cases)]
    unlike = "; ".join(filter(None, found)) if records else ""
    if unlike and not force:
        raise DataError(
            f"out: {folder} was measured in another environment: {unlike}. "
            "Name a new folder, or mix them with --force-resume."
        )
    notes = [f"Two environments are mixed here: {unlike}."] if unlike else []
    if _cut_torn_line(path):
        notes.append(f"The last line of {RECORDS} was cut off; it was dropped.")
    return Earlier(records=records, environment=(records and known) or None, notes=notes)


def _other_threads(records: Iterable[Record], cases: Sequence[Case]) -> str:
    then = {record.case.threads for record in records}
    now = {case.threads for case in cases}
    if then <= now:
        return ""
    return f"threads were {', '.join(map(str, sorted(then)))}, are {', '.join(map(str, sorted(now)))}"


def _cut_torn_line(path: Path) -> bool:
    """Remove an incomplete last line; return whether there was one."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole == len(data):
        return False
    try:
        os.truncate(path, whole)
    except OSError as error:
        raise DataError(f"out: cannot write to {path}: {error.strerror}.") from None
    return True
