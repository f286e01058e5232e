"""Isolation: whatever a backend does to its process is a record, and nothing is lost or left behind."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_runs import points, run
from small_cases import case_of

from efficient_attn import bench
from efficient_attn.measure.isolation import Measurer
from efficient_attn.measure.record import Record, read
from efficient_attn.measure.variants import Variant
from efficient_attn.runs import run as runs

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="isolation needs process groups, signals and /proc"),
    pytest.mark.usefixtures("misbehaving"),
]

# The time limit of an endless backend; then, on a slow and busy machine, the time for a killed process to be
# gone, and for a healthy one to be called a few times.
TIMEOUT_S, GONE_S, ENOUGH_S = 2, 20, 300

ENDINGS = {
    "exits": ("crash", "the process ended with exit code 7"),
    "leaves": ("error", "SystemExit: goodbye"),
    "signals": ("ok", None),
    "segfaults": ("crash", "the process crashed with signal 11 (SIGSEGV)"),
    "unpicklable": ("error", "Unpicklable: nobody can pickle this"),
    "killed": ("crash", "the process crashed with signal 9 (SIGKILL): likely the system's out-of-memory"),
    "refuses": ("unsupported", "not for you"),
}


def ask(isolated, name, **changes):
    return isolated(case_of(name, **changes), target=f"own.py:{name}", seconds=0.001)


def gone(pid):
    """Whether a process has ended; one that nobody has reaped yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def soon(condition, *, within_s):
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.slow
def test_every_way_to_fail_is_a_record_with_a_reason_and_the_next_point_has_a_healthy_process():
    with Measurer(timeout_s=ENOUGH_S) as isolated:
        for name, (status, reason) in ENDINGS.items():
            assert ask(isolated, "values").status == "ok"
            child = isolated._process.child
            record = ask(isolated, name)
            assert (record.status, record.case) == (status, case_of(name))
            assert reason is None or record.reason.startswith(reason)
            assert "\n" not in str(record.reason) and len(str(record.reason)) <= 300
            assert (isolated._process.child is child) == (status in ("ok", "unsupported"))


@pytest.mark.slow
def test_a_point_that_holds_the_lock_of_python_is_ended_with_all_that_it_started_and_reaped():
    with Measurer(timeout_s=TIMEOUT_S) as isolated:
        record = ask(isolated, "hangs_in_c")
    assert record.status == "timeout" and "--timeout" in record.reason
    process, helper = Path("pids.complete").read_text().split()
    assert not Path(f"/proc/{process}").exists()
    assert soon(lambda: gone(helper), within_s=GONE_S)


@pytest.mark.slow
def test_a_leaking_point_is_out_of_memory_at_the_limit_and_the_next_one_does_not_pay_for_it():
    variants = [Variant(backend=name, label=name, target=f"own.py:{name}") for name in ("leaks", "values")]
    with Measurer(timeout_s=ENOUGH_S, limit_bytes=1 << 28) as isolated:
        _, records = run(points(variants, (16,), isolated))
    statuses = {(record.case.label, record.case.kind): record.status for record in records}
    assert statuses["leaks", "time"] == "oom"
    assert statuses["values", "time"] == statuses["values", "memory"] == "ok"


@pytest.mark.slow
def test_what_an_earlier_point_leaked_is_not_held_against_a_later_one():
    with Measurer(timeout_s=ENOUGH_S) as isolated:
        assert ask(isolated, "crowded", tokens=16).status == "ok"
        used = isolated._process.child
        assert ask(isolated, "crowded", tokens=32).status == "ok"
        assert isolated._process.child is not used


def test_a_process_that_cannot_start_is_a_record(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Measurer(timeout_s=ENOUGH_S) as isolated:
        record = ask(isolated, "values")
    assert record.status == "crash" and "did not start" in record.reason


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
