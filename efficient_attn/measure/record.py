"""Cases, records and their files: the description of a measurement, its result, one line of strict JSON.

Equal cases are the same measurement. A record is a case, a status and raw values with units in the names of
their fields. A measurement that failed is a record too, with its reason.
"""

import dataclasses
import itertools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeVar

import msgspec
from msgspec import Meta

from efficient_attn import limits
from efficient_attn.errors import DataError, UnknownNameError
from efficient_attn.limits import COUNT, WHOLE_NUMBER
from efficient_attn.measure.quantities import Field, Measured, Quantity

if TYPE_CHECKING:
    Options = Mapping[str, Any]
else:
    Options = Mapping[str, str | int | float | bool | None]

T = TypeVar("T")
R = TypeVar("R", bound="Record")

SCHEMA = 2

STATUSES = ("ok", "unsupported", "skipped", "oom", "timeout", "crash", "error")

# A file with more damaged lines is no file of records.
_MOST_DAMAGED = 1000

# Execution of a call other than over all tokens.
DECODED = "decoded"

# `calibrated_on` of a backend that was calibrated on the inputs of its measurement.
SAME_INPUTS = "the inputs measured"

# Refuses a symbolic link in place of a file of records. Opening a pipe does not block.
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

_NUMBER = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
_SIGNED = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_WHOLE = Annotated[int, Meta(ge=0, le=WHOLE_NUMBER)]
_TYPES: dict[str, Any] = {
    "number": _NUMBER,
    "signed number": _SIGNED,
    "whole number": _WHOLE,
    # Null stands for a value that was not finite.
    "numbers": tuple[_NUMBER | None, ...],
    "signed numbers": tuple[_SIGNED | None, ...],
    "whole numbers": tuple[_WHOLE, ...],
    "text": str,
}
# Scalars of NumPy are floats to Python, but not to msgspec.
_encode = msgspec.json.Encoder(enc_hook=float).encode

Size = Annotated[int, Meta(ge=1, le=COUNT)]


class Case(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Description of one measurement, complete enough to repeat it."""

    kind: Annotated[str, Meta(description="Kind of the measurement.")]
    backend: Annotated[str, Meta(description="Registered name, or file.py:object.")]
    label: Annotated[str, Meta(description="Name in tables and plots: the backend with its set options.")]
    options: Annotated[Options, Meta(description="All options of the backend.")] = {}
    of: Annotated[str, Meta(description="attention, block, encoder, model; output, kernel, weights.")] = (
        "attention"
    )
    layers: Annotated[Size | None, Meta(description="Number of blocks of an encoder.")] = None
    batch: Annotated[Size, Meta(description="Batch size.")] = 1
    num_heads: Annotated[Size, Meta(description="Number of heads of the queries.")]
    head_dim: Annotated[Size, Meta(description="Head dimension.")]
    tokens: Annotated[Size, Meta(description="Sequence length.")]
    causal: Annotated[bool, Meta(description="Causal masking.")] = False
    backward: Annotated[bool, Meta(description="Forward and backward pass; false: forward alone.")] = False
    dtype: Annotated[str, Meta(description="Name of the torch dtype of q, k and v.")]
    device: Annotated[str, Meta(description="Name of the torch device.")]
    threads: Annotated[Size, Meta(description="Number of torch threads on the CPU.")]
    inputs: Annotated[str, Meta(description="Source of q, k, v; a model and its texts.")] = "gaussian"
    layer: Annotated[_WHOLE | None, Meta(description="Only replaced layer; null: all.")] = None
    seed: Annotated[_WHOLE, Meta(description="Random seed of the inputs, or of the first draw.")] = 0
    execution: Annotated[str | None, Meta(description="decoded: one token; null: all tokens.")] = None
    l2: Annotated[str | None, Meta(description="cold: L2 cache flushed before device times.")] = None
    num_kv_heads: Annotated[Size | None, Meta(description="Heads of k and v; null: num_heads.")] = None
    schema: Annotated[int, Meta(description="Version of this schema.")] = SCHEMA

    @property
    def model_dim(self) -> int:
        """Model dimension, num_heads × head_dim."""
        return self.num_heads * self.head_dim

    # Every grouping of records reads the key, and a case never changes.
    @cached_property
    def key(self) -> str:
        """Canonical JSON of the case: the same text for the same measurement, in every process."""
        return json.dumps(msgspec.structs.asdict(self), sort_keys=True, allow_nan=False)

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, init=False, eq=False)
class Record(Measured):
    """A case, its status and the measured values: `Record(case=case, accuracy=0.9).accuracy`.

    Every quantity is a keyword and an attribute, None where it was not measured. A study with further ones
    declares them in a subclass, as `Measured` does.

    Attributes:
        reason: Reason of every status but `ok`, and names of values that were not finite.
        measured: Values by name of their field.
    """

    case: Case
    status: str
    reason: str | None
    measured: Mapping[str, Any]

    def __init__(
        self,
        *,
        case: Case,
        status: str = "ok",
        reason: str | None = None,
        measured: Mapping[str, Any] | None = None,
        **quantities: Any,
    ) -> None:
        fields = type(self).fields()
        if quantities and (unknown := quantities.keys() - fields.keys()):
            raise TypeError(str(UnknownNameError("quantity of a record", min(unknown), fields)))
        values = {name: x for name, x in {**(measured or {}), **quantities}.items() if x is not None}
        vars(self).update(case=case, status=status, reason=reason, measured=values)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Samples of a quantity, which have no declaration of their own."""
            fields = type(self).fields()
            if name in fields:
                return self.measured.get(name)
            raise AttributeError(str(UnknownNameError("quantity of a record", name, fields)))

    @classmethod
    @cache
    def quantities(cls) -> dict[str, Quantity]:
        """Quantities by name, of the base class first."""
        declared = [x for base in reversed(cls.__mro__) for x in vars(base).values()]
        return {quantity.name: quantity for quantity in declared if isinstance(quantity, Quantity)}

    @classmethod
    @cache
    def fields(cls) -> dict[str, Field]:
        """Fields of quantities and their samples by name."""
        return {field.name: field for quantity in cls.quantities().values() for field in quantity.fields}

    @classmethod
    @cache
    def line_type(cls) -> Any:
        """Type of a line: the case, the status, and the quantities."""
        status: Any = Literal[STATUSES]
        reason = Meta(description="Reason, and names of numbers that were not finite.")
        fields: list[Any] = [
            ("schema", Annotated[Literal[SCHEMA], Meta(description="Version of this schema.")]),
            ("status", Annotated[status, Meta(description="Outcome; every status but ok has a reason.")]),
            ("reason", Annotated[str | None, reason], None),
        ]
        for field in cls.fields().values():
            about = Meta(description=field.meaning)
            fields.append((field.name, Annotated[_TYPES[field.type] | None, about], None))
        return msgspec.defstruct("Line", fields, bases=(Case,), frozen=True, kw_only=True)

    @classmethod
    def of(cls, record: "Record") -> Self:
        """The record as one of this class, with its quantities."""
        if isinstance(record, cls):
            return record
        return cls(case=record.case, status=record.status, reason=record.reason, measured=record.measured)

    def __eq__(self, record: object) -> bool:
        if not isinstance(record, Record):
            return NotImplemented
        content = self.case, self.status, self.reason, self.measured
        return content == (record.case, record.status, record.reason, record.measured)

    def __hash__(self) -> int:
        return hash((self.case, self.status, self.reason, frozenset(self.measured)))

    def row(self) -> dict[str, Any]:
        """One flat dictionary: the case, the status, then the measured values."""
        measured = {name: self.measured[name] for name in type(self).fields() if name in self.measured}
        case = msgspec.structs.asdict(self.case)
        return {**case, "status": self.status, "reason": self.reason, **measured}


def replace(item: T, **values: Any) -> T:
    """Copy with new values. Quantities of a record are values too, and None removes one."""
    if isinstance(item, msgspec.Struct):
        return msgspec.structs.replace(item, **values)
    # The type of all dataclasses has no public name.
    return dataclasses.replace(item, **values)  # type: ignore[type-var]  # any dataclass


def merge_rows(rows: Sequence[R]) -> dict[str, R]:
    """Records by the key of their case, from rows in the order in which they were measured.

    Every round of a timed call is a row. Rounds since the last failure are one record; otherwise the last row
    of a case counts.
    """
    by_case: dict[str, list[R]] = {}
    for row in rows:
        earlier = by_case.setdefault(row.case.key, [])
        if not (row.status == "ok" and row.round_sizes and earlier and earlier[-1].status == "ok"):
            earlier.clear()
        earlier.append(row)
    return {key: parts[0] if len(parts) == 1 else merge_rounds(parts) for key, parts in by_case.items()}


def merge_rounds(parts: Sequence[R]) -> R:
    """One record with the samples of all rounds."""
    joined = {
        name: tuple(itertools.chain.from_iterable(getattr(part, name) or () for part in parts)) or None
        for name in ("times_s", "device_times_s", "round_sizes", "round_numbers")
    }
    reason = next((part.reason for part in parts if part.reason), None)
    return replace(parts[0], reason=reason, **joined)


class Reading(NamedTuple):
    """Records of a file, and the lines that were left out.

    Attributes:
        torn: Whether the last line is incomplete.
        damaged: {number of a whole line: reason why it is no record}.
    """

    records: tuple[Record, ...]
    torn: bool
    damaged: Mapping[int, str]

    def notes(self, name: str) -> list[str]:
        """Sentences on the lines that were left out."""
        reasons = list(self.damaged.values())
        damaged = [f"Damaged lines left out of {name}: {len(reasons)}. {reasons[0]}"] if reasons else []
        return [*damaged, *[f"The last line of {name} was cut off and is left out."] * self.torn]


def line(record: Record) -> str:
    """The record as one line of strict JSON. Numbers that are not finite become null, named in `reason`."""
    row = record.row()
    if broken := [name for name, value in row.items() if not _finite(value)]:
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
    """Append one record atomically and flush it to disk.

    Raises:
        DataError: If the line cannot be written, or readers would refuse it.
    """
    path, data = Path(path), f"{line(record)}\n".encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_LINK, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size + len(data) > limits.RECORDS_BYTES:
                raise DataError(
                    f"{path} would be larger than {limits.RECORDS_BYTES} bytes, the most that is read; "
                    "write further points to a new folder."
                )
            parse(data.strip(), "The record to write", type(record))
            # The system may write less than requested; only the result reports it.
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        except OSError:
            # The next record would continue a part of a line. A part that cannot be removed is read as torn.
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)
        if size == 0:
            sync_names(path.parent)
    except OSError as error:
        raise DataError(f"Cannot write records to {path}: {error.strerror}.") from None


def sync_names(folder: Path) -> None:
    """Flush the entries of a folder to disk, if the system supports it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    # Some network file systems do not support the request.
    with suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def write(path: Path, content: str | bytes | Mapping[str, Any]) -> Path:
    """Write a file atomically, a mapping as indented strict JSON.

    A link at its path is replaced and not followed.
    """
    if isinstance(content, Mapping):
        content = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    # A lone surrogate, which UTF-8 cannot encode, becomes a question mark.
    data = content if isinstance(content, bytes) else content.encode("utf-8", errors="replace")
    # A random name that must not exist: no existing file is written to.
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}.part")
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            # Without fsync a power failure may leave the name with an empty file.
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_names(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DataError(f"Cannot write {path}: {error.strerror}.") from None
    return path


def read(path: str | Path, kind: type[Record] = Record) -> Reading:
    """Read the records of a file, of a class. Damaged lines are left out and reported."""
    try:
        *lines, rest = limits.read_bytes(Path(path), limits.RECORDS_BYTES).split(b"\n")
    except OSError as error:
        raise DataError(f"Cannot read records from {path}: {error.strerror}.") from None
    records: list[Record] = []
    damaged: dict[int, str] = {}
    for number, text in enumerate(lines, start=1):
        try:
            records += [parse(text, f"{path}, line {number}", kind)] if text.strip() else []
        except DataError as error:
            damaged[number] = str(error)
            if len(damaged) > _MOST_DAMAGED:
                raise
    if damaged and not records:
        raise DataError(next(iter(damaged.values())))
    return Reading(tuple(records), torn=bool(rest.strip()), damaged=damaged)


def parse(text: bytes, source: str, kind: type[Record] = Record) -> Record:
    """Parse the record of one line. `source` names the line in messages."""
    if len(text) > limits.RECORD_LINE_BYTES:
        raise DataError(f"{source} is longer than {limits.RECORD_LINE_BYTES} bytes, the most that is read.")
    try:
        row = msgspec.json.decode(text, type=kind.line_type())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{source} is no record: {' '.join(str(error).split())[:200]}.") from None
    values = msgspec.structs.asdict(row)
    measured = {name: values[name] for name in kind.fields()}
    for name, value in measured.items():
        if type(value) is tuple and None in value:
            # Null replaces a number that was not finite, named in `reason`, and is no sample.
            measured[name] = tuple(sample for sample in value if sample is not None) or None
    case = msgspec.convert(row, Case, from_attributes=True)
    return kind(case=case, status=row.status, reason=row.reason, measured=measured)
