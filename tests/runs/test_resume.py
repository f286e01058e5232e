"""Going on with a run: nothing measured twice, nothing lost, nothing mixed, one writer."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter

import pytest

import efficient_attn as ea
from efficient_attn import bench
from efficient_attn.errors import DataError
from efficient_attn.runs.results import read
from efficient_attn.runs.store import only_writer

pytestmark = pytest.mark.usefixtures("hasty", "undrawn")

SMALL = {"num_heads": 2, "head_dim": 8, "threads": 1, "isolate": "none", "error": False, "budget_s": 3600}
OWN = """
import os


def values(q, k, v):
    return v.clone()


def mended(q, k, v):
    if not os.path.exists("mended"):
        raise ValueError("not yet")
    return v.clone()
"""

# A run is killed this many times at a random moment after its first record.
KILLS, SEED = 4, 0
PATIENCE_S = 300


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def run(tokens=(16,), backend="own.py:values", resume=False):
    return bench([backend], seq_lens=tokens, out="out", resume=resume, **SMALL)


def lines():
    with open("out/records.jsonl", encoding="utf-8") as file:
        return file.readlines()


def keys(records):
    return sorted(record.case.key for record in records)


def test_what_is_there_is_not_measured_again_and_what_is_missing_is():
    run()
    before = lines()
    results = run(tokens=(16, 32), resume=True)
    whole = lines()
    assert whole[: len(before)] == before
    assert {json.loads(row)["tokens"] for row in whole[len(before) :]} == {32}
    assert len(results) == 8 and keys(results.records) == keys(read("out").records)
    assert run(tokens=(16, 32), resume=True).records == results.records and lines() == whole


def test_what_failed_may_be_mended_is_tried_again_and_stands_once_in_what_is_read(folder):
    run(backend="own.py:mended")
    failed = lines()
    run(backend="own.py:mended", resume=True)
    assert lines() == failed
    (folder / "mended").touch()
    (folder / "own.py").write_text(OWN + "# edited\n")
    results = run(backend="own.py:mended", resume=True)
    assert {record.status for record in results.records} == {"ok"} and len(results) == 4
    assert read("out").records == results.records
    # From then on the code is watched.
    before = lines()
    (folder / "own.py").write_text(OWN)
    with pytest.raises(DataError, match=r"environment: the code of own.py:mended was edited"):
        run((16, 32), backend="own.py:mended", resume=True)
    assert lines() == before
    # Restored code is the one that was measured.
    (folder / "own.py").write_text(OWN + "# edited\n")
    assert len(run(backend="own.py:mended", resume=True)) == 4 and lines() == before


def test_a_torn_last_line_is_dropped_with_a_notice_and_measured_again(folder):
    wanted = run()
    path = folder / "out" / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    results = run(resume=True)
    assert "The last line of records.jsonl was cut off and is left out." in results.notes
    assert keys(results.records) == keys(wanted.records) == keys(read("out").records)
    assert all(json.loads(line) for line in lines())


def test_a_file_with_damaged_lines_is_set_aside_and_their_rows_alone_are_measured_again(folder):
    wanted = run()
    path = folder / "out" / "records.jsonl"
    first, second, *others = path.read_bytes().splitlines(keepends=True)
    # A carriage return ends no line of ours.
    whole = [b"\r" + first, *others]
    damaged = b"".join([whole[0], second[9:], *others, second[:9]])
    path.write_bytes(damaged)
    results = run(resume=True)
    (aside,) = (folder / "out").glob("records.jsonl.damaged-*")
    assert aside.read_bytes() == damaged and path.read_bytes().startswith(b"".join(whole))
    assert [note for note in results.notes if f"set aside as {aside.name}" in note]
    assert [note for note in results.notes if "Damaged lines left out of records.jsonl: 1." in note]
    assert keys(results.records) == keys(wanted.records) == keys(read("out").records)


def test_environments_and_threads_are_not_mixed(folder):
    run()
    file, path = folder / "out" / "environment.json", folder / "out" / "records.jsonl"
    machine, before = file.read_text(), lines()
    for change, message in (
        ({"torch": {"version": "1.0"}}, "torch.version was 1.0, is 2"),
        ({"processor": None}, "processor was unknown, is "),
    ):
        file.write_text(json.dumps(json.loads(machine) | change))
        with pytest.raises(DataError, match=rf"in another environment: {message}.*Name a new folder"):
            run(tokens=(16, 32), resume=True)
    file.write_text(machine)
    assert lines() == before
    path.write_text(path.read_text().replace('"threads": 1', '"threads": 3'))
    with pytest.raises(DataError, match=r"threads were \[3\], are \[1\]"):
        run(resume=True)
    with pytest.raises(DataError, match="out: out has study=bench, not mse; name a new folder"):
        ea.mse(["window"], seq_lens=16, out="out", resume=True)
    with pytest.raises(DataError, match=r"^out: absent holds no run to go on with\.$"):
        bench(out="absent", resume=True)


@pytest.mark.skipif(os.name != "posix", reason="the lock is one of POSIX")
def test_a_second_writer_is_refused(folder):
    (folder / "out").mkdir()
    # The lock is that of an open file: a second one excludes this process too.
    with only_writer(folder / "out"):
        for resume in (False, True):
            with pytest.raises(DataError, match="out: out is being written by another process; wait for it"):
                run(resume=resume)
    assert not (folder / "out" / "records.jsonl").exists()
    assert len(run(resume=True)) == 4


@pytest.mark.slow
def test_a_run_killed_at_any_moment_and_resumed_ends_with_all_cases_and_loses_no_record(folder):
    """Each kill comes a random time after a record was written; what was read before it stays."""
    script = (
        "from efficient_attn import bench\n"
        "bench(['own.py:values'], seq_lens=range(16, 26), error=False, num_heads=2, head_dim=8, threads=1,\n"
        "      isolate='none', out='out', resume=True, budget_s=3600)\n"
    )
    chance, acknowledged = random.Random(SEED), []
    for _ in range(KILLS):
        child = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while not grown(len(acknowledged)) and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.3))
        child.kill()
        child.wait()
        # A kill may cut off the line that is being written.
        whole = [row for row in lines() if row.endswith("\n")]
        assert whole[: len(acknowledged)] == acknowledged
        acknowledged = whole
    results = run(range(16, 26), resume=True)
    assert lines()[: len(acknowledged)] == acknowledged
    # Two backends at ten lengths: rounds of a time, four or more until a speed is decided, and memory.
    rows = [json.loads(row) for row in lines()]
    rounds = Counter((row["label"], row["tokens"]) for row in rows if row["kind"] == "time")
    assert len(results) == 2 * 2 * 10 and len(rows) == rounds.total() + 2 * 10
    assert len(rounds) == 2 * 10 and min(rounds.values()) >= 4
    # No round is measured twice.
    measured = {(row["label"], row["tokens"], *row["round_numbers"]) for row in rows if row["kind"] == "time"}
    assert len(measured) == rounds.total()
    assert {record.status for record in results.records} == {"ok"}


def grown(count):
    return os.path.exists("out/records.jsonl") and len(lines()) > count
