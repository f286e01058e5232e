"""Whole runs in other processes: complete whatever breaks, nothing left behind, stdout kept clean."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from isolated_points import ENOUGH_S, TIMEOUT_S, gone, soon
from looped import points, run

from efficient_attn import bench
from efficient_attn.errors import OptionError
from efficient_attn.measure.isolation import Measurer
from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import Variant, has_address

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="isolation needs process groups"),
    pytest.mark.usefixtures("misbehaving"),
]


@pytest.mark.slow
def test_a_sweep_of_broken_backends_is_complete_and_longer_lengths_of_an_endless_one_are_skipped():
    names = ("exits", "endless", "values")
    variants = [Variant(backend=name, label=name, target=f"own.py:{name}") for name in names]
    with Measurer(timeout_s=TIMEOUT_S) as isolated:
        complete, records = run(points(variants, (16, 32), isolated, kinds=("time",)))
        assert complete
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

    _, records = run(points([Variant(backend="f", label="f", target="f")], (16,), endless))
    assert [record.status for record in records] == ["timeout", "skipped"]


@pytest.mark.slow
def test_no_process_outlives_a_parent_that_is_killed():
    script = (
        "from efficient_attn import bench\n"
        "bench(['own.py:endless'], seq_lens=(16,), num_heads=2, head_dim=8, threads=1)\n"
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
        "from efficient_attn import bench\n"
        "bench(['own.py:hangs_in_c'], seq_lens=(16,), num_heads=2, head_dim=8, threads=1, timeout_s=1)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    assert soon(lambda: Path("pids.complete").exists(), within_s=ENOUGH_S)
    parent.kill()
    parent.wait()
    # The time limit, the grace of five seconds after it, and as many for a busy machine.
    assert soon(lambda: gone(Path("pids.complete").read_text()), within_s=1 + 5 + 5)


def test_what_has_no_address_is_measured_here_with_all_the_others_and_that_is_told(hasty):
    def here(q, k, v):
        return v.clone()

    assert has_address("window") and has_address("own.py:values") and not has_address(here)
    results = bench([here], seq_lens=(16,), num_heads=2, head_dim=8, threads=1)
    assert {record.status for record in results.records} == {"ok"}
    told = "Nothing was isolated: 'here' exists in this process only"
    assert any(told in note for note in results.notes)


def test_a_name_registered_in_this_process_has_no_address(monkeypatch):
    from efficient_attn.external import spec_of
    from efficient_attn.registry import SPECS

    monkeypatch.setitem(SPECS, "mine", spec_of(lambda q, k, v: v, name="mine"))
    assert not has_address("mine")


@pytest.mark.parametrize(
    ("isolate", "timeout_s", "message"),
    [
        ("fork", 1, "isolate is none, reuse, not 'fork'"),
        ("reuse", 0, "timeout_s is a number of seconds"),
    ],
)
def test_wrong_settings_are_refused(isolate, timeout_s, message):
    with pytest.raises(OptionError, match=message):
        Measurer(isolate, timeout_s=timeout_s)


@pytest.mark.slow
def test_json_on_stdout_is_one_document_whatever_backends_print_and_break(hasty, undrawn, capfd):
    pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
    from efficient_attn_cli.main import main

    small = ("--no-error", "--seq-len", "16", "--num-heads", "2", "--head-dim", "8", "--threads", "1")
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *small, "--json", "-", "--backend", "own.py:loud,own.py:exits,own.py:full"])
    out, err = capfd.readouterr()
    statuses = {(r["label"], r["kind"]): r["status"] for r in json.loads(out)["records"]}
    assert exit_.value.code == 3 and "flood flood" in err
    wanted = {"exact": "ok", "own.py:loud": "ok", "own.py:exits": "crash", "own.py:full": "oom"}
    assert statuses == {(label, kind): wanted[label] for label in wanted for kind in ("time", "memory")}


@pytest.mark.slow
def test_processor_time_of_measuring_processes_is_no_load_of_others(monkeypatch):
    from efficient_attn.studies import run as runs

    seen, moment = [], runs.moment
    monkeypatch.setattr(runs, "moment", lambda: seen.append(os.times()) or moment())
    bench(["exact"], seq_lens="64", rounds=1, isolate="reuse")
    # Times of children count once they have ended: before the second of the two moments.
    assert seen[1].children_user > seen[0].children_user
