"""A call that fails at any operator leaves the process as it was."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import random_qkv
from torch.utils._python_dispatch import TorchDispatchMode

import efficient_attn as ea
from efficient_attn.conformance.modules import _globals
from efficient_attn.ops.linear import causal as linear_causal
from efficient_attn.ops.linear import full as linear_full
from efficient_attn.ops.paths import VARIABLE

SIZES = {"window": 5, "window-clusters": 4, "linformer": 4}


def built(name: str, causal: bool) -> ea.Backend:
    size = ea.spec(name).size_option
    options = {} if size is None else {size: SIZES.get(name, 8)}
    return ea.build(name, head_dim=8, max_tokens=96, causal=causal, **options)


def calls(name: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """All that a backend can be asked for."""
    capabilities = ea.spec(name).capabilities
    q, k, v = (x.float().requires_grad_() for x in random_qkv(1, 4, 2, 70, 70))
    for causal in sorted({False, capabilities.causal}):
        yield "build", lambda causal=causal: built(name, causal)
        backend = built(name, causal)
        if backend.needs_calibration:
            yield "calibrate", lambda b=backend: b.calibrate(q.detach(), k.detach())
            backend.calibrate(q.detach(), k.detach())
        mask = torch.arange(70)[None] > 3
        yield "forward and backward", lambda b=backend, m=mask: b(q, k, v, key_mask=m).sum().backward()
        yield "weights", lambda b=backend: b.attention_weights(q, k)
        if name.startswith("performer-"):
            yield "redraw", lambda b=backend: b.redraw(3)
        if causal and capabilities.streaming:
            yield "extend", lambda b=backend: b.extend(q, k, v, b.extend(q, k, v)[1])


def assert_untouched(before: dict[str, Any], where: str) -> None:
    after = _globals()
    # Python's generator is drawn from by the checks of shapes.
    changed = [key for key, value in before.items() if after[key] != value and key != "random's generator"]
    assert not changed, (where, changed)


class FailsAt(TorchDispatchMode):
    """Raises in place of an operator, by its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left == 0:
            raise MemoryError("an operator failed")
        self._left -= 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ea.list_backends())
def test_calls_that_fail_at_any_operator_leave_the_process_as_it_was(name):
    for where, call in calls(name):
        # The first operators make torch import further modules, which set warning filters.
        call()
        before = _globals()
        number, failed = 0, True
        while failed:
            try:
                with FailsAt(number):
                    call()
                failed = False
            except MemoryError:
                # Each of the first operators, then fewer and fewer.
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
    before = _globals()
    monkeypatch.setattr(linear_full, full, fails)
    monkeypatch.setattr(linear_causal, causal, fails)
    q, k, v = (x.float() for x in random_qkv(1, 2, 2, 70, 70))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for form in (False, True):
            with pytest.raises(MemoryError):
                built(name, form)(q, k, v)
            assert torch.is_autocast_enabled("cpu")
    assert_untouched(before, name)
