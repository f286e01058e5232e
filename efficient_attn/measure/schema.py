"""Types of the fields of a record, and their JSON Schema."""

import sys
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, Literal, Required, TypedDict, get_type_hints

import msgspec
from msgspec import Meta

from efficient_attn.limits import BYTES, COUNT, SAMPLES, WHOLE_NUMBER
from efficient_attn.measure.quantity import FIELDS, KINDS, Field
from efficient_attn.measure.record import SCHEMA, STATUSES, Case

# Largest whole number of a unit; counts have no unit.
_LARGEST = {"bytes": BYTES, "FLOP": WHOLE_NUMBER}

_NUMBER = Annotated[float, Meta(ge=0, le=sys.float_info.max)]

_REQUIRED = [
    item.name for item in fields(Case) if item.default is MISSING and item.default_factory is MISSING
]


def line_type() -> Any:
    """Type of a line: the case, the status, and the quantities and kinds declared so far."""
    # Declarations are only ever added, so that their numbers identify the type.
    return _line_type(len(FIELDS), len(KINDS))


@cache
def _line_type(*counts: int) -> Any:
    case = get_type_hints(Case, include_extras=True)
    meanings = "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items())
    known = case | {
        "kind": Annotated[Literal[tuple(KINDS)], Meta(description=f"Kind of the measurement ({meanings}).")],
        "schema": Annotated[Literal[SCHEMA], *case["schema"].__metadata__],
        "status": Annotated[
            Literal[STATUSES], Meta(description="Outcome; every status but ok has a reason.")
        ],
        "reason": Annotated[
            str | None, Meta(description="Reason of a missing value, or names of values that are not finite.")
        ],
    }
    known |= {name: Required[known[name]] for name in (*_REQUIRED, "schema", "status")}
    made: Any = TypedDict
    return made("Line", known | {one.name: _type(one) for one in FIELDS.values()}, total=False)


def _type(field: Field) -> Any:
    whole = Annotated[int, Meta(ge=0, le=_LARGEST.get(field.unit, COUNT))]
    types: dict[str, Any] = {
        "number": _NUMBER,
        "whole number": whole,
        # Null stands for a value that was not finite.
        "numbers": Annotated[tuple[_NUMBER | None, ...], Meta(max_length=SAMPLES)],
        "whole numbers": Annotated[tuple[whole, ...], Meta(max_length=SAMPLES)],
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
