"""`efficient-attn train`: what it prints, writes, refuses, and with which code it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from efficient_attn_cli.main import main

TINY = ["train", "--text", "text.txt", "--seq-len", "8", "--batch", "2", "--model-dim", "8",
        "--num-heads", "2", "--layers", "1", "--every", "2", "--windows", "8", "--size", "4",
        "--threads", "1", "--backend", "window"]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"line {number} of the text\n" for number in range(120)))
    return tmp_path


def command(*words):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    return exit_.value.code


def test_train_prints_progress_a_table_and_last_the_folder_of_its_files(folder, capsys):
    assert command(*TINY, "--steps", 4) == 0
    out, err = capsys.readouterr()
    last = folder / out.splitlines()[-1]
    assert last.parent.name == "runs" and last.name.startswith("train-")
    names = {
        "records.jsonl",
        "environment.json",
        "training.png",
        "report.html",
        "checkpoints",
    }
    assert names <= {path.name for path in last.iterdir()}
    assert "Language models: text.txt, windows of 8 bytes" in out and "After 4 steps exact attention" in out
    assert "[2/2] window(window=4), step 4: " in err and "bits per byte; " in err
    assert "\x1b" not in out + err


def test_a_run_goes_on_with_more_steps(undrawn):
    assert command(*TINY, "--steps", 2, "--out", "out") == 0
    assert command(*TINY, "--steps", 4, "--out", "out", "--resume") == 0
    assert {
        json.loads(line)["train_steps"][-1] for line in Path("out/records.jsonl").read_text().splitlines()
    } == {4}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "missing.txt"], "text: cannot read missing.txt: No such file or directory."),
        (["--text", "short.txt"], "text: short.txt has 10 bytes. Windows of 8 tokens need 720"),
        (["--text", "binary"], "text: binary is no text: it holds a zero byte."),
        (["--steps", "3"], "steps=3 does not end with an evaluation"),
        (["--backend", "linformer"], "cannot be causal. Causal backends:"),
        (["--set", "window.window=0"], "window is at least 1, not 0"),
    ],
)
def test_a_wrong_request_ends_in_one_line_and_leaves_no_folder(words, message, folder, capsys):
    (folder / "short.txt").write_text("too short\n")
    (folder / "binary").write_bytes(b"\0" * 5000)
    assert command(*TINY, "--steps", "2", *words) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and "Traceback" not in err
    assert not (folder / "runs").exists()


def test_going_on_with_other_options_is_refused(undrawn, capsys):
    assert command(*TINY, "--steps", 2, "--out", "out") == 0
    capsys.readouterr()
    assert command(*TINY, "--steps", 4, "--out", "out", "--resume", "--learning-rate", 0.5) == 2
    assert "was begun with learning_rate=0.01, not 0.5" in capsys.readouterr().err
    assert command(*TINY, "--steps", 4, "--out", "out") == 2
    assert "holds records of another run already" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_ended_command_puts_its_models_down_and_says_how_it_ended(number, code):
    words = [sys.executable, "-c", "from efficient_attn_cli.main import main; main()", *TINY, "--out", "out"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    start = time.monotonic()
    while not Path("out/records.jsonl").exists():
        assert child.poll() is None and time.monotonic() - start < 120, "waited in vain"
        time.sleep(0.01)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == code and out.splitlines()[-1] == "out" and "Traceback" not in err
    assert Path("out/training.png").exists()
