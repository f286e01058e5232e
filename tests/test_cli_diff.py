"""`efficient-attn diff`: what it prints, with which code it ends, and what it does with damaged files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_attn.measure.record import replace

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.records import line
from efficient_attn_cli.main import main

STORED = Path(__file__).parent / "fixtures" / "run"
HOSTILE = "[red]<script>\x1b[2J|\u202e\n=cmd()"
WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from efficient_attn_cli.main import main; main(sys.argv[1:])"
)


def case(number=0, kind="time", label="exact"):
    about = {"num_heads": 8, "head_dim": 64, "tokens": 16 + number, "dtype": "float32", "device": "cpu"}
    return Case(kind=kind, backend=label, label=label, threads=2, **about)


def timed(number=0, factor=1.0, label="exact"):
    times_s = tuple(1e-3 * factor * (1 + 0.01 * (call % 7)) for call in range(20))
    return Record(case=case(number, label=label), times_s=times_s, round_sizes=(5,) * 4)


def memory(peak_bytes):
    return Record(case=case(kind="memory"), peak_bytes=peak_bytes, memory_method="profiler")


def write(folder, records, environment=None):
    folder.mkdir()
    (folder / "records.jsonl").write_text("".join(f"{line(record)}\n" for record in records))
    if environment:
        (folder / "environment.json").write_text(json.dumps(environment))
    return str(folder)


def ends_with(*words):
    with pytest.raises(SystemExit) as ending:
        main(["diff", *map(str, words)])
    return ending.value.code


@pytest.fixture
def runs(tmp_path):
    old = write(tmp_path / "old", [timed(), timed(1), memory(1000)])
    return old, write(tmp_path / "new", [timed(), timed(1, factor=1.5), memory(1000)])


def test_a_regression_ends_with_1_and_is_shown(runs, capsys):
    assert ends_with(*runs) == 1
    shown = capsys.readouterr().out
    assert "Of 3 comparisons: 1 regression, 2 unchanged." in shown
    (row,) = [text for text in shown.splitlines() if "time_s" in text]
    assert row.split()[:4] == ["exact", "17", "time_s", "regression"] and "1.5" in row


def test_equal_runs_and_improvements_end_with_0(runs):
    assert ends_with(runs[0], runs[0]) == 0
    assert ends_with(*reversed(runs)) == 0


def test_only_what_was_named_ends_with_1(runs):
    assert ends_with(*runs, "--fail-on", "time:10%") == 1
    assert ends_with(*runs, "--fail-on", "time:60%, memory:0") == 0
    assert ends_with(*runs, "--fail-on", "memory:0%") == 0


@pytest.fixture
def unclear(tmp_path):
    folders = []
    for name, times_s in (("once", (1e-3, 1e-3, 1e-3, 2e-3)), ("again", (1e-3, 2e-3, 2e-3, 2e-3))):
        folders.append(write(tmp_path / name, [replace(timed(), times_s=times_s, round_sizes=(1,) * 4)]))
    return folders


def test_unclear_times_need_more_rounds_by_a_sentence(unclear, capsys):
    assert ends_with(*unclear) == 0
    assert "1 unclear.\nUnclear times may be chance; more --rounds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ("unclear", 1),
        ("time:10%, unclear", 1),
        ("time:10%", 0),
        ("memory:0,unclear", 0),
        ("unclear,time:1", 0),
    ],
)
def test_unclear_changes_end_with_1_where_they_are_named(unclear, limits, code):
    assert ends_with(*unclear, "--fail-on", limits) == code


def test_a_pull_request_gets_verdict_and_changes_as_markdown(tmp_path, unclear, capsys):
    old = write(tmp_path / "old", [timed(n) for n in range(60)] + [memory(1000)])
    new = write(tmp_path / "slow", [timed(n, 1.5) for n in range(60)] + [memory(1)])
    assert ends_with(old, new, "--markdown", "--fail-on", "time:7%") == 1
    shown = capsys.readouterr().out
    assert shown.startswith("**60 of 61 comparisons failed.**\n\n**Changes**\n")
    rows = [text for text in shown.splitlines() if text.startswith("| exact |")]
    assert len(rows) == 40 and "And 21 more." in shown
    assert "60 regression, 1 improvement." in shown
    assert ends_with(old, old, "--markdown") == 0
    assert capsys.readouterr().out.startswith(
        "**None of 61 comparisons failed.**\n\nOf 61 comparisons: 61 unchanged."
    )
    assert ends_with(*unclear, "--markdown", "--fail-on", "unclear") == 1
    assert capsys.readouterr().out.startswith("**1 of 1 comparisons failed.**")


def test_hostile_names_are_harmless_in_markdown(tmp_path, capsys):
    old = write(tmp_path / "old", [timed(label=HOSTILE)])
    assert ends_with(old, write(tmp_path / "new", [timed(factor=2, label=HOSTILE)]), "--markdown") == 1
    shown = capsys.readouterr().out
    assert r"\[red\]\<script\>" in shown and not {"\x1b", "\u202e", "\r"} & set(shown)


def test_several_runs_on_each_side_stand_before_and_behind_two_dashes(runs, tmp_path, capsys):
    others = [write(tmp_path / name, [timed(), timed(1, factor=1.01), memory(1000)]) for name in ("b", "c")]
    assert ends_with(runs[0], *others, "--", runs[1], runs[1], "--fail-on", "memory:0") == 0
    shown = capsys.readouterr().out
    assert "is the run: 3 old, 2 new." in shown and "Of 3 comparisons:" in shown
    # One run on a side, written either way, is the same.
    assert ends_with(runs[0], "--", runs[1]) == ends_with(*runs) == 1


@pytest.mark.parametrize(
    "words", [("a",), ("a", "b", "c"), ("a", "--"), ("--", "a"), ("a", "--", "b", "--", "c")]
)
def test_runs_that_are_of_no_side_are_refused_in_one_line(words, capsys):
    assert ends_with(*words) == 2
    told = capsys.readouterr().err
    assert "write OLD NEW, or several on a side, OLD OLD -- NEW NEW" in told and len(told.splitlines()) == 1


def test_quantities_of_every_study_are_names_of_fail_on(tmp_path):
    folders = []
    for name, accuracy in (("old", 0.99), ("new", 0.1)):
        record = Record(case=case(kind="recall"), accuracy=accuracy, answers=2048)
        folders.append(write(tmp_path / name, [record]))
    assert ends_with(*folders) == 1
    assert ends_with(*folders, "--fail-on", "accuracy:5%") == 1
    assert ends_with(*folders, "--fail-on", "recall:5%") == 1
    assert ends_with(*folders, "--fail-on", "perplexity:5%,time:5%") == 0


def test_runs_without_a_common_case_end_with_4(runs, tmp_path, capsys):
    assert ends_with(runs[0], write(tmp_path / "other", [timed(9)])) == 4
    shown = capsys.readouterr()
    assert "no case is in both runs" in shown.err and "Only in the new run (1)" in shown.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fail-on", "time"], "write names with shares, such as time:10%"),
        (["--fail-on", "time:"], "write names with shares"),
        (["--fail-on", "time:-1%"], "time is a share from 0 on"),
        (["--fail-on", "time:nan"], "time is a share from 0 on"),
        (["--fail-on", "unclear:3%"], "No quantity is called 'unclear'"),
        (["--markdown", "--json", "-"], "--json and --markdown exclude each other"),
        (["--fail-on", "speed:3%"], "No quantity is called 'speed'"),
        (["--fail-on", "acuracy:3%"], "Did you mean 'accuracy'?"),
        (["--json", "x"], "--json takes - for stdout"),
    ],
)
def test_a_wrong_request_ends_in_one_line(runs, words, message, capsys):
    assert ends_with(*runs, *words) == 2
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 1


def test_json_makes_stdout_one_document(runs, capsys):
    assert ends_with(*runs, "--json", "-") == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["tokens"] for one in found["regressions"]] == [17] and len(found["changes"]) == 3


def test_another_machine_is_said_above_the_table(tmp_path, capsys):
    old = write(tmp_path / "old", [timed()], {"processor": "A"})
    assert ends_with(old, write(tmp_path / "new", [timed()], {"processor": HOSTILE})) == 0
    assert capsys.readouterr().out.startswith("ANOTHER MACHINE: processor was A, is [red]<script> [2J|")


def test_hostile_names_are_printed_harmlessly(tmp_path, capsys):
    old = write(tmp_path / "old", [timed(label=HOSTILE), timed(1, label=HOSTILE)])
    broken = replace(timed(label=HOSTILE), status="crash", reason=HOSTILE, times_s=None)
    assert ends_with(old, write(tmp_path / "new", [broken, timed(2, label=HOSTILE)])) == 1
    shown = capsys.readouterr().out
    assert "[red]<script>" in shown and not {"\x1b", "\u202e", "\r"} & set(shown)


def test_stored_files_are_compared(capsys):
    assert ends_with(STORED, STORED) == 0
    assert "unchanged." in capsys.readouterr().out


WHOLE = "".join(f"{line(record)}\n" for record in (timed(), memory(1000))).encode()


def survives(folder, data):
    """Compare a whole run with damaged bytes: a verdict, or one line."""
    (folder / "old.jsonl").write_bytes(WHOLE)
    (folder / "new.jsonl").write_bytes(data)
    assert ends_with(folder / "old.jsonl", folder / "new.jsonl") in (0, 1, 2, 4)


def test_a_file_cut_off_at_any_byte_is_compared_or_refused_in_one_line(tmp_path, capsys):
    for length in range(0, len(WHOLE), 17):
        survives(tmp_path, WHOLE[:length])
        told = capsys.readouterr().err
        assert len(told.splitlines()) <= 1 and "Traceback" not in told


@settings(max_examples=40, deadline=None)
@given(
    place=st.integers(0, len(WHOLE) - 1),
    length=st.integers(0, 30),
    data=st.binary(max_size=30) | st.just(b"9" * 400),
)
def test_damaged_bytes_end_in_a_verdict_or_in_one_line(tmp_path_factory, place, length, data):
    survives(tmp_path_factory.mktemp("damaged"), WHOLE[:place] + data + WHOLE[place + length :])


def test_a_thousand_records_are_compared_without_torch(tmp_path):
    folders = []
    for name, factor in (("old", 1.0), ("new", 1.2)):
        folders.append(write(tmp_path / name, [timed(number, factor) for number in range(1000)]))
    command = [sys.executable, "-c", WITHOUT_TORCH, "diff", *folders]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert child.returncode == 1, child.stderr
    assert "Of 1000 comparisons: 1000 regression." in child.stdout
