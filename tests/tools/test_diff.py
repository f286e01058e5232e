"""The study and the command `diff`: quantities, machines, kernels, thresholds, exit codes and refusals."""

import json

import numpy as np
import pytest
from synthetic_records import case, folder, timed

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from command_line import command

import efficient_attn as ea
from efficient_attn.measure.record import Case
from efficient_attn.runs.registry import any_record, studies

Record = any_record()
QUANTITIES = {name: quantity for name, quantity in Record.quantities().items() if quantity.compared}

# A kind of record that holds a quantity; all others are held by records of errors.
KIND_OF = {"time_s": "time", "device_time_s": "time", "accuracy": "recall"}
NOISE = np.exp(0.01 * np.random.default_rng(0).standard_normal((2, 16)))
MEMORY = Record(case=case("memory", "b", 64), peak_bytes=1000)


def results(*records, **environment):
    return ea.Results(records, environment=environment)


def measured(quantity, value, noise):
    """Records of a run in which a quantity is about `value`, with repetitions where it has any."""
    kind, whole = KIND_OF.get(quantity.name, "error"), quantity.name in ("texts", "answers")

    def record(seed=0, **fields):
        return Record(case=case(kind, "b", 64, seed=seed), **fields)

    if quantity.scatter == "rounds":
        return [record(**{quantity.samples: tuple(value * noise)}, round_sizes=(4,) * 4)]
    if quantity.scatter == "seeds":
        return [record(seed, **{quantity.field: value * noise[seed]}) for seed in range(4)]
    if quantity.type == "text":
        return [record(**{quantity.field: f"about {value}"})]
    value = round(value) if whole else value
    fields = {quantity.field: value}
    if quantity.samples:
        fields[quantity.samples] = tuple(value * noise)
    return [record(**fields)]


def test_every_field_of_a_record_is_compared_or_says_its_part_in_the_comparison():
    quantities = QUANTITIES.values()
    compared = {quantity.field for quantity in quantities} | {q.samples for q in quantities} - {None}
    conditions = {f.name for x in Record.quantities().values() if not x.compared for f in x.fields}
    assert set(Record.fields()) == compared | conditions
    # No field is compared and excused, and no field is part of the case.
    assert not compared & conditions
    assert not Record.fields().keys() & {*Case.__struct_fields__, "status", "reason"}
    assert not {*Record.quantities()} & {kind for study in studies().values() for kind in study.kinds}


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_worse_number_of_every_quantity_is_a_regression_by_its_own_threshold_and_by_its_kind(name):
    quantity = QUANTITIES[name]
    small, large = (measured(quantity, value, noise) for value, noise in zip((2.0, 4.0), NOISE, strict=True))
    old, new = (small, large) if quantity.better != "more" else (large, small)
    sides = results(*old), results(*new)
    assert [change.quantity for change in ea.diff(*sides, fail_on={name: 0.1}).regressions] == [name]
    back = ea.diff(*sides[::-1], fail_on={name: 0.1})
    verdicts = {change.quantity: change.verdict for change in back.comparison.changes}
    if quantity.better is None:
        assert verdicts[name] == "changed"
    else:
        assert verdicts[name] == "improvement" and not back.regressions
        for fail_on in (None, {old[0].case.kind: 0.1}):
            regressions = ea.diff(*sides, fail_on=fail_on).regressions
            assert name in [change.quantity for change in regressions]
    assert not ea.diff(sides[0], sides[0], fail_on={name: 0.1}).regressions


def test_a_change_of_machine_or_software_is_said():
    old, new = results(processor="A", python="3.11"), results(processor="B", python="3.12")
    machine, software = ea.diff(old, new).warnings
    assert "ANOTHER MACHINE: processor was A, is B." in machine and "python was 3.11, is 3.12" in software
    old, new = (results(gpu={"name": "G", "driver_version": version}) for version in ("570", "580"))
    (driver,) = ea.diff(old, new).warnings
    assert "Different software or environment: gpu.driver_version was 570, is 580." in driver


def test_code_of_a_file_that_changed_is_named():
    old, new = (results(code={"own.py:attend": digest, "own.py:same": "c"}) for digest in "ab")
    assert ea.diff(old, new).warnings == ["The code of own.py:attend changed between the runs."]
    assert ea.diff(old, results(code={"own.py:same": "c"})).warnings == ea.diff(old, old).warnings == []


def test_settings_that_all_cases_share_and_that_differ_are_one_sentence_in_place_of_the_cases():
    old, new = (
        results(*(Record(case=case("memory", "b", 64, seed=seed, **settings)) for seed in range(2)))
        for settings in ({"threads": 2}, {"threads": 1, "dtype": "float16"})
    )
    (sentence,) = ea.diff(old, new).sentences()
    assert sentence.startswith("Threads were 2, are 1; dtype was float32, is float16. The runs therefore")
    assert "Only in the new run (2)" in ea.diff(old, results(*old.records, *new.records)).sentences()[-1]


def calls(tokens=16, factor=1.0):
    return timed("exact", tokens, [1e-3 * factor * (1 + 0.01 * (call % 7)) for call in range(20)])


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """Folders: `new` is slower than `old` at 17 tokens, `again` differs from `once` by chance."""
    records = {
        "old": [calls(), calls(17), MEMORY],
        "new": [calls(), calls(17, factor=1.5), MEMORY],
        "once": [timed("exact", 16, (1e-3, 1e-3, 1e-3, 2e-3))],
        "again": [timed("exact", 16, (1e-3, 2e-3, 2e-3, 2e-3))],
        "other": [calls(9)],
    }
    for name, group in records.items():
        folder(tmp_path / name, group)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("new old", 0),
        ("old new --fail-on time:10%", 1),
        ("old new --fail-on time:60%,memory:0", 0),
        ("once again --fail-on time:10%", 0),
    ],
)
def test_only_what_was_named_ends_with_1(words, code):
    assert command("diff", *words.split())[0] == code


def test_a_regression_is_shown_and_json_makes_stdout_one_document():
    code, shown, _ = command("diff", "old", "new")
    assert code == 1 and "3 comparisons: 1 regression, 2 unchanged." in shown
    (row,) = [text for text in shown.splitlines() if "time_s" in text]
    assert row.split()[:4] == ["regression", "exact", "17", "time_s"] and "1.5" in row
    code, shown, _ = command("diff", "old", "new", "--json")
    found = json.loads(shown)
    assert code == 1 and [one["tokens"] for one in found["regressions"]] == [17]
    assert len(found["changes"]) == 3
    chance = "1 no evidence of change.\nSome times differ within their 95 % interval."
    assert chance in command("diff", "once", "again")[1]


def test_runs_without_a_common_case_end_with_4():
    code, out, err = command("diff", "old", "other")
    assert code == 4 and "no case in common" in err and "Only in the new run (1)" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("old nowhere", "Cannot read records"),
        ("old new --fail-on time", "write names with shares, such as time:10%"),
        ("old new --fail-on time:-1%", "time is a share from 0 on"),
        ("old new --fail-on acuracy:3%", "Did you mean 'accuracy'?"),
    ],
)
def test_a_wrong_request_ends_in_one_line(words, message):
    code, out, err = command("diff", *words.split())
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1
