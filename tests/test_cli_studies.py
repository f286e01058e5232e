"""Commands of `bench`, `mse` and `recall`: what they print, write, refuse, and with which code they end."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from efficient_attn.errors import AttentionError
from efficient_attn.measure.record import Record
from efficient_attn.studies.recall import measure as recall_training
from efficient_attn.studies.results import read
from efficient_attn_cli.main import main

pytestmark = pytest.mark.usefixtures("hasty", "unisolated")

SMALL = [
    *("bench", "--seq-len", "16,32", "--num-heads", "2", "--head-dim", "8"),
    *("--budget", "1h", "--no-error"),
]
ON_INPUTS = ["bench", "--inputs", "encoder", "--seq-len", "24", "--rounds", "1"]
MSE = [
    *("mse", "--inputs", "gaussian", "--seeds", "1", "--seq-len", "24"),
    *("--head-dim", "4", "--size", "4,8", "--norm", "0.5"),
]
RECALL = [
    *("recall", "--pairs", "8", "--classes", "4", "--queries", "4", "--gap", "4"),
    *("--steps", "1", "--seeds", "1", "--size", "4", "--head-dim", "8"),
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
    (tmp_path / "bad.safetensors").write_bytes(b"no safetensors")
    return tmp_path


def command(*words):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    return exit_.value.code


def written(name):
    """A file of the folder `out`."""
    return Path("out", name).read_text()


RUNS = [
    (
        [*SMALL, "--backend", "window,exact-dense"],
        ["Time per call, ms", "Peak memory of a call, MiB"],
        {"command.txt", "environment.json", "time.png", "memory.svg"},
    ),
    (
        [*ON_INPUTS, "--backend", "linformer,own.py:mean", "--set", "linformer.rank=9"],
        ["at 24 tokens (encoder, layers 0, 1, 5)", " linformer(rank=9) ", " own.py:mean "],
        {"comparison.png", "report.html"},
    ),
    (
        [*MSE, "--draws", "2", "--norm", "0.5,1"],
        ["gaussian, norm 0.5; 24 tokens, 1 head of 4", " uniform attention ", "Below uniform attention on"],
        {"error.png", "error.svg"},
    ),
    (
        [*RECALL, "--backend", "performer-positive"],
        ["exact attention is right in", " window(window=9) ", " performer-positive(num_features=4) "],
        {"recall.png"},
    ),
]


@pytest.mark.parametrize(("words", "texts", "names"), RUNS, ids=["bench", "inputs", "mse", "recall"])
def test_a_run_prints_tables_and_sentences_and_last_the_folder_of_its_files(
    words, texts, names, folder, capsys
):
    assert command(*words) == 0
    out, err = capsys.readouterr()
    last, shown = folder / out.splitlines()[-1], " ".join(out.split())
    assert all(" ".join(text.split()) in shown for text in texts)
    assert last.parent.name == "runs" and last.name.startswith(f"{words[0]}-")
    assert {"records.jsonl", "summary.csv", *names} <= {path.name for path in last.iterdir()}
    assert "left" in err and "\x1b" not in out + err


def test_errors_and_their_limit_are_in_the_json(undrawn, capsys):
    asked = ["--backend", "own.py:mean", "--max-error", "0.2", "--out", "out", "--json", "-"]
    assert command(*ON_INPUTS, *asked) == 0
    document = json.loads(capsys.readouterr().out)
    layers = {f"encoder(layer={layer})" for layer in (0, 1, 5)}
    assert {record["inputs"] for record in document["records"]} == {"encoder(layers=0,1,5)", *layers}
    assert document["environment"]["max_error"] == 0.2 and "within 20 %" in document["sentences"][0]


def test_a_function_in_a_file_has_the_error_of_what_it_computes(undrawn, capsys):
    assert command(*MSE, "--backend", "own.py:mean", "--json", "-") == 0
    records = json.loads(capsys.readouterr().out)["records"]
    baseline, own = (records[i]["output_relative_error"] for i in (0, -1))
    # The same mean, once in float64 and once in float32.
    assert own == pytest.approx(baseline, rel=1e-5)


def test_set_is_an_option_of_every_variant(undrawn):
    assert command(*MSE, "--backend", "linformer", "--set", "linformer.init=gaussian", "--out", "out") == 0
    labels = [json.loads(line)["label"] for line in written("records.jsonl").splitlines()]
    assert labels[-2:] == [f"linformer(init=gaussian, rank={rank})" for rank in (4, 8)]


@pytest.mark.parametrize(("words", "code"), [([], 0), (["--backend", "linformer"], 3)])
def test_recall_ends_with_a_code_for_what_failed(words, code, undrawn, monkeypatch):
    def measure(case, target, course):
        if case.backend == "linformer" and case.causal:
            return Record(case=case, status="unsupported", reason="it cannot be causal")
        return Record(case=case, accuracy=0.5, answers=8, chance=0.25, times_s=(0.001,))

    monkeypatch.setattr(recall_training, "measure", measure)
    assert command(*RECALL, "--causal", *words) == code


@pytest.mark.parametrize("isolate", ["none", pytest.param("reuse", marks=pytest.mark.slow)])
def test_what_a_backend_prints_stays_out_of_the_results(undrawn, isolate, capfd, monkeypatch):
    monkeypatch.setattr("efficient_attn.measure.isolation.DEFAULT_ISOLATION", isolate)
    assert command(*SMALL, "--backend", "own.py:talkative", "--json", "-") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["records"] and "hello" in err


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


# Refusals of text; those of values are in test_bad_input.py.
WRONG = [
    ("bench --seq-len 256:128:x2", "--seq-len 256:128:x2 never grows"),
    ("bench --seq-len 256 512", "Values are joined by commas, as in --backend a,b; '512' stands alone"),
    ("bench --backend nowhere.py:f", "nowhere.py"),
    ("bench --set window.window=4", "window"),
    ("bench --set performer-trig.num_features=many", "num_features=many: num_features is a whole"),
    ("bench --num-heads 4,x", "--num-heads"),
    ("bench --num-heads 0", "--num-heads"),
    ("bench --head-dim x", "--head-dim"),
    ("bench --rounds 0", "--rounds"),
    ("bench --timeout never", "--timeout is a duration"),
    ("bench --max-error little", "--max-error"),
    ("bench --inputs own.py", "is not a valid safetensors file"),
    ("mse --size many", "--size cannot be 'many'"),
    ("mse --size 0", "--size cannot be '0'"),
    ("mse --norm 0", "--norm is made of finite numbers above 0, such as 0.5,1, not '0'"),
    ("mse --norm small", "--norm is made of finite numbers above 0, such as 0.5,1, not 'small'"),
    ("mse --norm inf", "--norm is made of finite numbers above 0, such as 0.5,1, not 'inf'"),
    ("mse --layers first", "--layers is made of whole numbers, such as 0,1,5, not 'first'"),
    ("mse --inputs images", "inputs cannot be 'images': there is no such file."),
    ("mse --inputs ,", "',' names nothing"),
    ("mse --inputs bad.safetensors", "bad.safetensors is not a valid safetensors file: it has no header."),
    ("mse --backend rff", "Here it is 'performer-trig'."),
    ("mse --set linformer.ranks=4", "Did you mean 'rank'?"),
    ("recall --steps many", "'--steps': Input should be a valid integer"),
    ("recall --pairs 9", "pairs=9 is no multiple of classes=16"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[words for words, _ in WRONG])
def test_a_wrong_request_ends_in_one_line_before_anything_is_measured(words, message, capsys, monkeypatch):
    monkeypatch.setattr("efficient_attn.studies.run.Engine", lambda *args, **named: pytest.fail("measured"))
    assert command(*words.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and message in err
    assert not Path("runs").exists()


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
