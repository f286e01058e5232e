"""Every backend on a device other than the CPU: its outputs stay there, in the dtype of the inputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stand_in import Watch, calls, faults, without_float64
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from efficient_attn.ops.dtypes import float64_device
from efficient_attn.ops.linear.kernel import moments
from efficient_attn.transformer.positions import SinusoidalPositions, rotate


@pytest.mark.parametrize("call", list(calls()), ids=lambda call: f"{call.backend}-{call.causal}-{call.verb}")
def test_a_call_on_meta_mixes_no_devices_and_makes_no_float64(call):
    assert faults(call, "meta") == []


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"PyTorch {torch.__version__} cannot register a device from Python",
)
def test_a_call_on_a_stand_in_of_a_gpu_mixes_no_devices_and_makes_no_float64():
    tests = Path(__file__).parent
    # Python may leave the folder of a script off its path (PYTHONSAFEPATH).
    settings = {**os.environ, "PYTHONPATH": str(tests)}
    script = [sys.executable, str(tests / "stand_in.py")]
    done = subprocess.run(script, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {call: wrong for call, wrong in found.items() if wrong} == {}
    assert len(found) > 3 * len(list(calls()))


def test_positions_make_no_float64_on_a_device_without_it():
    x = torch.empty(1, 5, 8, device="meta", dtype=torch.bfloat16)
    with without_float64("meta"), Watch("meta", weak=False) as watch:
        made = [rotate(x, 3), SinusoidalPositions()(x, 3)]
    assert not watch.faults
    assert {(y.device.type, y.dtype) for y in made} == {("meta", torch.bfloat16)}


def test_moments_are_float64_on_the_cpu_for_a_device_without_it():
    with FakeTensorMode():
        found = moments(torch.empty(1, 2, 5, 8, device="mps"), 5)
    assert {(x.device.type, x.dtype) for x in found[:2]} == {("cpu", torch.float64)}


def test_only_devices_without_float64_leave_it_to_the_cpu():
    devices = [torch.device(name) for name in ("cpu", "cuda:1", "mps")]
    assert [float64_device(device) for device in devices] == [*devices[:2], torch.device("cpu")]


def test_the_watch_finds_what_it_is_for():
    x = torch.empty(2, device="meta")
    with Watch("meta", weak=True) as watch:
        assert bool(x.any()) and x.sum().item() > 1
        x.double()
        with pytest.raises(RuntimeError):
            x.addcmul_(torch.ones(2), torch.ones(2))
    assert {fault.partition(" at ")[0] for fault in watch.faults} == {
        "_to_copy makes float64",
        "addcmul_ mixes cpu and meta",
    }
