"""Whole runs in other processes: complete whatever breaks or interrupts, nothing left behind."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from isolated_points import ENOUGH_S, GONE_S, gone, soon
from looped import points, run

from efficient_attn import bench
from efficient_attn.external import spec_of
from efficient_attn.measure.record import Record, read
from efficient_attn.measure.variants import Variant, has_address
from efficient_attn.registry import SPECS
from efficient_attn.studies import engine as runs

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="isolation needs process groups, signals and /proc"),
    pytest.mark.usefixtures("misbehaving"),
]


def test_after_a_time_out_the_memory_of_the_same_call_is_not_tried():
    def endless(case, **settings):
        return Record(case=case, status="timeout", reason="took longer than 1 s")

    _, records = run(points([Variant(backend="f", label="f", target="f")], (16,), endless))
    assert [record.status for record in records] == ["timeout", "skipped"]


@pytest.mark.slow
def test_no_process_outlives_a_parent_that_is_killed():
    options = {"seq_lens": 16, "num_heads": 2, "head_dim": 8, "threads": 1}
    script = f"import efficient_attn as ea; ea.bench(['own.py:endless'], **{options})"
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    assert soon(lambda: Path("pids.complete").exists(), within_s=ENOUGH_S)
    parent.kill()
    parent.wait()
    assert soon(lambda: all(map(gone, Path("pids.complete").read_text().split())), within_s=GONE_S)


def test_names_and_files_have_addresses_and_what_exists_in_this_process_alone_has_none(monkeypatch):
    def here(q, k, v):
        return v.clone()

    monkeypatch.setitem(SPECS, "mine", spec_of(here, name="mine"))
    assert has_address("window") and has_address("own.py:values")
    assert not has_address(here) and not has_address("mine")


@pytest.mark.slow
def test_processor_time_of_measuring_processes_is_no_load_of_others(monkeypatch):
    seen, moment = [], runs.moment
    monkeypatch.setattr(runs, "moment", lambda: seen.append(os.times()) or moment())
    bench(["exact"], seq_lens="64", rounds=1, isolate="reuse")
    # Times of children count once they have ended: before the second of the two moments.
    assert seen[1].children_user > seen[0].children_user


@pytest.fixture
def process():
    """A run of the command `bench` that has written its first record."""
    pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
    lengths = ",".join(map(str, range(16, 46)))
    words = f"bench --backend own.py:values --seq-len {lengths} --budget 1h --out out --no-error".split()
    words += ["--num-heads", "2", "--head-dim", "8", "--threads", "1"]
    code = "from efficient_attn_cli.main import main; main()"
    command = [sys.executable, "-c", code, *words]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert soon(lambda: Path("out/records.jsonl").exists(), within_s=ENOUGH_S)
    return running


def children(process):
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "number", "code"), [(0, "SIGINT", 130), (1, "SIGTERM", 143)])
def test_an_ended_run_keeps_every_row_it_told_of_and_leaves_no_process(seed, number, code, process):
    time.sleep(random.Random(seed).uniform(0, 1.5))
    helpers = children(process)
    process.send_signal(getattr(signal, number))
    assert soon(lambda: all(map(gone, helpers)), within_s=GONE_S)
    out, err = process.communicate(timeout=ENOUGH_S)
    assert process.returncode == code and out.splitlines()[-1] == "out/report.html" and "Traceback" not in err
    reading = read("out/records.jsonl")
    cases = [record.case for record in reading.records]
    assert not reading.torn and len(set(cases)) == len(cases)
    there = {f"{case.label}, {case.tokens} tokens, {case.kind}" for case in cases}
    told = re.findall(r"^\[\d+/\d+\] (.*?): \w+", err, flags=re.MULTILINE)
    assert told and set(told) <= there


@pytest.mark.slow
def test_a_second_interruption_ends_at_once(process):
    process.send_signal(signal.SIGINT)
    # Until the first one has been noticed, which ends the process that measures.
    assert soon(lambda: not children(process), within_s=ENOUGH_S)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=ENOUGH_S)
    # A run that saves its files names their folder.
    assert process.returncode == 130 and out == ""
    assert read("out/records.jsonl").records
