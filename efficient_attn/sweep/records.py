"""Records in files: one JSON object a line, written the moment it exists, read whatever version wrote it."""

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NamedTuple

from efficient_attn import limits, strict
from efficient_attn.errors import DataError
from efficient_attn.sweep.case import (
    CASE_FIELDS,
    KINDS,
    RECORD_FIELDS,
    SCHEMA,
    SPANS,
    STATUSES,
    TYPES,
    Case,
    Record,
)

# Where somebody put a link in the place of a file of ours, what it points to is left alone.
NO_LINK = getattr(os, "O_NOFOLLOW", 0)

# A released schema stays readable for ever: what turns a row of one version into a row of the next.
_UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


class Reading(NamedTuple):
    """What a file held.

    Attributes:
        torn: The last line was cut off, as by a power failure, and was left out.
    """

    records: tuple[Record, ...]
    torn: bool


def line(record: Record) -> str:
    """The record as one line of strict JSON; a number that is not finite becomes null, told in `reason`.

    Raises:
        DataError: If a field has more entries than a record may have.
    """
    row = record.row()
    _check_samples(row, f"{record.case.label}, {record.case.tokens} tokens, {record.case.kind}")
    broken = [name for name, value in row.items() if not strict.finite(value)]
    if broken:
        row = strict.without_infinities(row)
        note = f"not a finite number: {', '.join(broken)}"
        row["reason"] = note if record.reason is None else f"{record.reason}; {note}"
    return json.dumps(row, allow_nan=False, ensure_ascii=False)


def append(path: str | Path, record: Record) -> None:
    """Add one line to the file, whole or not at all, and wait until it is on the disk."""
    path, data = Path(path), f"{line(record)}\n".encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_LINK, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            _write_whole(descriptor, data, size)
        finally:
            os.close(descriptor)
        if size == 0:
            sync_names(path.parent)
    except OSError as error:
        raise DataError(f"Cannot write records to {path}: {error.strerror}.") from None


def _write_whole(descriptor: int, data: bytes, size: int) -> None:
    """Append to a file of `size` bytes, or leave it as it was."""
    try:
        # The system may take less than it was given, and says so in the result alone.
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except OSError:
        # The next record would continue a part of a line. A part that cannot be removed is read as torn.
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def sync_names(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system lets folders be waited for."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems of networks do not know the request.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def read(path: str | Path) -> Reading:
    """The records of a file; a torn last line is left out and told.

    Raises:
        DataError: If the file cannot be read, or a line other than a torn last one is no record.
    """
    records, torn, samples = [], False, 0
    try:
        for number, text in enumerate(_lines(path), start=1):
            torn = bool(text.strip()) and not text.endswith(b"\n")
            if text.strip() and not torn:
                records.append(parse(text, f"{path}, line {number}"))
                samples += _entries(records[-1])
                if samples > limits.RECORDS_SAMPLES:
                    raise _too_large(f"{path} has more than {limits.RECORDS_SAMPLES} samples and options")
    except OSError as error:
        raise DataError(f"Cannot read records from {path}: {error.strerror}.") from None
    return Reading(tuple(records), torn)


def _lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a file, one at a time, as long as it can be one of ours."""
    size = 0
    with open(path, "rb") as file:
        for number in itertools.count(1):
            text = file.readline(limits.RECORD_LINE_BYTES + 1)
            size += len(text)
            if len(text) > limits.RECORD_LINE_BYTES:
                raise _too_large(f"{path}, line {number} is longer than {limits.RECORD_LINE_BYTES} bytes")
            if size > limits.RECORDS_BYTES:
                raise _too_large(f"{path} is larger than {limits.RECORDS_BYTES} bytes")
            if not text:
                return
            if number > limits.RECORDS_LINES:
                raise _too_large(f"{path} has more than {limits.RECORDS_LINES} lines")
            yield text


def _too_large(fact: str) -> DataError:
    return DataError(f"{fact}, the most that is read of records.")


def parse(text: bytes, place: str) -> Record:
    """The record of one line, whatever version wrote it; messages call where it stands `place`."""
    row = _in_this_schema(strict.read_object(text, place), place)
    _check_choice(row, "kind", KINDS, place)
    _check_choice(row, "status", STATUSES, place)
    missing = [name for name, item in CASE_FIELDS.items() if name not in row and _required(item)]
    if missing:
        raise DataError(f"{place} lacks {', '.join(missing)}.")
    _check_samples(row, place)
    for name, wanted in TYPES.items():
        least, most = SPANS.get(name, (0, limits.WHOLE_NUMBER))
        if name in row and not strict.fits(row[name], wanted, least, most):
            wants = f"; wanted are whole numbers from {least} to {most}" if name in SPANS else ""
            raise DataError(f"{place}: {name} cannot be {str(row[name])[:40]!r}{wants}.")
    case = Case(**{name: row[name] for name in CASE_FIELDS if name in row})
    if row.get("times_s") is not None:
        # Null stands for a time that was not finite, which `reason` tells; it is no sample.
        row["times_s"] = [time_s for time_s in row["times_s"] if time_s is not None] or None
    row |= {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return Record(case=case, **{name: row[name] for name in RECORD_FIELDS if name in row})


def _check_samples(row: Mapping[str, Any], place: str) -> None:
    lists = {name: row[name] for name in TYPES if isinstance(row.get(name), (list, tuple, dict))}
    for name, value in lists.items():
        most = limits.OPTIONS if isinstance(value, dict) else limits.SAMPLES
        if len(value) > most:
            raise DataError(f"{place}: {name} has {len(value)} entries; at most {most} are kept in a record.")


def _entries(record: Record) -> int:
    """Samples and options of a record."""
    samples = sum(len(value) for value in vars(record).values() if isinstance(value, tuple))
    return samples + len(record.case.options)


def _in_this_schema(row: dict[str, Any], place: str) -> dict[str, Any]:
    """The row as this version would have written it; fields that a later version added are ignored."""
    version = row.get("schema")
    if type(version) is not int or version < 1:
        raise DataError(f"{place} has schema {str(version)[:40]!r}; this version reads 1 to {SCHEMA}.")
    if version > SCHEMA:
        raise DataError(
            f"{place} has schema {version}, written by a newer efficient-attn; this one reads 1 to {SCHEMA}."
        )
    for older in range(version, SCHEMA):
        row = _UPGRADES[older](row)
    return {**row, "schema": SCHEMA}


def _check_choice(row: Mapping[str, Any], name: str, known: Sequence[str], place: str) -> None:
    if row.get(name) not in known:
        raise DataError(f"{place} has {name} {str(row.get(name))[:40]!r}; known: {', '.join(known)}.")


def _required(item: Any) -> bool:
    return item.default is MISSING and item.default_factory is MISSING
