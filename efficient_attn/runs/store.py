"""Run directory: records, other files, lock, resume."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from efficient_attn.errors import DataError
from efficient_attn.limits import ENVIRONMENT_BYTES, read_bytes, read_object
from efficient_attn.measure.record import NO_LINK, Case, Reading, Record, append, merge_rows, write
from efficient_attn.measure.variants import MODEL
from efficient_attn.report.table import short
from efficient_attn.report.text import flat
from efficient_attn.runs.header import FREE_CORES, OPTIONS, SETTLED
from efficient_attn.runs.study import Point

RECORDS, ENVIRONMENT, COMMAND = "records.jsonl", "environment.json", "command.txt"
LOCK = ".lock"

# Entry of the environment: digest of the code of every backend from a file.
CODE = "code"

# Entries of the environment that change results; a run with another value is another experiment.
_DECISIVE = ("torch.version", "processor", "gpu.name", MODEL)

# Entries of the software of a GPU.
GPU_SOFTWARE = ("gpu.cuda", "gpu.driver_version")


def open_folder(folder: str | Path, *, name: str = "folder", fresh: bool = False) -> Path:
    """Create the folder and check that it is writable.

    Args:
        name: Name of the argument in messages.
        fresh: Refuse a folder that holds records already.
    """
    if not isinstance(folder, (str, os.PathLike)) or str(folder) in ("", "-"):
        raise DataError(f"{name} is a folder, not {str(folder)!r}; --json writes to stdout.")
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / ".trial"
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | NO_LINK, 0o644))
        trial.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{name}: cannot write to {folder}: {reason}.") from None
    if fresh and (folder / RECORDS).exists():
        raise DataError(f"{name}: {folder} holds records of another run already; name a new folder.")
    return folder


def run_folder(command: str) -> Path:
    """The default folder of a command: `runs/<command>-<UTC time>`."""
    return Path("runs") / f"{command}-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], groups: Collection[str]) -> str:
    """Entries or groups that differ, as `torch.version was 2.5, is 2.6`. Empty if a side has none."""
    if not (old and new):
        return ""
    texts, sides = [], [dict(flat(run)) for run in (old, new)]
    for name in (name for name in sides[0] | sides[1] if {name, name.partition(".")[0]} & {*groups}):
        then, now = (side.get(name, "unknown") for side in sides)
        if then != now and not (name in GPU_SOFTWARE and "unknown" in (then, now)):
            texts.append(f"{name} was {short(then)}, is {short(now)}")
    return "; ".join(texts)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(read_bytes(path, ENVIRONMENT_BYTES), str(path))
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder against other writers. The system releases it however this process ends."""
    from filelock import FileLock, Timeout

    path = folder / LOCK
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise DataError(
            f"out: {folder} is being written by another process; wait for it or name another folder."
        ) from None
    except OSError as error:
        lock.release()
        raise DataError(f"out: cannot write to {path}: {error.strerror}.") from None
    try:
        yield
    finally:
        lock.release()


def check_unchanged(
    folder: Path,
    stored: Mapping[str, Any],
    machine: Mapping[str, Any],
    *,
    cases: Iterable[Case],
    records: Collection[Record],
) -> None:
    """Refuse to resume a stored run of another model, machine, torch or code."""
    if not records:
        return
    measured = {record.case.backend for record in records if record.status == "ok"}
    code = stored.get(CODE, {})
    edited = [name for name, text in machine[CODE].items() if name in measured and code.get(name) != text]
    threads = [{record.case.threads for record in records}, {case.threads for case in cases}]
    was, now = ({**run, MODEL: run.get(SETTLED, {}).get(MODEL, {})} for run in (stored, machine))
    reasons = [
        differences(was, now, _DECISIVE) if stored else "",
        f"the code of {', '.join(edited)} was edited" if edited else "",
        "" if threads[0] <= threads[1] else f"threads were {sorted(threads[0])}, are {sorted(threads[1])}",
    ]
    if unlike := "; ".join(filter(None, reasons)):
        raise DataError(f"out: {folder} was measured in another environment: {unlike}. Name a new folder.")


def continued(
    stored: Mapping[str, Any], machine: Mapping[str, Any], measured: Collection[str]
) -> dict[str, Any]:
    """Environment of a run that goes on: the stored one, with the options and decisions of now.

    Args:
        measured: Backends with a result; other code, of an added backend or a mended one, is the one of now.
    """
    code = {name: text for name, text in stored.get(CODE, {}).items() if name in measured}
    # The threads are those of the first part of the run.
    settled = {**machine[SETTLED], FREE_CORES: stored.get(SETTLED, {}).get(FREE_CORES)}
    return {**stored, OPTIONS: machine[OPTIONS], SETTLED: settled, CODE: {**machine[CODE], **code}}


def mend(path: Path, reading: Reading) -> list[str]:
    """Remove a last line that was cut off, set a file with damaged lines aside, and return notes on both."""
    notes = reading.notes(path.name)
    if reading.torn or reading.damaged:
        data = path.read_bytes()
        if reading.damaged:
            aside = write(path.with_name(f"{path.name}.damaged-{sha256(data).hexdigest()[:8]}"), data)
            notes.append(f"The damaged file was set aside as {aside.name}.")
        rows = enumerate(data.split(b"\n")[:-1], start=1)
        write(path, b"".join(row + b"\n" for number, row in rows if number not in reading.damaged))
    return notes


# End of the reason of points that the budget skipped.
OVER_BUDGET = "(raise it with --budget)"

# A resumed run tries these again.
_FAILURES = ("oom", "timeout", "crash", "error", "skipped")


class Store:
    """Records by the key of their case, in the order of measurement, with all rounds so far.

    Failures among the rows of an earlier run are measured again, skips of its budget only on request.
    """

    def __init__(
        self,
        path: Path | None = None,
        rows: Iterable[Record] = (),
        *,
        kind: type[Record] = Record,
        retry_over_budget: bool = False,
    ) -> None:
        self._path, self.kind = path, kind
        self.records = merge_rows([*rows])
        self._closed: set[str] = set()
        self._stale = {
            key
            for key, record in self.records.items()
            if record.status in _FAILURES and (retry_over_budget or not over_budget(record))
        }

    def rounds(self, case: Case) -> int:
        """Number of successful rounds of a timed case."""
        record = self.records.get(case.key)
        return 0 if record is None or record.status != "ok" else len(record.round_sizes or ())

    def answers(self, point: Point) -> bool:
        """Whether a point need not be measured: it has all rounds, failed, or was skipped."""
        record = self.records.get(point.case.key)
        if record is None or point.case.key in self._stale:
            return False
        complete = point.case.key in self._closed or self.rounds(point.case) >= point.rounds
        return record.status != "ok" or complete

    def add(self, row: Record) -> None:
        """Write and merge a row. A repeated failure is not written twice."""
        row, key = self.kind.of(row), row.case.key
        stored = self.records.get(key)
        self._stale.discard(key)
        if stored == row and not row.round_sizes:
            return
        if self._path is not None:
            append(self._path, row)
        self.records |= merge_rows([row] if stored is None else [stored, row])

    def close(self, case: Case) -> None:
        """Measure no further rounds of a case in this run."""
        self._closed.add(case.key)


def over_budget(record: Record) -> bool:
    return record.status == "skipped" and (record.reason or "").endswith(OVER_BUDGET)
