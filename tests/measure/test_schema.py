"""The published schema of a record, and files of every schema that was ever released."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import forgotten

import efficient_attn as ea
from efficient_attn.errors import DataError
from efficient_attn.measure import quantities
from efficient_attn.measure.quantities import FIELDS, KINDS
from efficient_attn.measure.record import SCHEMA, STATUSES, Case, Record, replace
from efficient_attn.measure.records import line, parse, records_schema
from efficient_attn.studies import studies

studies()
FIXTURES = Path(__file__).parent.parent / "fixtures"
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
    "default": lambda value, wanted, schema: True,
    "anyOf": lambda value, wanted, schema: any(valid(value, one) for one in wanted),
    "description": lambda value, wanted, schema: True,
    "enum": lambda value, wanted, schema: any(value == one and type(value) is type(one) for one in wanted),
    "type": lambda value, wanted, schema: of_type(value, [wanted] if isinstance(wanted, str) else wanted),
    "minimum": lambda value, wanted, schema: not of_type(value, ["number"]) or value >= wanted,
    "maximum": lambda value, wanted, schema: not of_type(value, ["number"]) or value <= wanted,
    "items": lambda value, wanted, schema: value is None or all(valid(item, wanted) for item in value),
    "maxItems": lambda value, wanted, schema: value is None or len(value) <= wanted,
    "maxProperties": lambda value, wanted, schema: len(value) <= wanted,
    "required": lambda value, wanted, schema: set(wanted) <= set(value),
    "properties": lambda value, wanted, schema: all(
        valid(item, wanted[name]) for name, item in value.items() if name in wanted
    ),
    "additionalProperties": lambda value, wanted, schema: all(valid(item, wanted) for item in value.values()),
}


def strictly(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_schema_names_every_field_of_a_record_and_no_other():
    listed = records_schema()["properties"]
    assert set(listed) == {*Case.__struct_fields__, "status", "reason", *FIELDS}
    assert len(listed) == len(Case.__struct_fields__) + 2 + len(FIELDS)
    assert all(item["description"] for item in listed.values())
    assert set(listed["kind"]["enum"]) == set(KINDS) and set(listed["status"]["enum"]) == set(STATUSES)
    assert listed["schema"]["enum"] == [SCHEMA] and ea.records_schema() == records_schema()
    known = {"schema", "kind", "backend", "label", "num_heads", "head_dim", "tokens", "dtype", "device"}
    assert set(records_schema()["required"]) == known | {"threads", "status"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", STATUSES)
def test_every_kind_of_record_is_valid_and_strict_whatever_was_measured(kind, status):
    broken = float("nan")
    values = {"whole number": 1, "whole numbers": (1, 2), "number": broken, "numbers": (1.0, float("inf"))}
    measured = {name: values.get(field.type) for name, field in FIELDS.items()}
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


def alternatives(schema):
    return schema.get("anyOf", [schema])


def span(name):
    """Smallest and largest whole number of a field, or of its entries; None for other fields."""
    for one in alternatives(records_schema()["properties"][name]):
        one = one.get("items", one)
        if one.get("type") == "integer":
            return one["minimum"], one["maximum"]
    return None


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("tokens", 1, 2**40),
        ("layers", 1, 2**40),
        ("layer", 0, 2**40),
        ("seed", 0, 2**63 - 1),
        ("flops", 0, 2**63 - 1),
        ("peak_bytes", 0, 2**50),
        ("round_sizes", 0, 2**40),
    ],
)
def test_whole_numbers_have_the_range_of_what_they_count(name, least, most):
    assert span(name) == (least, most)


@pytest.mark.parametrize(
    "name", [n for n in records_schema()["properties"] if n not in ("schema", "options") and span(n)]
)
def test_reader_and_schema_agree_on_the_range_of_every_whole_number(name):
    many = any("items" in one for one in alternatives(records_schema()["properties"][name]))
    least, most = span(name)
    allowed = dict.fromkeys((least, most), True) | dict.fromkeys((least - 1, most + 1, 2.0**62), False)
    for value, fits in allowed.items():
        row = {**json.loads(line(Record(case=CASE))), name: [value] if many else value}
        assert valid(row, records_schema()) == fits
        if fits:
            parse(json.dumps(row).encode(), "It")
        else:
            with pytest.raises(
                DataError, match=f"It: {name} cannot be .*; expected `(int|null`|int`|array`)"
            ):
                parse(json.dumps(row).encode(), "It")


def test_stored_files_are_read_tabled_told_and_compared():
    folder = FIXTURES / "run"
    results = ea.read(folder)
    assert {record.case.kind for record in results.records} == set(KINDS) - {"prediction", "bound"}
    assert {record.status for record in results.records} == set(STATUSES)
    assert (
        len(results.to_pandas()) == len(results) == len((folder / "records.jsonl").read_text().splitlines())
    )
    assert results.tables() and results.sentences() and results.environment["torch"]["version"]
    assert all(record.case.schema == SCHEMA for record in results.records)
    assert (found := ea.diff(folder, folder)).tables() is not None and not found.regressions
    for text in (folder / "records.jsonl").read_text().splitlines():
        assert valid(strictly(text), {**records_schema(), "properties": {}})


def test_a_new_quantity_needs_a_declaration_alone():
    with pytest.raises(TypeError, match="No quantity of a record is called 'energy_j'"):
        Record(case=CASE, energy_j=2.5)
    with forgotten():
        declared = quantities.Quantity(
            name="energy_j", unit="J", meaning="Energy of a call.", scatter="draws", samples="energy_j_draws"
        )
        quantities.register(declared, declared, kinds={"energy": "energy of a call"})
        made, more = (
            Record(
                case=replace(CASE, kind="energy"),
                energy_j=2.5 * factor,
                energy_j_draws=tuple(2.5 * factor + n for n in (-0.1, 0.0, 0.0, 0.1)),
            )
            for factor in (1, 2)
        )
        assert parse(line(made).encode(), "It") == made and made.energy_j_draws[2] == 2.5
        with pytest.raises(DataError, match="It: energy_j cannot be 'much'"):
            parse(line(made).replace('_j": 2.5', '_j": "much"').encode(), "It")
        assert records_schema()["properties"]["energy_j"]["description"] == "Energy of a call."
        found = ea.diff(ea.Results([made]), ea.Results([more]), fail_on={"energy_j": 0.1})
        assert [one.quantity for one in found.regressions] == ["energy_j"]
        other = replace(declared, unit="kWh")
        with pytest.raises(RuntimeError, match="Two quantities are called 'energy_j'"):
            quantities.register(other)
