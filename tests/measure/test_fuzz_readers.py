"""Whatever the files of a run hold, reading, comparing, drawing and resuming end well or in our own error."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import efficient_attn as ea
from efficient_attn.errors import AttentionError, DataError
from efficient_attn.limits import ENVIRONMENT_BYTES
from efficient_attn.measure.record import line
from efficient_attn.runs.registry import find, records_schema
from efficient_attn.runs.run import prepare

FIXTURE = Path(__file__).parent.parent / "fixtures" / "run"
RECORDS = (FIXTURE / "records.jsonl").read_bytes()
ENVIRONMENT = (FIXTURE / "environment.json").read_bytes()
ROWS = [json.loads(text) for text in RECORDS.splitlines()]

# More by hand: EFFICIENT_ATTN_FUZZ=10000 pytest tests/measure/test_fuzz_readers.py
COUNT = int(os.environ.get("EFFICIENT_ATTN_FUZZ", "12"))
fuzz = settings(max_examples=COUNT, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)

NUMBERS = st.sampled_from([0, 1, 2, 16, 2**31, 2**63 - 1, 0.0, 5e-324, 1e-9, 0.5, 1e150, 1e308])
TEXTS = st.text(max_size=8) | st.sampled_from(["float16", "cuda", "window(window=5)", "\x1b[2J", "<b>"])
NONSENSE = st.recursive(
    NUMBERS | TEXTS | st.none() | st.booleans() | st.sampled_from([-1, 2**63, 10**400]),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def changes_of(name):
    """A row, a field and a value: one of those that rows have, or anything."""
    values = [row[name] for row in ROWS if name in row] or [None]
    value = st.sampled_from(values) | NONSENSE | st.lists(NUMBERS, max_size=9)
    return st.tuples(st.integers(0, len(ROWS) - 1), st.just(name), value)


FIELDS = st.sampled_from(sorted(records_schema()["properties"]))
CHANGES = st.lists(FIELDS.flatmap(changes_of), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def use(folder, records, environment=ENVIRONMENT):
    """All that commands do with the files of a run, but for drawing, which takes long."""
    (folder / "records.jsonl").write_bytes(records)
    (folder / "environment.json").write_bytes(environment)
    with suppress(AttentionError):
        results = ea.read(folder)
        assert not results.to_pandas().empty and all(results.notes)
        results.tables()
        results.sentences()
    for runs in ((FIXTURE, folder), (folder, FIXTURE)):
        with suppress(AttentionError):
            comparison = ea.diff(*runs)
            comparison.tables()
            comparison.sentences()
            json.dumps(comparison.as_dict(), allow_nan=False)
    with suppress(AttentionError):
        prepare(find("bench"), {}, out=folder, resume=True)
    with suppress(AttentionError):
        assert all(line(row) for row in ea.read(folder).records)


@pytest.mark.slow
@fuzz
@given(changes=CHANGES)
def test_any_value_in_any_field_is_refused_or_made_use_of(folder, changes):
    rows = [dict(row) for row in ROWS]
    for number, name, value in changes:
        rows[number][name] = value
    use(folder, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


ENTRIES = st.sampled_from(sorted(json.loads(ENVIRONMENT)))


@pytest.mark.slow
@fuzz
@given(value=NONSENSE | st.dictionaries(ENTRIES, NONSENSE, max_size=4))
def test_any_environment_is_refused_or_made_use_of(folder, value):
    use(folder, RECORDS, json.dumps(value).encode())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" " * (ENVIRONMENT_BYTES + 1), f"is larger than {ENVIRONMENT_BYTES} bytes"),
        (b'{"torch": NaN}', "is no JSON object"),
        (b'{"torch": 1e999}', "is no JSON object"),
        (b'{"torch": "\xff"}', "is no JSON object"),
        (b'{"torch": ' + b"[" * 100_000, "is no JSON object"),
    ],
    ids=["large", "NaN", "infinite", "no UTF-8", "deep"],
)
def test_an_environment_that_is_too_large_or_no_strict_json_is_refused(folder, content, message):
    use(folder, RECORDS, content)
    for act in (ea.read, lambda out: prepare(find("bench"), {}, out=out, resume=True)):
        with pytest.raises(DataError, match=f"environment.json {message}"):
            act(folder)
