"""Every backend on a device other than the CPU: its outputs stay there, in the dtype of the inputs.

The device is meta, which has no memory. A dispatch mode enters the bodies of registered operators, answers
the questions that they ask the device, and writes down operators that mix devices or make float64 tensors. A
copy to the host raises on meta.
"""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_launches import SCALARS, Entering, line, prepared
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import efficient_attn as ea
from efficient_attn.ops import dtypes
from efficient_attn.ops.dtypes import float64_device
from efficient_attn.ops.linear.kernel import moments
from efficient_attn.transformer.positions import add_sinusoidal_positions, rotate

HEADS, HEAD_DIM = 2, 8
# Two chunks of every backend.
TOKENS = 66
SIZES = {"rank": 2, "window": 5, "num_features": 16, "block": 2, "keys": 2}


def calls() -> Iterator[tuple[str, bool, str]]:
    """Backend, causality and verb: gradients, after a forward pass, or `extend`, twice."""
    for name in ea.list_backends():
        can = ea.spec(name).capabilities
        yield name, False, "gradients"
        if can.causal:
            yield name, True, "gradients"
        if can.streaming:
            yield name, True, "extend"


class Watch(Entering):
    """Dispatch mode for meta.

    Attributes:
        faults: Operators that no GPU should run, with their file and line.
        weak: Answer to the question whether a row or a chunk needs a guard.
    """

    def __init__(self, *, weak: bool = False) -> None:
        super().__init__()
        self.weak = weak
        self.faults: set[str] = set()

    def seen(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        given = _tensors((args, kwargs))
        memory = all(x.device.type == "cpu" and type(x) is Tensor for x in given)
        if name in SCALARS and not memory:
            return self._answer(given[0])
        if name == "nonzero" and not memory:
            return given[0].new_ones(1, given[0].ndim, dtype=torch.int64)
        devices = {x.device.type for x in given if x.ndim}
        if len(devices) > 1 and name != "copy_":
            self.faults.add(f"{name} mixes {' and '.join(sorted(devices))} at {line()}")
        out = func(*args, **kwargs)
        if any(x.is_meta and x.dtype is torch.float64 for x in _tensors(out)):
            self.faults.add(f"{name} makes float64 at {line()}")
        return out

    def _answer(self, x: Tensor) -> bool | int | float:
        if x.dtype is torch.bool:
            return self.weak
        return (1e9 if self.weak else 1.0) if x.is_floating_point() else 1


def _tensors(x: Any) -> list[Tensor]:
    return [one for one in tree_leaves(x) if isinstance(one, Tensor)]


def _gradients(backend: ea.Backend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Any]:
    """Results, and tensors whose shape, dtype and device they have."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = backend(*leaves, key_mask=mask)
    return [(out, v), *zip(torch.autograd.grad(out, leaves, torch.ones_like(out)), leaves, strict=True)]


def _extend(backend: ea.Backend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Any]:
    with torch.no_grad():
        out, state = backend.extend(q, k, v, key_mask=mask)
        one = [x[..., :1, :] for x in (q, k, v)]
        return [(out, v), (backend.extend(*one, state)[0], one[2])]


@pytest.mark.parametrize(
    ("weak", "call"),
    [
        # Every verb and nearly every backend is in the quick run.
        pytest.param(weak, call, marks=pytest.mark.slow if weak or number % 4 else ())
        for weak in (False, True)
        for number, call in enumerate(calls())
    ],
    ids=str,
)
def test_a_call_on_meta_mixes_no_devices_and_makes_no_float64(weak, call):
    name, causal, verb = call
    sizes = {size: SIZES[size]} if (size := ea.spec(name).size_option) in SIZES else {}
    # A weak chunk is halved down to single tokens.
    tokens, dtype = (3, torch.bfloat16) if weak else (TOKENS, torch.float32)
    backend, inputs = prepared(name, causal=causal, tokens=tokens, heads=HEADS, head_dim=HEAD_DIM, **sizes)
    q, k, v = (x.to("meta", dtype) for x in inputs)
    mask = torch.empty(1, tokens, dtype=torch.bool, device="meta")
    with Watch(weak=weak) as watch:
        results = (_gradients if verb == "gradients" else _extend)(backend.to("meta"), q, k, v, mask)
    # The reference of every choice of keys ranks in float64 where there is one.
    wide = name == "oracle-topk"
    assert sorted(x for x in watch.faults if not (wide and "float64" in x)) == []
    for x, like in results:
        assert (x.shape, x.dtype, x.device) == (like.shape, dtype, q.device)


def test_positions_make_no_float64_on_a_device_without_it():
    x = torch.empty(1, 5, 8, device="meta", dtype=torch.bfloat16)
    with patch.object(dtypes, "WITHOUT_FLOAT64", {"meta"}), Watch() as watch:
        made = [rotate(x, 3), add_sinusoidal_positions(x, 3)]
    assert not watch.faults
    assert {(y.device.type, y.dtype) for y in made} == {("meta", torch.bfloat16)}


def test_moments_are_float64_on_the_cpu_for_a_device_without_it():
    with FakeTensorMode():
        found = moments(torch.empty(1, 2, 5, 8, device="mps"), 5)
    assert {(x.device.type, x.dtype) for x in found[:2]} == {("cpu", torch.float64)}


def test_only_devices_without_float64_leave_it_to_the_cpu():
    devices = [torch.device(name) for name in ("cpu", "cuda:1", "mps")]
    assert [float64_device(device) for device in devices] == [*devices[:2], torch.device("cpu")]
