"""Isolation: whatever a backend does to its process, it is a record, and the next point is measured."""

import os
import sys
import time
from pathlib import Path

import pytest
from isolated_points import ENOUGH_S, GONE_S, TIMEOUT_S, ask, case_of, gone, soon
from looped import points, run

from efficient_attn.measure.isolation import Measurer
from efficient_attn.measure.variants import Variant

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="isolation needs process groups"),
    pytest.mark.usefixtures("misbehaving"),
]

ENDINGS = {
    "exits": ("crash", "the process ended with exit code 7"),
    "leaves": ("error", "SystemExit: goodbye"),
    "signals": ("ok", None),
    "segfaults": ("crash", "the process crashed with signal 11 (SIGSEGV)"),
    "unpicklable": ("error", "Unpicklable: nobody can pickle this"),
    "aborts": ("crash", "the process crashed with signal 6 (SIGABRT)"),
    "killed": ("crash", "the process crashed with signal 9 (SIGKILL): likely the system's out-of-memory"),
    "wordy": ("error", "ValueError: www"),
    "greedy": ("oom", "RuntimeError: "),
    "refuses": ("unsupported", "not for you"),
}


@pytest.mark.slow
def test_every_way_to_fail_is_a_record_with_a_reason_of_one_line_and_the_next_point_is_measured():
    with Measurer(timeout_s=ENOUGH_S) as isolated:
        for name, (status, reason) in ENDINGS.items():
            record = ask(isolated, name)
            assert (record.status, record.case) == (status, case_of(name))
            assert reason is None or record.reason.startswith(reason)
            assert "\n" not in str(record.reason) and len(str(record.reason)) <= 300
        assert ask(isolated, "values").status == "ok"


@pytest.mark.slow
def test_a_healthy_process_is_kept_and_a_failure_brings_a_new_one():
    with Measurer(timeout_s=ENOUGH_S) as isolated:
        assert ask(isolated, "values").times_s
        child = isolated._process.child
        assert ask(isolated, "refuses").status == "unsupported" and isolated._process.child is child
        first = ask(isolated, "pid").reason
        assert ask(isolated, "pid").reason != first and str(os.getpid()) not in first


@pytest.mark.slow
def test_an_endless_point_is_ended_with_all_that_it_started_and_reaped():
    with Measurer(timeout_s=TIMEOUT_S) as isolated:
        record = ask(isolated, "endless")
    assert record.status == "timeout" and "--timeout" in record.reason
    process, helper = Path("pids.complete").read_text().split()
    assert not Path(f"/proc/{process}").exists()
    assert soon(lambda: gone(helper), within_s=GONE_S)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hangs_in_c", "endless_building"])
def test_a_hang_with_the_lock_of_python_held_or_while_building_is_ended_too(name):
    with Measurer(timeout_s=ENOUGH_S) as isolated:
        assert ask(isolated, "values").status == "ok"
        isolated._timeout_s = TIMEOUT_S
        start = time.monotonic()
        assert ask(isolated, name).status == "timeout"
        assert time.monotonic() - start < TIMEOUT_S + GONE_S


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
