"""Files of records: one line of strict JSON for each, written at once, and its JSON Schema."""

import errno
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from efficient_attn import limits
from efficient_attn.errors import DataError
from efficient_attn.measure.quantities import FIELDS, KINDS, Field
from efficient_attn.measure.record import SCHEMA, STATUSES, Case, Record

# A symbolic link in place of a file of records is refused, and its target left alone.
NO_LINK = getattr(os, "O_NOFOLLOW", 0)

_REASON = "Reason of a missing value, or names of values that are not finite."
_NUMBER = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
_SIGNED = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_FIELD = re.compile(r"`\$\.(\w+)")
# Scalars of NumPy are floats to Python, but not to msgspec.
_encode = msgspec.json.Encoder(enc_hook=float).encode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ENDS = (signal.SIGINT, signal.SIGTERM)


class Reading(NamedTuple):
    """Records of a file, and whether its last line was cut off and left out."""

    records: tuple[Record, ...]
    torn: bool


def line(record: Record) -> str:
    """The record as one line of strict JSON; numbers that are not finite become null, named in `reason`."""
    row = record.row()
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
    if len(data) > limits.RECORD_LINE_BYTES:
        case, most = record.case, limits.RECORD_LINE_BYTES
        raise DataError(
            f"{case.label}, {case.tokens} tokens, {case.kind}: a record of {len(data)} bytes; at most {most} "
            "are written. Measure fewer rounds."
        )
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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the block is done, so that a row is written whole, exactly once."""
    # Python handles signals in the main thread only; other threads are never interrupted.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _ENDS}
    try:
        for ending in _ENDS:
            signal.signal(ending, lambda number, frame: waiting.append((number, frame)))
        yield
    finally:
        for changed, handler in handlers.items():
            signal.signal(changed, handler or signal.SIG_DFL)
    for came, frame in waiting[:1]:
        if callable(handlers[came]):
            handlers[came](came, frame)
        else:
            os.kill(os.getpid(), came)


def read(path: str | Path) -> Reading:
    """The records of a file; a torn last line is left out and reported."""
    try:
        *lines, rest = limits.read_bytes(Path(path), limits.RECORDS_BYTES).split(b"\n")
    except OSError as error:
        raise DataError(f"Cannot read records from {path}: {error.strerror}.") from None
    records = [
        parse(text, f"{path}, line {number}") for number, text in enumerate(lines, start=1) if text.strip()
    ]
    return Reading(tuple(records), torn=bool(rest.strip()))


def parse(text: bytes, source: str) -> Record:
    """The record of one line; `source` names the line in messages."""
    if len(text) > limits.RECORD_LINE_BYTES:
        raise DataError(f"{source} is longer than {limits.RECORD_LINE_BYTES} bytes, the most that is read.")
    try:
        row = _decoder(len(FIELDS), len(KINDS)).decode(text)
    except _UNREADABLE as error:
        raise DataError(_refusal(text, source, str(error))) from None
    measured = {name: value for name in FIELDS if (value := getattr(row, name)) is not None}
    for name in ("times_s", "device_times_s"):
        if None in measured.get(name, ()):
            # Null replaces a time that was not finite, named in `reason`; it is no sample.
            measured[name] = tuple(time_s for time_s in measured[name] if time_s is not None) or None
    case = msgspec.convert(row, Case, from_attributes=True)
    return Record(case=case, status=row.status, reason=row.reason, measured=measured)


def _refusal(text: bytes, source: str, message: str) -> str:
    """Error message for a line that is no record."""
    try:
        row = msgspec.json.decode(text)
    except _UNREADABLE as error:
        return f"{source} is no strict JSON: {str(error)[:80]}."
    if not isinstance(row, dict):
        return f"{source} is no JSON object."
    if row.get("schema") != SCHEMA:
        return f"{source} has schema {str(row.get('schema'))[:40]!r}; this version reads {SCHEMA}."
    # msgspec names the first faulty field alone, and no list of all kinds is short.
    for name, values in (("kind", tuple(KINDS)), ("status", STATUSES)):
        if row.get(name) not in values:
            return f"{source} has {name} {str(row.get(name))[:40]!r}; known: {', '.join(values)}."
    reason, field = message.partition(" - at ")[0], _FIELD.search(message)
    value = f"{field[1]} cannot be {str(row[field[1]])[:40]!r}; " if field else ""
    return f"{source}: {value}{reason[0].lower()}{reason[1:]}."


@cache
def _decoder(*counts: int) -> Any:
    return msgspec.json.Decoder(line_type())


def line_type() -> Any:
    """Type of a line: the case, the status, and the quantities and kinds declared so far."""
    # Declarations are only ever added, so that their numbers identify the type.
    return _line_type(len(FIELDS), len(KINDS))


@cache
def _line_type(*counts: int) -> Any:
    meanings = "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items())
    kind: Any = Literal[tuple(KINDS)]
    status: Any = Literal[STATUSES]
    fields: list[Any] = [
        ("kind", Annotated[kind, Meta(description=f"Kind of the measurement ({meanings}).")]),
        ("schema", Annotated[Literal[SCHEMA], Meta(description="Version of this schema.")]),
        ("status", Annotated[status, Meta(description="Outcome; every status but ok has a reason.")]),
        ("reason", Annotated[str | None, Meta(description=_REASON)], None),
        *((field.name, _type(field), None) for field in FIELDS.values()),
    ]
    return msgspec.defstruct("Line", fields, bases=(Case,), frozen=True, kw_only=True)


def _type(field: Field) -> Any:
    whole = Annotated[int, Meta(ge=0, le=limits.WHOLE_NUMBER)]
    types: dict[str, Any] = {
        "number": _NUMBER,
        "signed number": _SIGNED,
        "whole number": whole,
        # Null stands for a value that was not finite.
        "numbers": tuple[_NUMBER | None, ...],
        "signed numbers": tuple[_SIGNED | None, ...],
        "whole numbers": tuple[whole, ...],
        "text": str,
    }
    return Annotated[types[field.type] | None, Meta(description=field.meaning)]


def records_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of one line of a file of records."""
    (line,) = msgspec.json.schema(line_type())["$defs"].values()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A record of efficient-attn",
        "description": "One line of records.jsonl: case, status and raw values. An absent field was not "
        "measured; a reader ignores fields that are not listed here.",
        "type": "object",
        "required": line["required"],
        "properties": line["properties"],
    }
