"""Nothing global is touched by any call, whether it ends well or with an error at any operator."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import random_qkv
from torch.utils._python_dispatch import TorchDispatchMode

import efficient_attn as ea
from efficient_attn.ops.linear import causal as linear_causal
from efficient_attn.ops.linear import full as linear_full
from efficient_attn.ops.paths import VARIABLE

NAMES = ea.list_backends()
SIZES = {"window": 5, "window-clusters": 4, "linformer": 4}


def state_of_the_process() -> dict[str, Any]:
    cuda, deterministic = torch.backends.cuda, torch.utils.deterministic
    return {
        "generator of torch": torch.get_rng_state().tolist(),
        "generator of numpy": repr(np.random.get_state()),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autocast": [(torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in ("cpu", "cuda")],
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            deterministic.fill_uninitialized_memory,
        ),
        "matmul precision": torch.get_float32_matmul_precision(),
        "TF32": (cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "sums in half precision": (
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
        ),
        "kernels of attention": (
            cuda.flash_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "denormal numbers": float(torch.tensor(1e-40) * 1) != 0.0,
        "warning filters": list(warnings.filters),
        "environment": dict(os.environ),
    }


def assert_untouched(before: dict[str, Any], where: str) -> None:
    after = state_of_the_process()
    changed = [name for name, value in before.items() if after[name] != value]
    assert not changed, (where, changed)


def built(name: str, causal: bool) -> ea.Backend:
    size = ea.spec(name).size_option
    options = {} if size is None else {size: SIZES.get(name, 8)}
    return ea.build(name, head_dim=8, max_tokens=96, causal=causal, **options)


def calls(name: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Everything that a backend can be asked for."""
    capabilities = ea.spec(name).capabilities
    q, k, v = (x.float().requires_grad_() for x in random_qkv(1, 4, 2, 70, 70))
    for causal in sorted({False, capabilities.causal}):
        yield "build", lambda causal=causal: built(name, causal)
        backend = built(name, causal)
        if backend.needs_calibration:
            backend.calibrate(q.detach(), k.detach())
        mask = torch.arange(70)[None] > 3
        yield "forward and backward", lambda b=backend, m=mask: b(q, k, v, key_mask=m).sum().backward()
        yield "in training", lambda b=backend: b.train()(q, k, v)
        yield "weights", lambda b=backend: b.attention_weights(q, k)
        if hasattr(backend.core, "calibrate"):
            yield "calibrate", lambda b=backend: b.calibrate(q.detach(), k.detach())
        if name.startswith("performer-"):
            yield "redraw", lambda b=backend: b.redraw(3)
        if causal and capabilities.streaming:
            yield "extend", lambda b=backend: b.extend(q, k, v, b.extend(q, k, v)[1])


@pytest.fixture(scope="module", autouse=True)
def what_torch_imports_at_its_first_call() -> None:
    """The first operators make torch import further modules, which set warning filters and variables."""
    for name in ("linear-elu", "window", "exact"):
        for _, call in calls(name):
            call()


@pytest.mark.parametrize("name", NAMES)
def test_calls_leave_the_process_as_it_was(name):
    before = state_of_the_process()
    for where, call in calls(name):
        call()
        assert_untouched(before, where)


class FailsAt(TorchDispatchMode):
    """Raises in place of one of the operators that run, by its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left == 0:
            raise MemoryError("an operator failed")
        self._left -= 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_calls_that_fail_at_any_operator_leave_the_process_as_it_was(name):
    before = state_of_the_process()
    for where, call in calls(name):
        number, failed = 0, True
        while failed:
            try:
                with FailsAt(number):
                    call()
                failed = False
            except MemoryError:
                # Every one of the first operators, then fewer and fewer.
                number += 1 + number // 4
            assert_untouched(before, f"{where}, operator {number}")
        assert number > 0 or where == "build", f"{where} ran no operator"


@pytest.mark.parametrize(
    ("name", "full", "causal"),
    [
        ("performer-positive", "two_softmaxes", "causal_exponential"),
        ("performer-trig", "trigonometric_attention", "attend"),
        ("linear-elu", "whole_state", "attend"),
    ],
)
def test_an_error_inside_a_registered_operator_leaves_the_process_as_it_was(name, full, causal, monkeypatch):
    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("an operator failed")

    monkeypatch.setenv(VARIABLE, "")
    before = state_of_the_process()
    monkeypatch.setattr(linear_full, full, fails)
    monkeypatch.setattr(linear_causal, causal, fails)
    q, k, v = (x.float() for x in random_qkv(1, 2, 2, 70, 70))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for one in (False, True):
            with pytest.raises(MemoryError):
                built(name, one)(q, k, v)
            assert torch.is_autocast_enabled("cpu")
    assert_untouched(before, name)


SCRIPT = """
import random, sys
sys.path.insert(0, sys.argv[1])
from test_globals import NAMES, calls
before = random.getstate()
for name in NAMES:
    for where, call in calls(name):
        call()
        assert random.getstate() == before, (name, where)
"""


@pytest.mark.slow
def test_the_generator_of_random_is_left_alone_too():
    # In a process of its own: the runtime shape checks of the tests draw from it.
    subprocess.run([sys.executable, "-c", SCRIPT, str(Path(__file__).parent)], check=True)
