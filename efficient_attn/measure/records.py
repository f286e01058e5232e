"""Files of records: one line of strict JSON for each, written at once."""

import errno
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from efficient_attn import limits, strict
from efficient_attn.errors import DataError
from efficient_attn.measure.quantity import KINDS
from efficient_attn.measure.record import CASE_FIELDS, SCHEMA, STATUSES, Case, Record
from efficient_attn.measure.schema import line_type

# A symbolic link in place of a file of records is refused, and its target left alone.
NO_LINK = getattr(os, "O_NOFOLLOW", 0)

_NOT_MEASURED = {*CASE_FIELDS, "status", "reason"}
_KEY, _FIELD = re.compile(rb'"\s*:'), re.compile(r"`\$\.(\w+)")
# Scalars of NumPy are floats to Python, but not to msgspec.
_encode = msgspec.json.Encoder(enc_hook=float).encode


class Reading(NamedTuple):
    """Records of a file, and whether its last line was cut off and left out."""

    records: tuple[Record, ...]
    torn: bool


def line(record: Record) -> str:
    """The record as one line of strict JSON; numbers that are not finite become null, named in `reason`."""
    row = record.row()
    for name, value in row.items():
        most = limits.OPTIONS if isinstance(value, Mapping) else limits.SAMPLES
        if isinstance(value, (list, tuple, Mapping)) and len(value) > most:
            place = f"{record.case.label}, {record.case.tokens} tokens, {record.case.kind}"
            raise DataError(f"{place}: {name} has {len(value)} entries; at most {most} are kept in a record.")
    broken = [name for name, value in row.items() if not _finite(value)]
    if broken:
        note = f"not a finite number: {', '.join(broken)}"
        row["reason"] = note if record.reason is None else f"{record.reason}; {note}"
    return msgspec.json.format(_encode(row), indent=0).decode()


def _finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


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
        # The system may write less than requested; only the result reports it.
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
    """The records of a file; a torn last line is left out and reported."""
    records, torn = [], False
    try:
        for number, text in enumerate(_lines(path), start=1):
            blank = text.isspace()
            torn = not blank and not text.endswith(b"\n")
            if not blank and not torn:
                records.append(parse(text, f"{path}, line {number}"))
    except OSError as error:
        raise DataError(f"Cannot read records from {path}: {error.strerror}.") from None
    return Reading(tuple(records), torn)


def _lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a file, one at a time, as long as it can be one of ours."""
    size = values = 0
    with open(path, "rb") as file:
        for number in itertools.count(1):
            text = file.readline(limits.RECORD_LINE_BYTES + 1)
            size += len(text)
            if len(text) > limits.RECORD_LINE_BYTES:
                raise _too_large(f"{path}, line {number} is longer than {limits.RECORD_LINE_BYTES} bytes")
            if size > limits.RECORDS_BYTES:
                raise _too_large(f"{path} is larger than {limits.RECORDS_BYTES} bytes")
            # Commas part all values, and take no parsing to count.
            values += text.count(b",")
            if values > limits.RECORDS_VALUES:
                raise _too_large(f"{path} has more than {limits.RECORDS_VALUES} values")
            if not text:
                return
            if number > limits.RECORDS_LINES:
                raise _too_large(f"{path} has more than {limits.RECORDS_LINES} lines")
            yield text


def _too_large(fact: str) -> DataError:
    return DataError(f"{fact}, the most that is read of records.")


def parse(text: bytes, place: str) -> Record:
    """The record of one line; messages call the line `place`."""
    row = _fast_row(text) or _checked_row(text, place)
    measured = {name: row[name] for name in row.keys() - _NOT_MEASURED}
    for name in ("times_s", "device_times_s"):
        times_s = measured.get(name)
        if times_s and None in times_s:
            # Null replaces a time that was not finite, named in `reason`; it is no sample.
            measured[name] = tuple(time_s for time_s in times_s if time_s is not None) or None
    case = msgspec.convert(row, Case)
    return Record(case=case, status=row["status"], reason=row.get("reason"), measured=measured)


def _fast_row(text: bytes) -> dict[str, Any] | None:
    """The valid row of a line as this version writes it; None for others."""
    try:
        row: dict[str, Any] = _decoder(line_type())(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    count = len(row) + len(row.get("options", ()))
    # Every field has a colon, so that equal numbers leave none for a second value of a field, or for others.
    return row if text.count(b":") == count or len(_KEY.findall(text)) == count else None


@cache
def _decoder(wanted: Any) -> Callable[[bytes], Any]:
    return msgspec.json.Decoder(wanted).decode


def _checked_row(text: bytes, place: str) -> dict[str, Any]:
    """The valid row of a line in any spelling."""
    row = strict.read_object(text, place)
    if row.get("schema") != SCHEMA:
        raise DataError(f"{place} has schema {str(row.get('schema'))[:40]!r}; this version reads {SCHEMA}.")
    try:
        valid: dict[str, Any] = msgspec.convert(row, line_type())
    except msgspec.ValidationError as error:
        raise _refusal(row, place, str(error)) from None
    return valid


def _refusal(row: Mapping[str, Any], place: str, message: str) -> DataError:
    """The reason why a row is no record; `message` is msgspec's, which names the first wrong field."""
    for name, known in (("kind", tuple(KINDS)), ("status", STATUSES)):
        if row.get(name) not in known:
            return DataError(f"{place} has {name} {str(row.get(name))[:40]!r}; known: {', '.join(known)}.")
    reason, found = message.partition(" - at ")[0], _FIELD.search(message)
    value = f"{found[1]} cannot be {str(row[found[1]])[:40]!r}; " if found else ""
    return DataError(f"{place}: {value}{reason[0].lower()}{reason[1:]}.")
