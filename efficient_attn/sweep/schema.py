"""Types of the fields of a record, their JSON Schema and their reference table."""

import sys
from functools import cache
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta

from efficient_attn.limits import BYTES, COUNT, SAMPLES, WHOLE_NUMBER
from efficient_attn.sweep.case import SCHEMA, STATUSES, Case
from efficient_attn.sweep.quantity import CONDITIONS, FIELDS, KINDS, QUANTITIES, Field, Quantity

# Largest whole number of a unit; counts have no unit.
_LARGEST = {"bytes": BYTES, "FLOP": WHOLE_NUMBER}

_NUMBER = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


def measured_type() -> Any:
    """Type of what a line holds apart from its case: the status and the fields declared so far."""
    # Fields are only ever added, so that their number identifies the type.
    return _measured_type(len(FIELDS))


@cache
def _measured_type(count: int) -> Any:
    known: dict[str, Any] = {
        "status": Annotated[
            Literal[STATUSES], Meta(description="Outcome; every status but ok has a reason.")
        ],
        "reason": Annotated[
            str | None, Meta(description="Reason of a missing value, or names of values that are not finite.")
        ],
    }
    made: Any = TypedDict
    return made("Measured", known | {one.name: _type(one) for one in FIELDS.values()}, total=False)


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
    case, measured = (
        next(iter(msgspec.json.schema(one)["$defs"].values())) for one in (Case, measured_type())
    )
    known = {name: _merged(one) for name, one in (case["properties"] | measured["properties"]).items()}
    meanings = "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items())
    known["kind"] = {"description": f"Kind of the measurement ({meanings}).", "enum": list(KINDS)}
    known["schema"] = {"description": known["schema"]["description"], "const": SCHEMA}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A record of efficient-attn",
        "description": "One line of records.jsonl: case, status and raw values. An absent field was not "
        "measured; a reader ignores fields that are not listed here.",
        "type": "object",
        "required": [*case["required"], "schema", "status"],
        "properties": known,
    }


def _merged(schema: Any) -> Any:
    """Alternatives of different types as one list of types, without defaults."""
    if not isinstance(schema, dict):
        return schema
    merged = {name: _merged(value) for name, value in schema.items() if name not in ("anyOf", "default")}
    either = [_merged(one) for one in schema.get("anyOf", ())]
    keywords = {name: value for one in either for name, value in one.items()}
    types = {"type": [one["type"] for one in either]} if either else {}
    return {**merged, **keywords, **types}


def quantities_table() -> str:
    """Every declared quantity as a Markdown table, conditions at the end."""
    compared = [(one, one.better or "–", one.scatter or "–") for one in QUANTITIES.values()]
    conditions = [(one, "–", f"condition: {one.condition}") for one in CONDITIONS.values()]
    rows = [_row(*row) for row in (*compared, *conditions)]
    head = ("| name | unit | meaning | better | scatter |", "| --- | --- | --- | --- | --- |")
    return "\n".join([*head, *rows])


def _row(quantity: Quantity, better: str, scatter: str) -> str:
    field = "" if quantity.field == quantity.name else f" (field `{quantity.field}`)"
    return f"| `{quantity.name}`{field} | {quantity.unit} | {quantity.meaning} | {better} | {scatter} |"
