"""Records: strict JSON lines that survive being cut off, and their published schema."""

import functools
import itertools
import json
import pickle
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from synthetic_records import case

import efficient_attn as ea
from efficient_attn import limits
from efficient_attn.errors import DataError
from efficient_attn.measure import record as records
from efficient_attn.measure.record import Case, append, line, replace
from efficient_attn.runs.registry import any_record

Record = any_record()
read, parse = (functools.partial(function, kind=Record) for function in (records.read, records.parse))
LINES = ea.records_schema()
SCHEMA_OF_LINES = Draft202012Validator(LINES)

# A seed has up to 64 bits, and a loss may be below that of exact attention.
CASE = case("time", "window(window=33)", 256, options={"window": 33}, seed=2**63 - 1)
RECORD = Record(case=CASE, times_s=(0.25, 0.5), loss_difference=-0.5, loss_difference_draws=(-0.5, 0.25))


def test_records_are_flat_lines_of_what_was_measured_and_are_read_again(tmp_path):
    path = tmp_path / "records.jsonl"
    same = replace(CASE, options=dict(CASE.options))
    refusal = Record(case=replace(CASE, causal=True), status="unsupported", reason="it cannot")
    assert same == CASE and same.key == CASE.key and len({CASE, same, refusal.case}) == 2
    for record in (RECORD, refusal):
        append(path, record)
    assert read(path) == ((RECORD, refusal), False, {})
    row = json.loads(line(RECORD))
    assert [name for name, value in row.items() if isinstance(value, dict)] == ["options"]
    assert row["schema"] == 2 and row["tokens"] == 256 and row["times_s"] == [0.25, 0.5]
    assert "peak_bytes" not in row


def test_a_torn_last_line_is_left_out_and_told(tmp_path):
    path = tmp_path / "records.jsonl"
    whole = f"{line(RECORD)}\n".encode()
    for length in range(0, len(whole), 9):
        path.write_bytes(whole + whole[:length])
        assert read(path) == ((RECORD,), length > 0, {})


def test_damaged_lines_are_left_out_by_their_number_unless_they_are_all(tmp_path):
    path, whole = tmp_path / "records.jsonl", f"{line(RECORD)}\n"
    path.write_text(whole + "\0" * 9 + "\n" + whole + whole[9:] + whole + whole[:9])
    reading = read(path)
    assert reading.records == (RECORD,) * 3 and list(reading.damaged) == [2, 4]
    damaged, torn = ea.read(path).notes
    assert "Damaged lines left out of records.jsonl: 2. " in damaged and "line 2 is no record" in damaged
    assert torn == "The last line of records.jsonl was cut off and is left out."
    path.write_text(whole + "\0\n" * 1001)
    with pytest.raises(DataError, match="line 1002 is no record"):
        read(path)


def with_field(name, value):
    return json.dumps({**json.loads(line(RECORD)), name: value})


BROKEN = [
    ("{", "truncated"),
    ("[1]", "Expected `object`, got `array`"),
    (with_field("schema", 3), r"Invalid enum value 3 - at `\$\.schema`"),
    ('{"schema": 2, "kind": "time", "status": "ok"}', "Object missing required field `backend`"),
    ("[" * 100_000, "Expected `object`"),
    (line(RECORD).replace("0.25", "NaN"), "JSON is malformed"),
    (line(RECORD).replace("0.25", "1e999"), "Number out of range"),
    *(
        (with_field(name, value), rf"Expected .* - at `\$\.{name}")
        for name, value in {"tokens": 0, "head_dim": 10**30, "label": 3, "options": {"window": [33]},
                            "round_sizes": [None], "output_mse": -1.0}.items()
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_what_is_no_record_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "records.jsonl"
    path.write_text(f"{text}\n")
    with pytest.raises(DataError, match=f"line 1 is no record: .*{message}") as caught:
        read(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_odd_names_and_fields_of_later_versions_are_read_and_half_characters_are_refused():
    odd = Record(case=replace(CASE, label='a": "b', options={"x:y": "z:"}), reason="why: \\")
    assert parse(f'{line(odd)[:-1]}, "watts": 3}}'.encode(), "It") == odd
    with pytest.raises(DataError, match="It is no record"):
        parse(line(RECORD).encode().replace(b'"window"', b'"\xff"'), "It")


def test_files_and_lines_beyond_their_limits_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    with pytest.raises(DataError, match="It is longer than"):
        parse(line(RECORD).encode() + b" " * limits.RECORD_LINE_BYTES, "It")
    with pytest.raises(DataError, match=r"Cannot write records to .*: Is a directory"):
        append(tmp_path, RECORD)
    append(path, RECORD)
    monkeypatch.setattr(limits, "RECORDS_BYTES", path.stat().st_size)
    assert read(path).records == (RECORD,)
    with pytest.raises(DataError, match=f"{path} would be larger than .* to a new folder"):
        append(path, RECORD)
    assert read(path).records == (RECORD,)
    path.write_bytes(2 * path.read_bytes())
    with pytest.raises(DataError, match=f"{path} is larger than"):
        read(path)


def test_the_docs_state_every_limit():
    page = (Path(__file__).parents[2] / "docs" / "reference.md").read_text(encoding="utf-8")
    stated = set(re.findall(r"\d+", page.partition("## Limits")[2]))
    assert {str(value) for name, value in vars(limits).items() if name.isupper()} <= stated


def test_rounds_are_joined_with_their_device_times():
    merged = records.merge_rounds([replace(RECORD, round_sizes=(2,), device_times_s=(0.5, 0.125))] * 2)
    assert merged.times_s == RECORD.times_s * 2 and merged.round_sizes == (2, 2)
    assert merged.device_times_s == (0.5, 0.125) * 2


def test_a_record_has_every_declared_quantity_and_no_other():
    record = Record(case=CASE, output_mse=0.9, times_s=None)
    assert record.output_mse == 0.9 and record.times_s is None and record.measured == {"output_mse": 0.9}
    assert pickle.loads(pickle.dumps(record)) == record != RECORD
    with pytest.raises(TypeError, match="No quantity of a record is called 'output_ms'"):
        Record(case=CASE, output_ms=0.9)
    with pytest.raises(AttributeError, match="Did you mean 'output_mse'"):
        _ = record.output_ms


def test_numbers_of_numpy_are_written_and_a_number_that_is_not_finite_becomes_null_with_a_reason():
    draws = (np.float64("inf"), np.float64(0.1), float("nan"))
    text = line(Record(case=CASE, output_mse=np.float64(0.5), output_mse_draws=draws))
    row = json.loads(text)
    assert parse(text.encode(), "It").output_mse_draws == (0.1,)
    assert row["output_mse"] == 0.5 and row["output_mse_draws"] == [None, 0.1, None]
    assert row["reason"] == "not a finite number: output_mse_draws"
    # What was not finite is no sample.
    for times_s, samples in (((float("inf"), 0.5), (0.5,)), ((float("nan"),), None)):
        assert parse(line(Record(case=CASE, times_s=times_s)).encode(), "It").times_s == samples


def test_the_schema_names_every_field_of_a_record_and_no_other():
    listed = LINES["properties"]
    assert set(listed) == {*Case.__struct_fields__, "status", "reason", *Record.fields()}
    assert all(item["description"] for item in listed.values())
    required = {"schema", "kind", "backend", "label", "num_heads", "head_dim", "tokens", "dtype", "device"}
    assert set(LINES["required"]) == required | {"threads", "status"}


@pytest.mark.parametrize("kind", ["time", "prediction"])
def test_every_kind_of_record_is_valid_and_strict_whatever_was_measured(kind):
    nan = float("nan")
    values = {"whole number": 1, "whole numbers": (1, 2), "number": nan, "numbers": (1.0, float("inf"))}
    values |= {"signed number": -0.5, "signed numbers": (-0.5, nan)}
    measured = {name: values.get(field.type) for name, field in Record.fields().items()}
    about = replace(CASE, kind=kind, options={"a": 1, "b": "c", "d": None, "e": nan})
    for status, fields in itertools.product(records.STATUSES, ({"reason": "because"}, measured)):
        record = Record(case=about, status=status, **fields)
        row = json.loads(line(record), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert SCHEMA_OF_LINES.is_valid(row)
        assert (row["reason"] or "").startswith("because" if record.reason else "not a finite number: ")


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(),
    # To a schema 1.0 is an integer too; we never write it.
    st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not x.is_integer()), st.text(),
    st.lists(st.none() | st.integers() | st.text(max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=2), st.none() | st.integers() | st.lists(st.none(), max_size=1)),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(LINES["properties"])), value=VALUES)
def test_the_reader_accepts_exactly_what_the_schema_does(name, value):
    row = {**json.loads(line(Record(case=CASE))), name: value}
    accepted = SCHEMA_OF_LINES.is_valid(row)
    with nullcontext() if accepted else pytest.raises(DataError):
        parse(json.dumps(row).encode(), "It")
