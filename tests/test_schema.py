"""The published schema of a record, and files of every schema that was ever released."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import efficient_attn as ea
from efficient_attn.errors import DataError
from efficient_attn.sweep import records
from efficient_attn.sweep.case import SPANS
from efficient_attn.sweep.records import KINDS, SCHEMA, STATUSES, Case, Record, line, parse
from efficient_attn.sweep.schema import records_schema

FIXTURES = Path(__file__).parent / "fixtures"
JSON_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "number": (int, float),
    "integer": int,
    "null": type(None),
}
CASE = Case(
    kind="time", backend="b", label="b", num_heads=1, head_dim=1, tokens=1, dtype="d", device="cpu", threads=1
)


def valid(value, schema):
    """Whether a value is what our JSON Schema says; a keyword that is not known here is an error."""
    return all(CHECKS[keyword](value, wanted, schema) for keyword, wanted in schema.items())


def of_type(value, wanted):
    if isinstance(value, bool):
        return "boolean" in wanted
    return any(isinstance(value, JSON_TYPES[name]) for name in wanted)


CHECKS = {
    "$schema": lambda value, wanted, schema: wanted.endswith("2020-12/schema"),
    "title": lambda value, wanted, schema: True,
    "description": lambda value, wanted, schema: True,
    "const": lambda value, wanted, schema: value == wanted and type(value) is type(wanted),
    "enum": lambda value, wanted, schema: value in wanted,
    "type": lambda value, wanted, schema: of_type(value, [wanted] if isinstance(wanted, str) else wanted),
    "minimum": lambda value, wanted, schema: not of_type(value, ["number"]) or value >= wanted,
    "maximum": lambda value, wanted, schema: not of_type(value, ["number"]) or value <= wanted,
    "items": lambda value, wanted, schema: value is None or all(valid(item, wanted) for item in value),
    "required": lambda value, wanted, schema: set(wanted) <= set(value),
    "properties": lambda value, wanted, schema: all(
        valid(item, wanted[name]) for name, item in value.items() if name in wanted
    ),
    "additionalProperties": lambda value, wanted, schema: all(valid(item, wanted) for item in value.values()),
}


def strictly(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_schema_names_every_field_of_a_record_and_no_other():
    known = {item.name for item in (*fields(Case), *fields(Record))} - {"case"}
    listed = records_schema()["properties"]
    assert set(listed) == known, "describe new fields in efficient_attn/sweep/records.schema.json"
    assert all(item["description"] for item in listed.values())
    assert listed["kind"]["enum"] == list(KINDS) and listed["status"]["enum"] == list(STATUSES)
    assert listed["schema"]["const"] == SCHEMA and ea.records_schema() == records_schema()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", STATUSES)
def test_every_kind_of_record_is_valid_and_strict_whatever_was_measured(kind, status):
    broken = float("nan")
    measured = {item.name: 1 for item in fields(Record) if "int" in str(item.type)}
    measured |= {item.name: (1, 2) for item in fields(Record) if "tuple[int" in str(item.type)}
    measured |= {item.name: broken for item in fields(Record) if str(item.type).startswith("float")}
    measured |= {item.name: (1.0, float("inf")) for item in fields(Record) if "tuple[float" in str(item.type)}
    case = replace(CASE, kind=kind, options={"a": 1, "b": "c", "d": None, "e": broken})
    for record in (
        Record(case=case, status=status, reason="because"),
        Record(case=case, status=status, **measured),
    ):
        row = strictly(line(record))
        assert valid(row, records_schema())
        assert (row["reason"] or "").startswith("because" if record.reason else "not a finite number: ")


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(),
    st.lists(st.none() | st.integers() | st.text(max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=2), st.none() | st.integers() | st.lists(st.none(), max_size=1)),
)  # fmt: skip


@given(name=st.sampled_from(sorted(records_schema()["properties"])), value=VALUES)
def test_the_reader_accepts_exactly_what_the_schema_does(name, value):
    row = {**json.loads(line(Record(case=CASE))), name: value}
    try:
        parse(json.dumps(row).encode(), "It")
    except DataError:
        accepted = False
    else:
        accepted = True
    # To a schema 1.0 is an integer too; we never write it.
    assert accepted == valid(row, records_schema())


@pytest.mark.parametrize("name", SPANS)
def test_reader_and_schema_agree_on_the_range_of_every_whole_number(name):
    listed = records_schema()["properties"][name]
    least, most = SPANS[name]
    allowed = dict.fromkeys((least, most), True) | dict.fromkeys((least - 1, most + 1, 2.0**62), False)
    for value, fits in allowed.items():
        row = {**json.loads(line(Record(case=CASE))), name: [value] if "items" in listed else value}
        assert valid(row, records_schema()) == fits
        if fits:
            parse(json.dumps(row).encode(), "It")
        else:
            with pytest.raises(DataError, match=f"It: {name} cannot be .* from {least} to {most}"):
                parse(json.dumps(row).encode(), "It")


def test_every_schema_that_was_released_has_a_fixture_and_a_way_into_this_one():
    assert [folder.name for folder in sorted(FIXTURES.glob("schema-*"))] == [
        f"schema-{version}" for version in range(1, SCHEMA + 1)
    ]
    assert sorted(records._UPGRADES) == list(range(1, SCHEMA))


@pytest.mark.parametrize("folder", sorted(FIXTURES.glob("schema-*")), ids=lambda folder: folder.name)
def test_files_of_every_released_schema_are_read_tabled_told_and_compared(folder):
    results = ea.read(folder)
    assert {record.case.kind for record in results.records} == set(KINDS)
    assert {record.status for record in results.records} == set(STATUSES)
    assert (
        len(results.to_pandas()) == len(results) == len((folder / "records.jsonl").read_text().splitlines())
    )
    assert results.tables() and results.sentences() and results.environment["torch"]["version"]
    assert all(record.case.schema == SCHEMA for record in results.records)
    assert (found := ea.diff(folder, folder)).tables() is not None and not found.regressions
    for text in (folder / "records.jsonl").read_text().splitlines():
        assert valid(strictly(text), {**records_schema(), "properties": {}})


def test_a_row_of_an_older_schema_is_read_as_one_of_this(monkeypatch):
    old = line(Record(case=CASE)).replace('"tokens"', '"length"').encode()
    monkeypatch.setattr(records, "SCHEMA", 2)
    monkeypatch.setattr(records, "_UPGRADES", {1: lambda row: {**row, "tokens": row["length"]}})
    assert parse(old, "It") == Record(case=replace(CASE, schema=2))
