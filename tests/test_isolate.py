"""Isolation: whatever a backend does to its process, the sweep goes on and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from efficient_attn.errors import OptionError
from efficient_attn.experiments.bench import bench
from efficient_attn.sweep.estimate import Estimate
from efficient_attn.sweep.isolate import Isolated, measuring
from efficient_attn.sweep.plan import plan
from efficient_attn.sweep.records import Case, Record
from efficient_attn.sweep.run import run
from efficient_attn.sweep.variants import Variant, has_address

pytestmark = pytest.mark.skipif(os.name != "posix", reason="isolation needs process groups")

SHARED = {"num_heads": 2, "head_dim": 8, "dtype": "float32", "device": "cpu", "threads": 1}
OWN = """
import ctypes, os, signal, subprocess, sys, time

import torch

from efficient_attn.registry import BackendSpec, Capabilities, NoOptions


def values(q, k, v):
    return v.clone()


def pid(q, k, v):
    raise RuntimeError(os.getpid())


def exits(q, k, v):
    os._exit(7)


def leaves(q, k, v):
    sys.exit("goodbye")


def killed(q, k, v):
    os.kill(os.getpid(), signal.SIGKILL)


def aborts(q, k, v):
    os.abort()


def endless(q, k, v):
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open("pids", "w") as file:
        file.write(f"{os.getpid()} {helper.pid}")
    os.rename("pids", "pids.complete")
    while True:
        pass


def hangs_in_c(q, k, v):
    with open("pids", "w") as file:
        file.write(f"{os.getpid()}")
    os.rename("pids", "pids.complete")
    # Unlike CDLL this keeps Python's lock: no other thread of the process runs any more.
    ctypes.PyDLL(None).sleep(600)


def never(problem, options):
    while True:
        pass


endless_building = BackendSpec(
    name="endless_building",
    summary="It is never built.",
    options_type=NoOptions,
    capabilities=Capabilities(causal=False),
    builder=never,
)


def segfaults(q, k, v):
    ctypes.string_at(0)


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("nobody can pickle this")
        self.inner = lambda: None

    def __reduce__(self):
        raise TypeError


def unpicklable(q, k, v):
    raise Unpicklable


leaked = []


def leaks(q, k, v):
    leaked.append(torch.empty(1 << 26, dtype=torch.uint8))
    return v.clone()


def slow(q, k, v):
    time.sleep(0.3)
    return v.clone()


def loud(q, k, v):
    print("flood " * 200_000)
    return v.clone()


def wordy(q, k, v):
    raise ValueError("w" * 10_000_000)


def greedy(q, k, v):
    return v.new_empty(1 << 58)


def full(q, k, v):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")


def refuses(q, k, v):
    from efficient_attn.errors import UnsupportedError

    raise UnsupportedError("not\\nfor " + "you" * 1000)


def interrupted(q, k, v):
    raise KeyboardInterrupt
"""

# The time limit of an endless backend, and what a healthy one takes to be called a few times at most.
TIMEOUT_S, ENOUGH_S = 1, 60

ENDINGS = {
    "exits": ("crash", "the process ended with exit code 7"),
    "leaves": ("crash", "the process ended with exit code 1"),
    "segfaults": ("crash", "the process crashed with signal 11 (SIGSEGV)"),
    "unpicklable": ("error", "Unpicklable: nobody can pickle this"),
    "aborts": ("crash", "the process crashed with signal 6 (SIGABRT)"),
    "killed": (
        "crash",
        "the process crashed with signal 9 (SIGKILL): likely the system's out-of-memory killer",
    ),
    "wordy": ("error", "ValueError: www"),
    "greedy": ("oom", "RuntimeError: "),
    "refuses": ("unsupported", "not for you"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def case_of(name, **changes):
    return Case(**{"kind": "time", "backend": name, "label": name, "tokens": 16, **SHARED, **changes})


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
def test_every_way_to_fail_is_a_record_with_a_reason_of_one_line_and_the_next_point_is_measured():
    with Isolated(timeout_s=ENOUGH_S) as isolated:
        for name, (status, reason) in ENDINGS.items():
            record = ask(isolated, name)
            assert (record.status, record.case) == (status, case_of(name))
            assert record.reason.startswith(reason) and "\n" not in record.reason
            assert len(record.reason) <= 300
        assert ask(isolated, "values").status == "ok"


def test_a_healthy_process_is_kept_and_a_failure_brings_a_new_one():
    with Isolated(timeout_s=ENOUGH_S) as isolated:
        assert ask(isolated, "values", kind="memory").peak_bytes == 2 * 16 * 8 * 4
        kept = isolated._child
        assert ask(isolated, "values").times_s and ask(isolated, "refuses").status == "unsupported"
        assert isolated._child is kept
        first = ask(isolated, "pid").reason
        assert ask(isolated, "pid").reason != first and str(os.getpid()) not in first


def test_each_point_has_a_process_of_its_own_where_that_is_asked_for():
    with Isolated(timeout_s=ENOUGH_S, each=True) as isolated:
        assert ask(isolated, "values").status == "ok"
        assert isolated._child is None


def test_an_endless_point_is_ended_with_all_that_it_started_and_reaped():
    with Isolated(timeout_s=TIMEOUT_S) as isolated:
        assert ask(isolated, "values").status == "ok"
        start = time.monotonic()
        record = ask(isolated, "endless")
        # The limit itself, and the two seconds in which a process that was killed has to be gone.
        assert time.monotonic() - start < TIMEOUT_S + 2
    assert record.status == "timeout" and "--timeout" in record.reason
    process, helper = Path("pids.complete").read_text().split()
    assert not Path(f"/proc/{process}").exists()
    assert soon(lambda: gone(helper), within_s=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hangs_in_c", "endless_building"])
def test_a_hang_with_the_lock_of_python_held_or_while_building_is_ended_too(name):
    with Isolated(timeout_s=TIMEOUT_S) as isolated:
        assert ask(isolated, "values").status == "ok"
        start = time.monotonic()
        assert ask(isolated, name).status == "timeout"
        assert time.monotonic() - start < TIMEOUT_S + 2


@pytest.mark.slow
def test_the_time_limit_holds_for_all_turns_of_a_point_together():
    with Isolated(timeout_s=TIMEOUT_S) as isolated:
        # A call to warm up and a timed one, of 0.3 s each.
        first, second = ask(isolated, "slow"), ask(isolated, "slow")
        assert first.status == "ok" and len(first.times_s) == 1
        assert second.status == "timeout" and "of them in earlier turns" in second.reason
        assert ask(isolated, "slow", tokens=32).status == "ok"


def test_a_slow_point_keeps_the_turns_that_its_time_allows():
    records = []
    planned = plan(
        [Variant(backend="slow", label="slow", target="own.py:slow")], (16,), SHARED, kinds=("time",)
    )
    with Isolated(timeout_s=2) as isolated:
        run(planned, emit=records.append, measure=isolated, timeout_s=2, budget_s=1)
    (record,) = records
    # A turn takes 0.6 s: a fourth one would end after 2 s.
    assert record.status == "ok" and 1 <= len(record.times_s) <= 3


@pytest.mark.slow
def test_a_leaking_point_is_out_of_memory_at_the_limit_and_the_next_one_does_not_pay_for_it():
    variants = [Variant(backend=name, label=name, target=f"own.py:{name}") for name in ("leaks", "values")]
    records = []
    with Isolated(timeout_s=ENOUGH_S, limit_bytes=1 << 28) as isolated:
        run(plan(variants, (16,), SHARED), emit=records.append, measure=isolated)
    statuses = {(record.case.label, record.case.kind): record.status for record in records}
    assert statuses["leaks", "time"] == "oom"
    assert statuses["values", "time"] == statuses["values", "memory"] == "ok"


@pytest.mark.slow
def test_what_an_earlier_point_leaked_is_not_held_against_a_later_one():
    with Isolated(timeout_s=ENOUGH_S, limit_bytes=1 << 28) as isolated:
        # Each calls it a few times, so that no point alone comes near the limit.
        statuses = [ask(isolated, "leaks", kind="memory", tokens=tokens).status for tokens in range(16, 36)]
    assert set(statuses) == {"ok"}


def test_an_interruption_in_the_process_is_one_here():
    with Isolated(timeout_s=ENOUGH_S) as isolated, pytest.raises(KeyboardInterrupt):
        ask(isolated, "interrupted")


def test_a_process_that_cannot_start_is_a_record(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Isolated(timeout_s=ENOUGH_S) as isolated:
        record = ask(isolated, "values")
    assert record.status == "crash" and "did not start" in record.reason


def test_a_sweep_of_broken_backends_is_complete_and_longer_lengths_of_an_endless_one_are_skipped():
    names = ("exits", "endless", "values")
    variants = [Variant(backend=name, label=name, target=f"own.py:{name}") for name in names]
    records = []
    with Isolated(timeout_s=TIMEOUT_S) as isolated:
        assert run(plan(variants, (16, 32), SHARED, kinds=("time",)), emit=records.append, measure=isolated)
    found = {(record.case.label, record.case.tokens): record.status for record in records}
    assert found == {
        ("exits", 16): "crash",
        ("exits", 32): "crash",
        ("endless", 16): "timeout",
        ("endless", 32): "skipped",
        ("values", 16): "ok",
        ("values", 32): "ok",
    }
    (skipped,) = (record for record in records if record.status == "skipped")
    assert skipped.reason == "took too long at 16 tokens already (raise it with --timeout)"


def test_after_a_time_out_the_memory_of_the_same_call_is_not_tried():
    def endless(case, **settings):
        return Record(case=case, status="timeout", reason="took longer than 1 s")

    records = []
    run(
        plan([Variant(backend="f", label="f", target="f")], (16,), SHARED),
        emit=records.append,
        measure=endless,
    )
    assert [record.status for record in records] == ["timeout", "skipped"]


def test_the_estimate_counts_the_start_of_a_process_for_every_turn():
    (entry,) = plan([Variant(backend="f", label="f", target="f")], (16,), SHARED, kinds=("time",))
    here, there = (Estimate(turns=4, turn_s=0.1, start_s=start_s) for start_s in (0, 2))
    assert there.seconds(entry) - here.seconds(entry) == pytest.approx(4 * 2)


def test_no_process_outlives_a_parent_that_is_killed():
    script = (
        "from efficient_attn.experiments.bench import bench\n"
        "bench(['own.py:endless'], tokens=(16,), num_heads=2, head_dim=8, threads=1)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    assert soon(lambda: Path("pids.complete").exists(), within_s=ENOUGH_S)
    pids = Path("pids.complete").read_text().split()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert soon(lambda: all(map(gone, pids)), within_s=2)


@pytest.mark.slow
def test_a_process_that_hangs_in_c_does_not_outlive_a_killed_parent_for_long():
    script = (
        "from efficient_attn.experiments.bench import bench\n"
        "bench(['own.py:hangs_in_c'], tokens=(16,), num_heads=2, head_dim=8, threads=1, timeout_s=1)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    assert soon(lambda: Path("pids.complete").exists(), within_s=ENOUGH_S)
    parent.kill()
    parent.wait()
    # The time limit, the grace of five seconds after it, and as many for a busy machine.
    assert soon(lambda: gone(Path("pids.complete").read_text()), within_s=1 + 5 + 5)


def test_what_has_no_address_is_measured_here_with_all_the_others_and_that_is_told():
    def here(q, k, v):
        return v.clone()

    assert has_address("window") and has_address("own.py:values") and not has_address(here)
    results = bench([here], tokens=(16,), num_heads=2, head_dim=8, threads=1)
    assert {record.status for record in results.records} == {"ok"}
    told = "Nothing was isolated: 'here' exists in this process only"
    assert any(told in note for note in results.notes)


def test_a_name_registered_in_this_process_has_no_address(monkeypatch):
    from efficient_attn.foreign import spec_of
    from efficient_attn.registry import SPECS

    monkeypatch.setitem(SPECS, "mine", spec_of(lambda q, k, v: v, name="mine"))
    assert not has_address("mine")


@pytest.mark.parametrize(
    ("isolate", "timeout_s", "message"),
    [
        ("fork", 1, "isolate is none, reuse, point, not 'fork'"),
        ("reuse", 0, "timeout_s is a number of seconds"),
    ],
)
def test_wrong_settings_are_refused(isolate, timeout_s, message):
    with pytest.raises(OptionError, match=message):
        measuring(isolate, timeout_s=timeout_s)


def test_json_on_stdout_is_one_document_whatever_backends_print_and_break(capfd):
    pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
    from efficient_attn_cli.main import main

    small = ("--seq-len", "16", "--num-heads", "2", "--head-dim", "8", "--threads", "1")
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *small, "--json", "-", "--backend", "own.py:loud,own.py:exits,own.py:full"])
    out, err = capfd.readouterr()
    statuses = {(r["label"], r["kind"]): r["status"] for r in json.loads(out)["records"]}
    assert exit_.value.code == 3 and "flood flood" in err
    wanted = {"exact": "ok", "own.py:loud": "ok", "own.py:exits": "crash", "own.py:full": "oom"}
    assert statuses == {(label, kind): wanted[label] for label in wanted for kind in ("time", "memory")}
