"""The environment: what explains a number, and nothing that names a person or a host."""

import getpass
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from efficient_attn.measure import environment as module
from efficient_attn.measure.environment import (
    available_bytes,
    between,
    environment,
    gpu_state,
    hide_paths,
    moment,
    usable_cores,
    waited_s,
)
from efficient_attn.ops import paths
from efficient_attn.ops.paths import VARIABLE


def test_machine_and_software_are_told_in_strict_json():
    found = environment(command=["efficient-attn", "bench"])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["torch"]["version"] == torch.__version__ and found["torch"]["threads"] >= 1
    assert found["processor"] and found["cores_usable"] == usable_cores() >= 1
    assert found["packages"]["numpy"] and found["gpu"] is None


def test_a_gpu_has_its_driver_and_clocks_where_the_driver_answers(monkeypatch):
    kind = SimpleNamespace(name="GPU", total_memory=2**30, uuid="12ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: kind)
    asked = []
    monkeypatch.setattr(module, "_ask", lambda command: asked.append(command) or "580.1, 1980 MHz")
    known = module._gpu("cuda:1")
    assert "--id=GPU-12ab" in asked[0]
    assert known["driver_version"] == "580.1" and known["clocks.max.sm"] == "1980 MHz"
    monkeypatch.setattr(module, "_ask", lambda command: None)
    assert module._gpu("cuda:1") == {**known, **dict.fromkeys(module._DRIVER)}


def test_the_state_of_a_gpu_is_what_its_driver_answers_and_unknown_otherwise(monkeypatch):
    kind = SimpleNamespace(uuid="12ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: kind)
    asked = []
    answer = "1980 MHz, 0x0000000000000024"
    monkeypatch.setattr(module, "_ask", lambda command: asked.append(command) or answer)
    known = {"sm_clock_hz": 1.98e9, "throttle_reasons": 0x24}
    assert gpu_state("cuda:1") == known
    assert asked[0][:2] == ["nvidia-smi", "--id=GPU-12ab"] and "clocks.sm,clocks_event" in asked[0][2]
    monkeypatch.setattr(module, "_ask", lambda command: answer.replace("1980 MHz", "[N/A]"))
    assert gpu_state("cuda") == {**known, "sm_clock_hz": None}
    for silent in (None, "", "No devices were found", "?, ?", "a, b, c"):
        monkeypatch.setattr(module, "_ask", lambda command, silent=silent: silent)
        assert gpu_state("cuda") == dict.fromkeys(known)
    assert gpu_state("cpu") == {}


def test_the_kernels_in_force_are_named_once_or_with_their_dtypes(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert environment()["kernels"] == "cpu"
    monkeypatch.setenv(VARIABLE, "torch")
    found = environment()
    assert found["kernels"] == "torch" and found["variables"][VARIABLE] == "torch"
    monkeypatch.setattr(paths, "kernels", lambda device, dtype: "torch" if dtype.itemsize == 8 else "flex")
    assert environment()["kernels"] == "flex (bfloat16, float16, float32), torch (float64)"


def test_only_variables_of_the_list_are_told(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    text = json.dumps(environment())
    assert "hunter2" not in text and '"OMP_NUM_THREADS": "2"' in text


def test_host_user_and_home_are_not_told():
    command = [
        "efficient-attn",
        "bench",
        "--backend",
        f"{Path.home()}/secret/mine.py:f",
        "--out=/srv/ada/out",
    ]
    text = json.dumps(environment(command=command))
    for private in (
        platform.node(),
        str(Path.home()),
        "/secret",
        "/srv",
        str(Path(module.__file__).parents[2]),
    ):
        assert len(private) < 4 or private not in text
    user = getpass.getuser()
    assert len(user) < 4 or f"/{user}" not in text


def test_paths_are_cut_to_what_lies_below_the_current_folder_or_to_their_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        f"{tmp_path}/a/own.py:f",
        "/home/ada/b.py:g,exact",
        "--out=~/x/runs",
        "C:\\Users\\ada\\c.py",
        "d/e.py:h",
    ]
    assert hide_paths(words) == ["a/own.py:f", "b.py:g,exact", "--out=runs", "c.py", "d/e.py:h"]


def test_words_that_are_no_paths_stay_as_they_are():
    words = ["256:4096:x2", "--set", "linformer.rank=1,2", "3/4", "performer-positive"]
    assert hide_paths(words) == words


def test_available_memory_is_the_smaller_of_machine_and_container(monkeypatch):
    monkeypatch.setattr(module, "_memory_line", lambda name: 1000)
    monkeypatch.setattr(module, "_container_bytes", lambda: 600)
    assert available_bytes() == 600
    monkeypatch.setattr(module, "_container_bytes", lambda: None)
    assert available_bytes() == 1000
    monkeypatch.setattr(module, "_memory_line", lambda name: None)
    assert available_bytes() is None


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
