"""Doubts: every sign that times are uncertain is told with the flag that helps; a quiet run has none."""

import json
import os
import subprocess
import sys
import time

import pytest

from efficient_attn import bench
from efficient_attn.measure.conditions import between, moment, waited_s
from efficient_attn.runner.record import Case, Record, replace
from efficient_attn.stats.remarks import DURING, doubts
from efficient_attn.studies.reading import read

STEADY = (1.0, 1.001, 1.002, 1.003, 1.002, 1.001, 1.0)
QUIET = {
    "wall_s": 10.0,
    "others_share": 0.01,
    "stolen_share": 0.0,
    "loop_before_s": 1e-3,
    "loop_after_s": 1.05e-3,
}


def record(times_s=STEADY * 4, *, label="window", tokens=256, **fields):
    case = Case(
        kind="time",
        backend="window",
        label=label,
        num_heads=1,
        head_dim=8,
        tokens=tokens,
        dtype="float32",
        device="cpu",
        threads=2,
    )
    known = {"round_sizes": (len(times_s) // 4,) * 4, "waited_s": 0.0}
    return Record(case=case, times_s=tuple(times_s), **{**known, **fields})


def test_a_quiet_run_raises_no_doubt():
    assert doubts([record()], {DURING: [QUIET]}) == []
    assert doubts([record(round_sizes=None, waited_s=None)]) == []
    assert (
        doubts([Record(case=record().case, status="error")], {DURING: [{**QUIET, "others_share": 1.0}]}) == []
    )


def test_a_throttled_gpu_and_one_of_unknown_state_are_told():
    def on_gpu(**state):
        quiet = record(waited_s=None)
        return replace(quiet, case=replace(quiet.case, device="cuda"), **state)

    # Idleness (1), chosen clocks (2, 256) and synchronised boost (16) slow no call down.
    assert doubts([on_gpu(sm_clock_hz=1.98e9, throttle_reasons=1 | 2 | 16 | 256)]) == []
    for reason in (4, 8, 32, 64, 128):
        (told,) = doubts([on_gpu(sm_clock_hz=1.2e9, throttle_reasons=1 | reason)])
        assert told.startswith(
            "Throttled GPU: power, heat or hardware held its clocks down after window at 256"
        )
        assert f"(reasons {reason:#x})" in told
    (told,) = doubts([on_gpu()])
    assert told.startswith("Unknown GPU state: clocks, power and throttling of window at 256 tokens")


# A record, and all that is said about it.
OF_RECORDS = {
    "noisy": (
        # Each round is steady, and one is slower: no scatter of calls within rounds shows it. The standard
        # deviation of the logarithms is half of log 1.3, and the interval four of them and the shift of a run
        # to either side.
        record(STEADY * 3 + tuple(1.3 * time_s for time_s in STEADY)),
        "Noisy: the interval of window at 256 tokens reaches 70% from the median; more --rounds",
    ),
    "held up": (
        # A fifth of the time of two threads, 28 calls of about a second each.
        record(waited_s=0.2 * 2 * sum(STEADY * 4)),
        "CPU contention: threads of window at 256 tokens waited for a processor up to 20% of the time; use",
    ),
    "few rounds": (
        record([1.0] * 50, round_sizes=(20, 20, 10)),
        "Few rounds: window at 256 tokens had fewer than 4, too few for an interval; use --rounds 4 or more.",
    ),
}


@pytest.mark.parametrize("name", OF_RECORDS)
def test_what_is_wrong_with_a_point_is_told_with_the_flag_that_helps(name):
    doubtful, sentence = OF_RECORDS[name]
    (told,) = doubts([doubtful], {DURING: [QUIET]})
    assert told.startswith(sentence)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"others_share": 0.3}, "Background load: other processes took 30% of all cores during the run"),
        ({"stolen_share": 0.1}, "Background load: the host gave 10% of all cores to other virtual machines"),
        ({"loop_after_s": 1.2e-3}, "Clock drift: a fixed loop took 20% longer after the run than before it"),
    ],
)
def test_what_the_machine_did_during_the_run_is_told(found, sentence):
    (told,) = doubts([record()], {DURING: [QUIET, {**QUIET, **found}]})
    assert told.startswith(sentence)


def test_a_point_that_was_cut_short_and_a_long_list_of_points_are_told_briefly():
    whole = [record(tokens=tokens, waited_s=50.0) for tokens in (16, 32, 64, 128)]
    short = record(STEADY * 2, label="slow", round_sizes=(7, 7))
    told = doubts([*whole, short])
    assert len(told) == 2
    assert "window at 16, 32, 64 tokens and 1 more point waited" in told[0]
    assert told[1].startswith("Few rounds: slow at 256 tokens")


@pytest.mark.parametrize(
    "broken", [[], {}, "x", None, [3], [{"others_share": "much", "wall_s": float("nan")}]]
)
def test_an_environment_that_makes_no_sense_raises_no_doubt_and_no_error(broken):
    assert doubts([record()], {DURING: broken}) == []
    assert doubts([record(round_sizes=(1.5, None, 3, 4))], {DURING: broken}) == []


def test_doubts_are_in_the_notes_of_a_run_and_again_when_its_files_are_read(
    hasty, undrawn, tmp_path, monkeypatch
):
    busy = iter([0.0, 1e6])

    def faked():
        return real()._replace(busy_s=next(busy))

    real = moment
    monkeypatch.setattr("efficient_attn.studies.run.moment", faked)

    def values(q, k, v):
        return v.clone()

    results = bench(
        [values], seq_lens=(16,), num_heads=2, head_dim=8, isolate="none", out=tmp_path, budget_s=3600
    )
    loaded = [note for note in results.notes if note.startswith("Background load: other processes took")]
    assert loaded and json.loads((tmp_path / "environment.json").read_text())[DURING][0]["others_share"] > 1
    assert set(loaded) <= set(read(tmp_path).notes) <= set(results.notes)


needs_counters = pytest.mark.skipif(waited_s() is None, reason="the system does not count waiting threads")


@needs_counters
@pytest.mark.serial
def test_a_thread_that_shares_its_core_waits_about_half_of_the_time():
    script = (
        "import os, subprocess, sys, time\n"
        "from efficient_attn.measure.conditions import waited_s\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "other = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "time.sleep(0.2)\n"
        "before, start = waited_s(), time.perf_counter()\n"
        "while time.perf_counter() < start + 0.5: pass\n"
        "print((waited_s() - before) / (time.perf_counter() - start))\n"
        "other.kill()\n"
    )
    share = float(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    # On a busy machine there may be a third one.
    assert share > 0.3


def test_work_of_others_counts_and_work_of_ones_own_children_does_not():
    before = moment()._replace(own_s=0.0, busy_s=0.0, wall_s=0.0, stolen_s=0.0)
    cores = os.cpu_count()
    own = before._replace(own_s=10.0 * cores, busy_s=10.0 * cores, wall_s=10.0)
    others = before._replace(own_s=2.0 * cores, busy_s=7.0 * cores, wall_s=10.0, stolen_s=1.0 * cores)
    assert between(before, own)["others_share"] == 0.0
    found = between(before, others)
    assert found["others_share"] == pytest.approx(0.5) and found["stolen_share"] == pytest.approx(0.1)


def test_looking_at_the_machine_takes_little():
    start = time.process_time()
    moment()
    assert time.process_time() - start < 0.5
