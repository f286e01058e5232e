"""Ctrl-C, a request to end, a reader that leaves: what was measured is kept, nothing is left behind."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from isolated_points import gone, soon

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from efficient_attn.measure.records import read, uninterrupted

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and /proc")

CODE = "from efficient_attn_cli.main import main; main()"
LENGTHS = ",".join(map(str, range(16, 46)))
BENCH = ["bench", "--backend", "own.py:values", "--seq-len", LENGTHS, "--num-heads", "2", "--head-dim", "8",
         "--no-error", "--threads", "1", "--budget", "20s", "--out", "out"]  # fmt: skip
OWN = "def values(q, k, v):\n    return v.clone()\n"

# What a killed process needs to be gone, and how long anything here may take at all.
GONE_S, PATIENCE_S = 2, 120


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def begin():
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *BENCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def begun():
    return os.path.exists("out/records.jsonl")


def children(process):
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "number", "code"), [(0, "SIGINT", 130), (1, "SIGTERM", 143)])
def test_an_ended_run_keeps_every_row_it_told_of_and_leaves_no_process(seed, number, code):
    process = begin()
    assert soon(begun, within_s=PATIENCE_S)
    time.sleep(random.Random(seed).uniform(0, 1.5))
    helpers = children(process)
    process.send_signal(getattr(signal, number))
    assert soon(lambda: all(map(gone, helpers)), within_s=GONE_S)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code and out.splitlines()[-1] == "out" and "Traceback" not in err
    reading = read("out/records.jsonl")
    cases = [record.case for record in reading.records]
    assert not reading.torn and len(set(cases)) == len(cases)
    there = {f"{case.label}, {case.tokens} tokens, {case.kind}" for case in cases}
    told = re.findall(r"^\[\d+/\d+\] (.*?): \w+", err, flags=re.MULTILINE)
    assert told and set(told) <= there


@pytest.mark.slow
def test_a_second_interruption_ends_at_once():
    process = begin()
    assert soon(begun, within_s=PATIENCE_S)
    process.send_signal(signal.SIGINT)
    # Until the first one has been noticed, which ends the process that measures.
    assert soon(lambda: not children(process), within_s=PATIENCE_S)
    process.send_signal(signal.SIGINT)
    assert soon(lambda: process.poll() is not None, within_s=GONE_S) and process.wait() == 130
    process.communicate()
    assert read("out/records.jsonl").records


def test_an_interruption_waits_until_a_row_is_written():
    done = []

    def interrupt(number, frame):
        done.append(number)
        raise KeyboardInterrupt

    def write(number):
        with uninterrupted():
            os.kill(os.getpid(), number)
            done.append("written")

    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.signal(number, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                write(number)
            assert signal.getsignal(number) is interrupt
        finally:
            signal.signal(number, before)
    assert done == ["written", signal.SIGINT, "written", signal.SIGTERM]


def test_a_termination_ends_a_command_like_ctrl_c_but_says_so(monkeypatch):
    from efficient_attn_cli import main

    before = signal.getsignal(signal.SIGTERM)
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        monkeypatch.setattr(main, "app", lambda number=number, **settings: os.kill(os.getpid(), number))
        with pytest.raises(SystemExit) as exit_:
            main.main([])
        assert exit_.value.code == code
    assert signal.getsignal(signal.SIGTERM) is before
