"""`efficient-attn bench`: what it prints, writes, refuses, and with which code it ends."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from efficient_attn.errors import AttentionError
from efficient_attn.studies.results import read
from efficient_attn_cli.main import main

pytestmark = pytest.mark.usefixtures("hasty", "unisolated")

SMALL = [
    *("bench", "--seq-len", "16,32", "--num-heads", "2", "--head-dim", "8", "--budget", "1h"),
    "--no-error",
]
OWN = """
def mean(q, k, v):
    return v.mean(dim=-2, keepdim=True).expand_as(v).contiguous()


def broken(q, k, v):
    raise RuntimeError("it broke here")


def talkative(q, k, v):
    print("hello")
    return v.clone()


def impatient(q, k, v):
    import os, signal, time

    # Somebody presses Ctrl-C while another process measures.
    if q.shape[-2] > 16:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    return v.clone()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def command(*words):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    return exit_.value.code


def written(name):
    """A file of the folder `out`."""
    return Path("out", name).read_text()


def test_bench_prints_tables_and_sentences_and_last_the_folder_of_its_files(folder, capsys):
    assert command(*SMALL, "--backend", "window,exact-dense") == 0
    out, err = capsys.readouterr()
    assert "Time per call, ms" in out and "Peak memory of a call, MiB" in out
    last = folder / out.splitlines()[-1]
    assert last.parent.name == "runs" and last.name.startswith("bench-")
    names = {"records.jsonl", "environment.json", "command.txt", "summary.csv", "time.png", "memory.svg"}
    assert names <= {path.name for path in last.iterdir()}
    assert "[12/12]" in err and "left" in err and "\x1b" not in out + err


@pytest.mark.parametrize("isolate", ["none", pytest.param("reuse", marks=pytest.mark.slow)])
def test_what_a_backend_prints_stays_out_of_the_results(undrawn, isolate, capfd, monkeypatch):
    monkeypatch.setattr("efficient_attn.measure.isolation.DEFAULT_ISOLATION", isolate)
    assert command(*SMALL, "--backend", "own.py:talkative", "--json", "-") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["records"] and "hello" in err


def test_a_function_in_a_file_is_benched_with_one_command(undrawn, capsys):
    assert command(*SMALL, "--backend", "own.py:mean", "--out", "out") == 0
    assert "own.py:mean" in capsys.readouterr().out


def test_a_dry_run_prints_the_plan_and_runs_nothing(folder, capsys, monkeypatch):
    monkeypatch.setattr("efficient_attn.studies.workload.available_bytes", lambda device: 2**30)
    dense = ("--backend", "own.py:impatient,exact-dense")
    assert command("bench", "--dry-run", "--seq-len", "16,64k", *dense) == 0
    out = capsys.readouterr().out
    assert "nothing was run" in out and "needs about 256 GiB, the limit is 717 MiB" in out
    assert not (folder / "runs").exists()


def test_a_point_asked_for_by_name_that_fails_ends_with_3_and_the_others_are_there(undrawn, capsys):
    assert command(*SMALL, "--backend", "own.py:broken,window", "--out", "out") == 3
    out = capsys.readouterr().out
    assert "own.py:broken: error: RuntimeError: it broke here" in out
    statuses = [record.status for record in read("out").records]
    assert statuses.count("error") == 4 and statuses.count("ok") == 8


@pytest.mark.slow
def test_refusals_of_a_default_selection_are_no_failure_but_one_asked_for_is(undrawn, capsys):
    assert command(*SMALL, "--causal", "--set", "linformer.rank=8") == 0
    assert "cannot be causal" in capsys.readouterr().out
    assert command(*SMALL, "--causal", "--backend", "linformer,window") == 3


@pytest.mark.slow
def test_an_interruption_keeps_what_was_measured_and_ends_with_130(undrawn, capsys, monkeypatch):
    # A process of its own measures, so that its parent is this one and not whoever started the tests.
    monkeypatch.setattr("efficient_attn.measure.isolation.DEFAULT_ISOLATION", "reuse")
    assert command(*SMALL, "--backend", "exact,own.py:impatient", "--out", "out") == 130
    lengths = [json.loads(line)["tokens"] for line in written("records.jsonl").splitlines()]
    # Two backends, time and memory, at the length before the interruption.
    assert lengths.count(16) == 4
    assert capsys.readouterr().out.splitlines()[-1] == "out"


WRONG = [
    (["--seq-len", "256:128:x2"], "--seq-len 256:128:x2 never grows"),
    (["--seq-len", "256", "512"], "Values are joined by commas, as in --backend a,b; '512' stands alone"),
    (["--backend", "nowhere.py:f"], "nowhere.py"),
    (["--set", "window.window=4"], "window"),
    (
        ["--set", "performer-trig.num_features=many"],
        "--set performer-trig.num_features=many: num_features is a whole",
    ),
    (["--of", "encode"], "of is attention, block, encoder, not 'encode'"),
    (["--num-heads", "4,x"], "--num-heads"),
    (["--backend", "attention := v", "--of", "block"], "'attention := v' is not a backend"),
    (["--num-heads", "0"], "--num-heads"),
    (["--head-dim", "x"], "--head-dim"),
    (["--rounds", "0"], "--rounds"),
    (["--timeout", "never"], "--timeout is a duration"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_a_wrong_request_ends_in_one_line_before_anything_is_measured(words, message, capsys, monkeypatch):
    monkeypatch.setattr("efficient_attn.studies.run.Engine", lambda *args, **named: pytest.fail("measured"))
    assert command("bench", *words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and message in err


def test_the_command_that_ran_is_written_down(undrawn, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/efficient-attn", *SMALL, "--out", "out"])
    assert command(*SMALL, "--backend", "own.py:mean", "--out", "out") == 0
    assert written("command.txt") == f"efficient-attn {' '.join(SMALL)} --out out\n"


def test_errors_of_the_library_all_end_the_same_way(monkeypatch, capsys):
    def refuse(workload, **more):
        raise AttentionError("two\nlines")

    monkeypatch.setattr("efficient_attn.studies.workload.settle", refuse)
    assert command("bench") == 2
    assert capsys.readouterr().err == "error: two lines\n"


def test_a_run_goes_on_in_its_folder(undrawn, capsys):
    assert command(*SMALL, "--backend", "own.py:mean", "--out", "out") == 0
    first = written("records.jsonl")
    longer = [*SMALL, "--seq-len", "16,32,48", "--backend", "own.py:mean", "--out", "out"]
    assert command(*longer) == 2 and "--out: out holds records of another run" in capsys.readouterr().err
    assert command(*longer, "--resume") == 0
    assert written("records.jsonl").startswith(first) and "[4/4]" in capsys.readouterr().err
    assert len(read("out").records) == 12
