"""Training in several processes: gradients of the whole batch, files of the first process, refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import efficient_attn as ea
from efficient_attn.studies.train.replicas import Replicas, replicas
from efficient_attn.studies.train.tasks import IGNORED, Batch

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMAND = ["--no-python", str(Path(sys.executable).with_name("efficient-attn"))]


def started(*words, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*TORCHRUN, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_gradients_and_losses_are_those_of_the_whole_batch(tmp_path):
    done = started(str(Path(__file__).with_name("ranks_trained.py")), cwd=tmp_path)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len({line["of"] for line in lines}) == 4 and len(lines) == 16, done.stderr
    assert [line for line in lines if not line["gradient"] <= 2e-6] == []
    assert [line for line in lines if line["losses"][0] != pytest.approx(line["losses"][1], rel=2e-6)] == []


SIZES = {"seq_len": 16, "batch": 2, "every": 2, "windows": 2, "model_dim": 16}


@pytest.mark.slow
def test_the_first_process_alone_writes_and_prints_and_a_run_is_continued(tmp_path):
    sizes = [word for name, size in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    words = ["train", "--backend", "exact", "--layers", "1", "--threads", "1", *sizes, "--out", "run"]
    for more in (["--steps", "2"], ["--steps", "4", "--resume"]):
        done = started(*COMMAND, *words, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert [line for line in done.stdout.splitlines() if line == "run"] == ["run"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (record,) = ea.read(tmp_path / "run").records
    assert (record.train_steps, record.case.ranks, record.status) == ((2, 4), 2, "ok")
    (alone,) = ea.train(["exact"], steps=4, num_layers=1, threads=1, **SIZES).records
    for name in ("train_bits_per_byte", "held_out_bits_per_byte"):
        assert getattr(record, name) == pytest.approx(getattr(alone, name), rel=2e-6)


def test_weights_of_parts_make_the_mean_over_the_wanted_tokens_of_the_batch():
    wanted = torch.tensor([[1, 1, 1], [1, 1, IGNORED], [1, 1, 1]])
    batch = Batch((wanted,), wanted)
    parts = [Replicas(rank, 2).part(batch) for rank in range(2)]
    assert [len(part.wanted) for part, _ in parts] == [2, 1]
    assert [weight for _, weight in parts] == [5 * 2 / 8, 3 * 2 / 8]
    assert Replicas().part(batch) == (batch, 1.0)


@pytest.fixture
def in_two_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")


def test_processes_without_a_sequence_or_on_one_gpu_are_refused(in_two_processes):
    assert replicas(2, "cpu") == Replicas(0, 2)
    with pytest.raises(ea.OptionError, match="batch=1 leaves some of 2 processes without a sequence"):
        replicas(1, "cpu")
    with pytest.raises(
        ea.OptionError, match="device=cuda:1: each of several processes takes a GPU of its own"
    ):
        replicas(2, "cuda:1")


@pytest.mark.parametrize("words", ["mse", "bench", "report runs", "list"])
def test_other_commands_in_several_processes_are_refused_in_one_line(
    words, in_two_processes, capsys, tmp_path
):
    from efficient_attn_cli.main import _run

    assert _run(words.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_other_processes_are_silent_where_a_command_is_refused(in_two_processes, monkeypatch, capsys):
    from efficient_attn_cli.main import _run

    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        _run(["mse"])
    assert capsys.readouterr() == ("", "")


def test_a_study_that_writes_no_folder_runs_in_every_process(in_two_processes, tmp_path):
    options = {"inputs": "gaussian", "seq_len": 16, "sizes": (8,), "draws": 2}
    assert len(ea.mse(["performer-positive"], **options).records)
    with pytest.raises(ea.UnsupportedError, match="mse runs in one process, and WORLD_SIZE is 2"):
        ea.mse(["performer-positive"], out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
