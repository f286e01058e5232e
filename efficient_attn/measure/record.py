"""Cases and records: the description of a measurement, and its result.

Equal cases are the same measurement. A record is a case, a status and raw values with units in the names of
their fields. A measurement that failed is a record too, with its reason.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from efficient_attn.errors import UnknownNameError
from efficient_attn.limits import COUNT, WHOLE_NUMBER
from efficient_attn.measure.quantities import FIELDS

if TYPE_CHECKING:
    Options = Mapping[str, Any]
else:
    Options = Mapping[str, str | int | float | bool | None]

T = TypeVar("T")

# Version of the fields of records.
SCHEMA = 2

STATUSES = ("ok", "unsupported", "skipped", "oom", "timeout", "crash", "error")

# Executions of a call other than eager.
COMPILED, CUDA_GRAPH, DECODED = EXECUTIONS = ("compiled", "cuda-graph", "decoded")

# `calibrated_on` of a backend that was calibrated on the inputs of its measurement.
SAME_INPUTS = "the inputs measured"

Size = Annotated[int, Meta(ge=1, le=COUNT)]
Index = Annotated[int, Meta(ge=0, le=COUNT)]
Seed = Annotated[int, Meta(ge=0, le=WHOLE_NUMBER)]


class Case(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Description of one measurement, complete enough to repeat it."""

    kind: Annotated[str, Meta(description="Kind of the measurement.")]
    backend: Annotated[str, Meta(description="Registered name, or file.py:object.")]
    label: Annotated[str, Meta(description="Name in tables and plots: the backend with its set options.")]
    options: Annotated[Options, Meta(description="All options of the backend.")] = {}
    of: Annotated[
        str,
        Meta(description="Subject: attention, block, encoder or model; of an error output, weights, kernel."),
    ] = "attention"
    layers: Annotated[Size | None, Meta(description="Number of blocks of an encoder.")] = None
    batch: Annotated[Size, Meta(description="Batch size.")] = 1
    num_heads: Annotated[Size, Meta(description="Number of heads of the queries.")]
    head_dim: Annotated[Size, Meta(description="Head dimension.")]
    tokens: Annotated[Size, Meta(description="Sequence length.")]
    causal: Annotated[bool, Meta(description="Causal masking.")] = False
    backward: Annotated[
        bool, Meta(description="Forward and backward pass together; false: the forward pass alone.")
    ] = False
    dtype: Annotated[str, Meta(description="Name of the torch dtype of q, k and v.")]
    device: Annotated[str, Meta(description="Name of the torch device.")]
    threads: Annotated[Size, Meta(description="Number of torch threads on the CPU.")]
    inputs: Annotated[
        str, Meta(description="Source of q, k and v, such as gaussian; of a model its name and its texts.")
    ] = "gaussian"
    layer: Annotated[
        Index | None,
        Meta(description="Only layer of a model whose attention was replaced, from 0; null: all layers."),
    ] = None
    seed: Annotated[Seed, Meta(description="Random seed of the inputs, or of the first draw.")] = 0
    execution: Annotated[
        str | None, Meta(description="compiled (torch.compile) or cuda-graph (replayed); null: eager.")
    ] = None
    l2: Annotated[
        str | None,
        Meta(description="L2 cache of a GPU when a call with a device time begins: cold (flushed) or warm."),
    ] = None
    num_kv_heads: Annotated[
        Size | None, Meta(description="Number of heads of the keys and values; null: num_heads.")
    ] = None
    schema: Annotated[int, Meta(description="Version of this schema.")] = SCHEMA

    @property
    def model_dim(self) -> int:
        """Model dimension, num_heads × head_dim."""
        return self.num_heads * self.head_dim

    # Every grouping of records asks for the key, and a case never changes.
    @cached_property
    def key(self) -> str:
        """Canonical JSON of the case: the same text for the same measurement, in every process."""
        return json.dumps(msgspec.structs.asdict(self), sort_keys=True, allow_nan=False)

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, init=False)
class Record:
    """A case, its status and the measured values: `Record(case=case, accuracy=0.9).accuracy`.

    Every declared quantity is a keyword and an attribute, None where it was not measured.

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
        if quantities and (unknown := quantities.keys() - FIELDS.keys()):
            raise TypeError(str(UnknownNameError("quantity of a record", min(unknown), FIELDS)))
        values = {**(measured or {}), **quantities}
        if None in values.values():
            values = {name: value for name, value in values.items() if value is not None}
        vars(self).update(case=case, status=status, reason=reason, measured=values)

    def __getattr__(self, name: str) -> Any:
        if name in FIELDS:
            return self.measured.get(name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(str(UnknownNameError("quantity of a record", name, FIELDS)))

    def __hash__(self) -> int:
        return hash((self.case, self.status, self.reason, frozenset(self.measured)))

    def row(self) -> dict[str, Any]:
        """One flat dictionary: the case, the status, then the measured values."""
        measured = {name: self.measured[name] for name in FIELDS if name in self.measured}
        case = msgspec.structs.asdict(self.case)
        return {**case, "status": self.status, "reason": self.reason, **measured}


def replace(item: T, **values: Any) -> T:
    """Copy with other values; quantities of a record are values like any other, and None removes one."""
    if isinstance(item, msgspec.Struct):
        return msgspec.structs.replace(item, **values)
    # The type of all dataclasses has no public name.
    return dataclasses.replace(item, **values)  # type: ignore[type-var]  # any dataclass


def merge_rows(rows: Sequence[Record]) -> dict[str, Record]:
    """Records by the key of their case, from rows in the order in which they were measured.

    Every round of a timed call is a row. Rounds since the last failure are one record; otherwise the last row
    of a case counts.
    """
    by_case: dict[str, list[Record]] = {}
    for row in rows:
        earlier = by_case.setdefault(row.case.key, [])
        if not (row.status == "ok" and row.round_sizes and earlier and earlier[-1].status == "ok"):
            earlier.clear()
        earlier.append(row)
    return {key: parts[0] if len(parts) == 1 else merge_rounds(parts) for key, parts in by_case.items()}


def merge_rounds(parts: Sequence[Record]) -> Record:
    """One record with the samples of all rounds."""
    waits_s = [part.waited_s for part in parts]
    joined = {
        name: tuple(itertools.chain.from_iterable(getattr(part, name) or () for part in parts)) or None
        for name in ("times_s", "device_times_s", "round_sizes")
    }
    return replace(parts[0], waited_s=None if None in waits_s else sum(waits_s), **joined)
