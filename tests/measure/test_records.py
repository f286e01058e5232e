"""Records: strict JSON lines that survive being cut off."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest

from efficient_attn.errors import DataError
from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.measure.records import append, line, parse, read

CASE = Case(
    kind="time",
    backend="window",
    label="window(window=33)",
    options={"window": 33},
    num_heads=8,
    head_dim=64,
    tokens=256,
    dtype="float32",
    device="cpu",
    threads=2,
)
RECORD = Record(case=CASE, times_s=(0.25, 0.5))


def test_what_is_appended_is_read_again(tmp_path):
    path = tmp_path / "records.jsonl"
    refusal = Record(case=replace(CASE, causal=True), status="unsupported", reason="it cannot")
    for record in (RECORD, refusal):
        append(path, record)
    assert read(path) == ((RECORD, refusal), False)


def test_a_line_is_flat_but_for_options_and_leaves_out_what_was_not_measured():
    row = json.loads(line(RECORD))
    assert [name for name, value in row.items() if isinstance(value, dict)] == ["options"]
    assert row["schema"] == 2 and row["tokens"] == 256 and row["times_s"] == [0.25, 0.5]
    assert "peak_bytes" not in row


def test_equal_cases_have_one_key_and_other_cases_another():
    same = replace(CASE, options=dict(CASE.options))
    other = replace(CASE, tokens=257)
    assert same == CASE and same.key == CASE.key and len({CASE, same, other}) == 2


def test_a_torn_last_line_is_left_out_and_told(tmp_path):
    path = tmp_path / "records.jsonl"
    whole = f"{line(RECORD)}\n".encode()
    for length in range(len(whole)):
        path.write_bytes(whole + whole[:length])
        assert read(path) == ((RECORD,), length > 0)


def with_field(name, value):
    return json.dumps({**json.loads(line(RECORD)), name: value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 is no strict JSON"),
        ("[1]", "is no JSON object"),
        ('{"schema": 3}', "has schema '3'; this version reads 2"),
        ('{"schema": true}', "has schema 'True'; this version reads 2"),
        ('{"schema": 2}', "has kind 'None'; known: time, memory"),
        ('{"schema": 2, "kind": "time"}', "has status 'None'; known: ok, unsupported"),
        ('{"schema": 2, "kind": "speed"}', "has kind 'speed'; known: time, memory"),
        ('{"schema": 2, "kind": "time", "status": "fine"}', "has status 'fine'"),
        ('{"schema": 2, "kind": "time", "status": "ok"}', "line 1: object missing required field `backend`"),
        (line(RECORD).replace("0.25", "NaN"), "NaN is no JSON number"),
        (line(RECORD).replace("0.25", "1e999"), "1e999 is no finite number"),
        (line(RECORD).replace("0.25", '"x"'), "times_s cannot be"),
        (line(RECORD).replace('"tokens": 256', '"tokens": "many"'), "tokens cannot be 'many'"),
        (line(RECORD).replace("33}", "[33]}"), "options cannot be"),
        (line(RECORD).replace("256", "-256"), "tokens cannot be '-256'"),
        (line(RECORD).replace("256", "1" + "0" * 30), "tokens cannot be '1000"),
        *(
            (
                line(RECORD).replace('"tokens": 256', f'"tokens": {value}'),
                f"line 1: tokens cannot be '{shown}'",
            )
            for value, shown in (("true", "True"), ("256.0", "256.0"))
        ),
        (with_field("threads", True), "threads cannot be 'True'"),
        (with_field("seed", 1.0), "seed cannot be '1.0'"),
        (with_field("causal", 1), "causal cannot be '1'"),
        (with_field("round_sizes", [1.0]), r"round_sizes cannot be '\[1.0\]'"),
        (with_field("round_sizes", [True]), r"round_sizes cannot be '\[True\]'"),
        (with_field("round_sizes", [None]), r"round_sizes cannot be '\[None\]'"),
        (with_field("output_mse", -1.0), "output_mse cannot be '-1.0'; expected `float` >= 0"),
        (with_field("times_s", [True]), r"times_s cannot be '\[True\]'"),
        (line(RECORD)[:-1] + ', "tokens": 256}', "line 1 is no strict JSON: 'tokens' stands twice"),
        (line(RECORD).replace("33}", '33, "window": 33}'), "'window' stands twice in one object"),
        ("[" * 100_000, "is no strict JSON"),
        (line(RECORD).replace('"label": "window(window=33)"', '"label": 3'), "label cannot be '3'"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "records.jsonl"
    path.write_text(f"{text}\n")
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize(
    "text",
    [
        line(RECORD)[:-1] + ', "tokens" : 256}',
        line(RECORD)[:-1] + ', "label": "a:b", "label" : "a:b"}',
        line(RECORD)[:-1] + ', "watts": {"a": 1, "a": 2}}',
        line(RECORD)[:-1] + ', "watts": 1e999}',
        line(RECORD)[:-1] + ', "watts": NaN}',
    ],
)
def test_a_line_is_strict_in_every_spelling_and_in_fields_of_later_versions(text):
    with pytest.raises(DataError, match="It is no strict JSON"):
        parse(text.encode(), "It")


def test_names_with_colons_and_half_characters_and_a_byte_order_mark_are_read():
    odd = Record(case=replace(CASE, label='a": "b', options={"x:y": "z:"}), reason="why: \\")
    assert parse(line(odd).encode(), "It") == odd
    assert parse(b"\xef\xbb\xbf" + line(RECORD).encode(), "It") == RECORD
    half = line(RECORD).replace('"window"', r'"\ud800"').encode()
    assert parse(half, "It").case.backend == "\ud800"
    with pytest.raises(DataError, match="It is no strict JSON"):
        parse(line(RECORD).encode().replace(b'"window"', b'"\xff"'), "It")


def test_a_record_has_every_declared_quantity_and_no_other():
    record = Record(case=CASE, output_mse=0.9, times_s=None)
    assert record.output_mse == 0.9 and record.times_s is None and record.measured == {"output_mse": 0.9}
    assert replace(record, output_mse=None, kernel_mse=0.5) == Record(case=CASE, kernel_mse=0.5)
    assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record
    assert len({record, copy.copy(record), RECORD}) == 2
    with pytest.raises(TypeError, match="No quantity of a record is called 'output_ms'"):
        Record(case=CASE, output_ms=0.9)
    with pytest.raises(AttributeError, match="Did you mean 'output_mse'"):
        _ = record.output_ms
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.output_mse = 1.0


def test_numbers_of_numpy_are_written_as_numbers():
    made = Record(
        case=CASE, output_mse=np.float64(0.5), output_mse_draws=(np.float64("inf"), np.float64(0.1))
    )
    row = json.loads(line(made))
    assert row["output_mse"] == 0.5 and row["output_mse_draws"] == [None, 0.1]
    assert row["reason"] == "not a finite number: output_mse_draws"


def test_fields_of_later_versions_are_ignored(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(line(RECORD)[:-1] + ', "watts": 3}\n')
    assert read(path).records == (RECORD,)


def test_a_number_that_is_not_finite_becomes_null_with_a_reason():
    row = json.loads(line(Record(case=CASE, output_mse=float("inf"), output_mse_draws=(1.0, float("nan")))))
    assert row["output_mse"] is None and row["output_mse_draws"] == [1.0, None]
    assert row["reason"] == "not a finite number: output_mse, output_mse_draws"


def test_a_time_that_was_not_finite_is_no_sample():
    for times_s, known in (((float("inf"), 0.5), (0.5,)), ((float("nan"),), None)):
        assert parse(line(Record(case=CASE, times_s=times_s)).encode(), "It").times_s == known


def test_unreadable_and_unwritable_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"Cannot read records from .*nothing: No such file"):
        read(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"Cannot write records to .*: Is a directory"):
        append(tmp_path, RECORD)
