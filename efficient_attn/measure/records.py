"""Files of records: one line of strict JSON for each, written at once, and its JSON Schema."""

import errno
import itertools
import math
import operator
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta

from efficient_attn import limits, strict
from efficient_attn.errors import DataError
from efficient_attn.measure.quantities import FIELDS, KINDS, Field
from efficient_attn.measure.record import SCHEMA, STATUSES, Case, Record

# A symbolic link in place of a file of records is refused, and its target left alone.
NO_LINK = getattr(os, "O_NOFOLLOW", 0)

# Largest whole number of a unit; counts have no unit.
_LARGEST = {"bytes": limits.BYTES, "FLOP": limits.WHOLE_NUMBER}

_REASON = "Reason of a missing value, or names of values that are not finite."
_NUMBER = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
_KEY, _FIELD = re.compile(rb'"\s*:'), re.compile(r"`\$\.(\w+)")
# Scalars of NumPy are floats to Python, but not to msgspec.
_encode = msgspec.json.Encoder(enc_hook=float).encode
_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_ENDS = (signal.SIGINT, signal.SIGTERM)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


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
            case = record.case
            raise DataError(
                f"{case.label}, {case.tokens} tokens, {case.kind}: {name} has {len(value)} entries; "
                f"at most {most} are kept in a record."
            )
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
            # Commas part all values, and take no parsing to count.
            values += text.count(b",")
            excess = None
            if len(text) > limits.RECORD_LINE_BYTES:
                excess = f", line {number} is longer than {limits.RECORD_LINE_BYTES} bytes"
            elif size > limits.RECORDS_BYTES:
                excess = f" is larger than {limits.RECORDS_BYTES} bytes"
            elif values > limits.RECORDS_VALUES:
                excess = f" has more than {limits.RECORDS_VALUES} values"
            elif text and number > limits.RECORDS_LINES:
                excess = f" has more than {limits.RECORDS_LINES} lines"
            if excess is not None:
                raise DataError(f"{path}{excess}, the most that is read of records.")
            if not text:
                return
            yield text


def parse(text: bytes, source: str) -> Record:
    """The record of one line; `source` names the line in messages."""
    decode, num_fields, values_of = _readers(len(FIELDS), len(KINDS))
    try:
        row = decode(text)
        values = zip(FIELDS, values_of(row), strict=True)
        measured = {name: value for name, value in values if value is not None}
        # Every field has a colon: equal numbers leave none for a second value of a field, or for others.
        exact = text.count(b":") == num_fields + len(measured) + len(row.options)
    except _UNREADABLE:
        exact = False
    if not exact:
        row = _fast_row(text) or _checked_row(text, source)
        measured = {name: value for name in FIELDS if (value := getattr(row, name)) is not None}
    for name in ("times_s", "device_times_s"):
        if None in measured.get(name, ()):
            # Null replaces a time that was not finite, named in `reason`; it is no sample.
            measured[name] = tuple(time_s for time_s in measured[name] if time_s is not None) or None
    case = msgspec.convert(row, Case, from_attributes=True)
    return Record(case=case, status=row.status, reason=row.reason, measured=measured)


@cache
def _readers(*counts: int) -> tuple[Callable[[bytes], Any], int, Callable[[Any], Any]]:
    """Decoder of a line with all fields of a case, their number, and the getter of all quantities at once."""
    required = [name for name in line_type().__struct_fields__ if name not in FIELDS]
    types = get_type_hints(line_type(), include_extras=True)
    fields = [*((name, types[name]) for name in required), *((name, types[name], None) for name in FIELDS)]
    written = msgspec.defstruct("WrittenLine", fields, frozen=True, kw_only=True)
    return msgspec.json.Decoder(written).decode, len(required), operator.attrgetter(*FIELDS)


def _fast_row(text: bytes) -> Any:
    """The valid row of a line with few fields, or colons in its texts; None for others."""
    try:
        row, names = msgspec.json.decode(text, type=line_type()), _names(text).keys()
        count = len(names & {*row.__struct_fields__}) + len(row.options)
    except _UNREADABLE:
        return None
    return row if text.count(b":") == count or len(_KEY.findall(text)) == count else None


def _checked_row(text: bytes, source: str) -> Any:
    """The valid row of a line in any spelling."""
    row = strict.read_object(text, source)
    if row.get("schema") != SCHEMA:
        raise DataError(f"{source} has schema {str(row.get('schema'))[:40]!r}; this version reads {SCHEMA}.")
    try:
        return msgspec.convert(row, line_type())
    except msgspec.ValidationError as error:
        message = str(error)
    # msgspec names the first faulty field alone, and no list of all kinds is short.
    for name, values in (("kind", tuple(KINDS)), ("status", STATUSES)):
        if row.get(name) not in values:
            raise DataError(f"{source} has {name} {str(row.get(name))[:40]!r}; known: {', '.join(values)}.")
    reason, field = message.partition(" - at ")[0], _FIELD.search(message)
    value = f"{field[1]} cannot be {str(row[field[1]])[:40]!r}; " if field else ""
    raise DataError(f"{source}: {value}{reason[0].lower()}{reason[1:]}.")


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
    whole = Annotated[int, Meta(ge=0, le=_LARGEST.get(field.unit, limits.COUNT))]
    types: dict[str, Any] = {
        "number": _NUMBER,
        "whole number": whole,
        # Null stands for a value that was not finite.
        "numbers": Annotated[tuple[_NUMBER | None, ...], Meta(max_length=limits.SAMPLES)],
        "whole numbers": Annotated[tuple[whole, ...], Meta(max_length=limits.SAMPLES)],
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
