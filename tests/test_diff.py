"""The study and the command `diff`: quantities, machines, kernels, thresholds, exit codes and refusals."""

import json
import subprocess
import sys

import numpy as np
import pytest
from made_records import case, folder, timed

import efficient_attn as ea
from efficient_attn.measure.quantities import CONDITIONS, FIELDS, KINDS, QUANTITIES
from efficient_attn.measure.record import Case, Record, line, replace
from efficient_attn.studies import studies

studies()

# A kind of record that holds a quantity; all others are held by records of errors.
KIND_OF = {"time_s": "time", "device_time_s": "time", "accuracy": "recall"}
NOISE = np.exp(0.01 * np.random.default_rng(0).standard_normal((2, 16)))
MEMORY = Record(case=case("memory", "b", 64), peak_bytes=1000)
ONE_TIME = timed("b", 64, [1e-3] * 4)


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
    assert set(FIELDS) == compared | set(CONDITIONS)
    # No field is compared and excused, and no field is part of the case.
    assert not compared & {*CONDITIONS} and not FIELDS.keys() & {*Case.__struct_fields__, "status", "reason"}
    assert not {*QUANTITIES, *CONDITIONS} & set(KINDS)


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


GPU = {"name": "G", "memory_bytes": 2**30}
TORCH = {"version": "2.9"}


@pytest.mark.parametrize(
    ("old", "new", "warnings"),
    [
        (
            {"processor": "A", "python": "3.11"},
            {"processor": "B", "python": "3.12"},
            ["ANOTHER MACHINE: processor was A, is B.", "python was 3.11, is 3.12"],
        ),
        (
            {"gpu": {**GPU, "driver_version": "570"}, "torch": TORCH},
            {"gpu": {**GPU, "driver_version": "580"}, "torch": TORCH},
            ["Other surroundings: gpu.driver_version was 570, is 580."],
        ),
    ],
)
def test_a_change_of_machine_or_software_is_said(old, new, warnings):
    said = ea.diff(results(**old), results(**new)).warnings
    assert len(said) == len(warnings)
    assert all(part in text for part, text in zip(warnings, said, strict=True))


HOSTILE = "[red]<script>\x1b[2J|\u202e\n=cmd()"
WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from efficient_attn_cli.main import main; main(sys.argv[1:])"
)


def calls(tokens=16, factor=1.0, label="exact"):
    times_s = tuple(1e-3 * factor * (1 + 0.01 * (call % 7)) for call in range(20))
    return Record(case=case("time", label, tokens), times_s=times_s, round_sizes=(5,) * 4)


def ends_with(*words):
    main = pytest.importorskip("efficient_attn_cli.main", reason="needs an installation").main
    with pytest.raises(SystemExit) as ending:
        main(["diff", *map(str, words)])
    return ending.value.code


@pytest.fixture
def runs(tmp_path):
    """Folders by name: `new` is slower than `old` at 17 tokens, `again` differs from `once` by chance."""
    times_s = {"once": (1e-3, 1e-3, 1e-3, 2e-3), "again": (1e-3, 2e-3, 2e-3, 2e-3)}
    records = {
        "old": [calls(), calls(17), MEMORY],
        "new": [calls(), calls(17, factor=1.5), MEMORY],
        **{name: [timed("exact", 16, samples)] for name, samples in times_s.items()},
    }
    return {name: folder(tmp_path / name, group) for name, group in records.items()}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("old new", 1),
        ("new old", 0),
        ("old new --fail-on time:10%", 1),
        ("old new --fail-on time:60%,memory:0", 0),
        ("once again --fail-on time:10%", 0),
    ],
)
def test_only_what_was_named_ends_with_1(words, code, runs):
    assert ends_with(*(runs.get(word, word) for word in words.split())) == code


def test_a_regression_is_shown_and_json_makes_stdout_one_document(runs, capsys):
    assert ends_with(runs["old"], runs["new"]) == 1
    shown = capsys.readouterr().out
    assert "Of 3 comparisons: 1 regression, 2 unchanged." in shown
    (row,) = [text for text in shown.splitlines() if "time_s" in text]
    assert row.split()[:4] == ["exact", "17", "time_s", "regression"] and "1.5" in row
    assert ends_with(runs["old"], runs["new"], "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["tokens"] for one in found["regressions"]] == [17] and len(found["changes"]) == 3
    assert ends_with(runs["once"], runs["again"]) == 0
    assert (
        "1 no evidence of change.\nTimes within their 95 % interval may be chance." in capsys.readouterr().out
    )


def test_hostile_names_are_printed_harmlessly(tmp_path, capsys):
    old = folder(tmp_path / "old", [calls(label=HOSTILE), calls(17, label=HOSTILE)], {"processor": "A"})
    broken = replace(calls(label=HOSTILE), status="crash", reason=HOSTILE, times_s=None)
    records = [broken, calls(17, 2, label=HOSTILE), calls(18, label=HOSTILE)]
    assert ends_with(old, folder(tmp_path / "new", records, {"processor": HOSTILE})) == 1
    shown = capsys.readouterr().out
    assert "[red]<script>" in shown and not {"\x1b", "\u202e", "\r"} & set(shown)
    assert shown.startswith("ANOTHER MACHINE: processor was A, is [red]<script> [2J|")


def test_runs_without_a_common_case_end_with_4(runs, tmp_path, capsys):
    assert ends_with(runs["old"], folder(tmp_path / "other", [calls(9)])) == 4
    shown = capsys.readouterr()
    assert "no case is in both runs" in shown.err and "Only in the new run (1)" in shown.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("old", "Missing argument 'NEW'"),
        ("old new new", "unexpected extra argument"),
        ("old nowhere", "Cannot read records"),
        ("old new --fail-on time", "write names with shares, such as time:10%"),
        ("old new --fail-on time:-1%", "time is a share from 0 on"),
        ("old new --fail-on acuracy:3%", "Did you mean 'accuracy'?"),
    ],
)
def test_a_wrong_request_ends_in_one_line(words, message, runs, capsys):
    assert ends_with(*(runs.get(word, word) for word in words.split())) == 2
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 1


def test_runs_are_compared_without_torch(tmp_path):
    pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
    for name, factor in (("old", 1.0), ("new", 1.2)):
        records = [calls(number, factor) for number in range(1, 51)]
        (tmp_path / name).write_text("".join(f"{line(record)}\n" for record in records))
    command = [sys.executable, "-c", WITHOUT_TORCH, "diff", "old", "new"]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert child.returncode == 1, child.stderr
    assert "Of 50 comparisons: 50 regression." in child.stdout
