"""A run of training that goes on: the same bits after any end, and nothing lost to wrong options."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_training import LINES, TINY, curves, run

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError
from efficient_attn.studies import run as studies_run
from efficient_attn.studies.train.checkpoints import write_tensors
from efficient_attn.studies.train.trainer import Trainer


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch, undrawn):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    path.write_bytes(LINES)
    return path


@pytest.mark.parametrize("task", ["text", "copy"])
def test_a_run_that_goes_on_has_the_curve_of_one_that_never_stopped(task):
    whole = run(steps=6, out="whole", task=task)
    run(steps=2, out="parts", task=task)
    parts = run(steps=6, out="parts", resume=True, task=task)
    assert all((record.accuracy is not None) == (task == "copy") for record in parts.records)
    assert curves(parts) == curves(whole) == curves(ea.read("parts"))
    assert same_checkpoints("whole", "parts")
    assert len(Path("parts/records.jsonl").read_text().splitlines()) == len(parts)


def progress(path):
    """What a checkpoint says of its curve, without the seconds, which differ from run to run."""
    with safe_open(path, framework="pt") as file:
        kept = json.loads(file.metadata()["about"])["progress"]
    del kept["trained_s"]
    return {**kept, "curve": [[step, *bits] for step, _, *bits in kept["curve"]]}


def same_checkpoints(one, other):
    for name in os.listdir(f"{one}/checkpoints"):
        paths = [f"{root}/checkpoints/{name}" for root in (one, other)]
        own, theirs = map(load_file, paths)
        assert own.keys() == theirs.keys() and all(torch.equal(own[key], theirs[key]) for key in own)
        assert progress(paths[0]) == progress(paths[1])
    return True


@pytest.mark.parametrize("lost", [1, 3])
def test_a_checkpoint_whose_record_was_lost_is_recorded_when_the_run_goes_on(lost):
    whole = curves(run(steps=4, out="out"))
    path = Path("out/records.jsonl")
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:-lost]))
    assert curves(ea.read("out")) != whole
    assert curves(run(steps=4, out="out", resume=True)) == curves(ea.read("out")) == whole


@pytest.mark.parametrize("number", [1, 3, 4])
def test_an_interruption_keeps_every_step_that_was_done(number, monkeypatch):
    whole = curves(run(steps=4))
    done = []
    advance = Trainer.advance

    def interrupted(self):
        advance(self)
        done.append(self)
        # The steps that are tried before count for nothing.
        if len(done) == 3 + number:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "advance", interrupted)
    cut = run(steps=4, out="out")
    assert cut.interrupted
    monkeypatch.setattr(Trainer, "advance", advance)
    checkpoints = [progress(path) for path in Path("out/checkpoints").iterdir()]
    assert sum(2 * len(one["curve"]) + len(one["recent"]) for one in checkpoints) == number
    assert curves(run(steps=4, out="out", resume=True)) == whole


CODE = """
import json, sys, efficient_attn as ea
ea.train(["window", "performer-positive"], out="killed", **json.loads(sys.argv[1]))
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_a_run_that_was_killed_at_a_random_moment_goes_on_to_the_same_bits(seed, tmp_path):
    settings = {**TINY, "text": "text.txt", "size": 4, "steps": 600}
    child = subprocess.Popen([sys.executable, "-c", CODE, json.dumps(settings)])
    start = time.monotonic()
    while not (tmp_path / "killed/records.jsonl").exists():
        assert child.poll() is None and time.monotonic() - start < 120, "waited in vain"
        time.sleep(0.005)
    time.sleep(random.Random(seed).uniform(0, 0.3))
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    records = ea.read("killed").records
    steps = 2 + max(max(record.train_steps) for record in records)
    assert steps < 600
    resumed = run(steps=steps, out="killed", resume=True)
    assert curves(resumed) == curves(run(steps=steps, out="whole"))
    assert same_checkpoints("whole", "killed")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": 0.02}, r"begun with learning_rate=0\.01, not 0\.02"),
        ({"seed": 3}, r"begun with seed=0, not 3"),
        ({"every": 1}, r"begun with every=2, not 1"),
        ({"text": "other.txt"}, r"begun with another text"),
        ({"task": "copy", "learning_rate": 0.01}, r"begun with task=text, not copy"),
        ({"options": {"performer-positive": {"projection": ["iid"]}}}, None),
    ],
)
def test_a_run_that_goes_on_with_other_options_is_refused_and_nothing_is_lost(changed, message, tmp_path):
    (tmp_path / "other.txt").write_bytes(LINES[::-1])
    run(steps=2, out="out")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    if message is None:
        # Another variant is another model beside those that are there.
        more = run(steps=2, out="out", resume=True, **changed)
        assert len(more.records) == 4
    else:
        with pytest.raises(
            DataError,
            match=f"{message}.*Give the options of that run, or name a new folder",
        ):
            run(steps=4, out="out", resume=True, **changed)
    assert all(path.read_bytes() == data for path, data in before.items())
    assert curves(run(steps=2, out="out", resume=True)).items() >= curves(run(steps=2)).items()


@pytest.mark.parametrize(("name", "value"), [("positions", "sinusoidal"), ("warmup", 9)])
def test_a_run_begun_with_former_options_goes_on_only_where_they_are_those_of_today(name, value):
    run(steps=2, out="out")
    paths = list(Path("out/checkpoints").iterdir())

    def described(**changed):
        for path in paths:
            with safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()["about"])
            # A release with these options had one task.
            about.pop("task", None)
            write_tensors(path, load_file(path), {**about, **changed})

    described(**{"positions": "rotary", "warmup": 20, name: value})
    with pytest.raises(DataError, match=f"begun with {name}={value}, not"):
        run(steps=4, out="out", resume=True)
    described(positions="rotary", warmup=20)
    assert curves(run(steps=4, out="out", resume=True)) == curves(run(steps=4, out="whole"))
    with pytest.raises(OptionError, match="neither positions nor warmup"):
        run(steps=2, **{name: value})


def test_another_environment_is_refused_unless_it_is_forced(monkeypatch):
    run(steps=2, out="out")
    here = studies_run.environment()
    monkeypatch.setattr(studies_run, "environment", lambda **asked: {**here, "processor": "another"})
    with pytest.raises(
        DataError,
        match=r"environment: processor was .*, is another\. Name a new folder",
    ):
        run(steps=4, out="out", resume=True)
    mixed = run(steps=4, out="out", force_resume=True)
    assert mixed.records[0].train_steps == (2, 4)
    assert any("Two environments are mixed" in note for note in mixed.notes)


def test_a_folder_of_another_run_is_not_written_over():
    run(steps=2, out="out")
    os.remove("out/records.jsonl")
    with pytest.raises(DataError, match=r"holds checkpoints of another run\. Go on with it by --resume"):
        run(steps=2, out="out")


def test_a_run_that_has_had_its_steps_says_so():
    run(steps=2, out="out")
    assert any("Nothing was left to do" in note for note in run(steps=2, out="out", resume=True).notes)


def test_a_continued_run_has_a_budget_of_its_own_and_models_ahead_of_the_others_wait():
    run(steps=4, out="out")
    Path("out/checkpoints/exact.safetensors").unlink()
    again = run(steps=None, out="out", resume=True, budget_s=1e-9)
    assert {record.case.backend: record.train_steps for record in again.records} == {
        "exact": (2,), "window": (2, 4), "performer-positive": (2, 4)}  # fmt: skip
