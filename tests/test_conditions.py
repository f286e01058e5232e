"""Conditions of a machine during a run: waiting threads, work of other processes."""

import os
import subprocess
import sys
import time

import pytest

from efficient_attn.measure.environment import between, moment, waited_s

needs_counters = pytest.mark.skipif(waited_s() is None, reason="the system does not count waiting threads")


@needs_counters
@pytest.mark.serial
def test_a_thread_that_shares_its_core_waits_about_half_of_the_time():
    script = (
        "import os, subprocess, sys, time\n"
        "from efficient_attn.measure.environment import waited_s\n"
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
