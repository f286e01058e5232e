"""The environment: what explains a number, and nothing that names a person or a host."""

import getpass
import json
import os
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from efficient_attn.measure import environment
from efficient_attn.ops import paths, verdict


def test_machine_and_software_are_told_in_strict_json_and_host_user_home_and_variables_are_not(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    words = ["efficient-attn", "bench", "--backend", f"{Path.home()}/secret/mine.py:f", "--out=/srv/ada/out"]
    about = environment.environment(command=words)
    text = json.dumps(about, allow_nan=False)
    assert json.loads(text) == about
    assert about["torch"]["version"] == torch.__version__ and about["torch"]["threads"] >= 1
    assert about["processor"] and about["cores_usable"] == environment.usable_cores() >= 1
    assert about["packages"]["numpy"] and about["gpu"] is None and '"OMP_NUM_THREADS": "2"' in text
    checkout = str(Path(environment.__file__).parents[2])
    for private in ("hunter2", platform.node(), str(Path.home()), "/secret", "/srv", checkout):
        assert len(private) < 4 or private not in text
    user = getpass.getuser()
    assert len(user) < 4 or f"/{user}" not in text


@pytest.mark.parametrize(
    ("tiles", "products", "name"),
    [(True, True, "amx_bf16"), (False, True, "avx512_bf16"), (False, False, "none")],
)
def test_products_of_bfloat16_are_a_matter_of_the_instruction_set(monkeypatch, tiles, products, name):
    sets = {"avx512_bf16": products, "amx_bf16": tiles}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: sets, raising=False)
    assert environment.environment()["torch"]["bfloat16"] == name
    # An older PyTorch.
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: products, raising=False)
    assert paths.bfloat16_instructions() == name
    for value, pretended in {"float32": "none", "amx_bf16": "amx_bf16", "torch": name}.items():
        monkeypatch.setenv("EFFICIENT_ATTN_KERNELS", value)
        assert paths.bfloat16_instructions() == pretended


@pytest.mark.parametrize(
    ("taken", "cores", "usable", "free"),
    [(0.0, 2, 2, 2), (0.08, 2, 2, 2), (0.5, 2, 2, 1), (1.0, 2, 2, 1), (0.5, 64, 4, 4), (None, 2, 2, 2)],
)
def test_free_cores_are_those_that_others_leave(monkeypatch, taken, cores, usable, free):
    monkeypatch.setattr(environment, "between", lambda *moments: {"others_share": taken})
    monkeypatch.setattr(environment, "usable_cores", lambda: usable)
    monkeypatch.setattr(environment.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(environment, "_READING_S", 0.0)
    assert environment.free_cores() == free


def test_a_gpu_is_described_with_its_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    about = SimpleNamespace(total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(verdict, "driver_version", lambda: "570.1")
    gpu = environment.environment(device="cuda:1")["gpu"]
    assert (gpu["name"], gpu["memory_bytes"], gpu["driver_version"]) == ("GPU", 2**30, "570.1")


def test_paths_are_cut_to_what_lies_below_the_current_folder_or_to_their_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = {
        f"{tmp_path}/a/own.py:f": "a/own.py:f",
        "/home/ada/b.py:g,exact": "b.py:g,exact",
        "--out=~/x/runs": "--out=runs",
        "C:\\Users\\ada\\c.py": "c.py",
        **{word: word for word in ("d/e.py:h", "256:4096:x2", "linformer.rank=1,2", "3/4")},
    }
    assert environment.environment(command=list(shown))["command"] == list(shown.values())


def test_available_memory_is_the_smaller_of_machine_and_container(monkeypatch):
    texts = {"/sys/fs/cgroup/memory.current": "50"}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[path.as_posix()])
    machine = "MemAvailable:  1 kB\n"
    for free, limit, least in ((machine, "650", 600), (machine, "max", 1024), ("", "max", None)):
        texts |= {"/proc/meminfo": free, "/sys/fs/cgroup/memory.max": limit}
        assert environment.available_bytes() == least


def test_work_of_others_is_a_share_of_all_cores():
    before, after = environment.Moment(1.0, 10.0), environment.Moment(3.0, 14.0)
    assert environment.between(before, after) == {"others_share": 0.5}
    assert environment.between(after, environment.Moment(2.9, 18.0)) == {"others_share": 0.0}
    assert environment.between(before, None) == {"others_share": None}


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux alone counts the work of all processes")
def test_work_of_this_process_and_its_children_is_not_that_of_others(monkeypatch):
    before, times = environment.moment(), os.times()
    monkeypatch.setattr(os, "times", lambda: (times.user, times.system, times.children_user + 1e6, 0.0, 0.0))
    after = environment.moment()
    assert after.others_s < before.others_s - 9e5 and after.all_s >= before.all_s
