"""What a line of a file of records may hold, for programs that are not ours."""

from importlib.resources import files
from typing import Any

from efficient_attn.strict import read_object


def records_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one line of a file of records."""
    text = files("efficient_attn.sweep").joinpath("records.schema.json").read_text(encoding="utf-8")
    return read_object(text, "The schema")
