"""Every backend on a device other than the CPU: its outputs stay there, in the dtype of the inputs.

The device is meta, which has no memory. A dispatch mode enters the bodies of registered operators, answers
the questions that they ask the device, and writes down operators that mix devices or make float64 tensors. A
copy to the host raises on meta.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from launches import SCALARS, Entering, line, prepared
from torch import Tensor, nn
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


class Call(NamedTuple):
    """A call of a backend.

    Attributes:
        verb: "gradients", after a forward pass, or "extend", twice.
        weak: Answer to the question whether a row or a chunk needs a guard.
    """

    backend: str
    causal: bool
    verb: str
    weak: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def tokens(self) -> int:
        # A weak chunk is halved down to single tokens.
        return 3 if self.weak else TOKENS


def calls(**answers: Any) -> Iterator[Call]:
    """All verbs of all backends."""
    for name in ea.list_backends():
        can = ea.spec(name).capabilities
        yield Call(name, False, "gradients", **answers)
        if can.causal:
            yield Call(name, True, "gradients", **answers)
        if can.streaming:
            yield Call(name, True, "extend", **answers)


class Watch(Entering):
    """Dispatch mode for one device.

    Attributes:
        faults: Operators that no GPU should run, with their file and line.
    """

    def __init__(self, device: str, *, weak: bool) -> None:
        super().__init__()
        self.device, self.weak = device, weak
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
        if any(x.device.type == self.device and x.dtype is torch.float64 for x in _tensors(out)):
            self.faults.add(f"{name} makes float64 at {line()}")
        return out

    def _answer(self, x: Tensor) -> bool | int | float:
        if x.dtype is torch.bool:
            return self.weak
        return (1e9 if self.weak else 1.0) if x.is_floating_point() else 1


def _tensors(x: Any) -> list[Tensor]:
    return [one for one in tree_leaves(x) if isinstance(one, Tensor)]


def move(module: nn.Module, device: str) -> None:
    """Put empty tensors of a device in place of parameters and buffers."""
    for part in module.modules():
        for kept in (part._parameters, part._buffers):
            for name, x in kept.items():
                if x is not None:
                    empty = torch.empty(x.shape, dtype=x.dtype, device=device)
                    kept[name] = nn.Parameter(empty) if isinstance(x, nn.Parameter) else empty


def _gradients(backend: ea.Backend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Any]:
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = backend(*leaves, key_mask=mask)
    return [(out, v), *zip(torch.autograd.grad(out, leaves, torch.ones_like(out)), leaves, strict=True)]


def _extend(backend: ea.Backend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Any]:
    with torch.no_grad():
        out, state = backend.extend(q, k, v, key_mask=mask)
        one = [x[..., :1, :] for x in (q, k, v)]
        return [(out, v), (backend.extend(*one, state)[0], one[2])]


# Functions that give results with tensors of the shape, dtype and device that they have.
VERBS: dict[str, Callable[..., list[tuple[Tensor, Tensor]]]] = {"gradients": _gradients, "extend": _extend}


@pytest.mark.parametrize(
    "call",
    [
        # Every verb and nearly every backend is in the quick run.
        *(pytest.param(one, marks=pytest.mark.slow if i % 4 else ()) for i, one in enumerate(calls())),
        *(pytest.param(one, marks=pytest.mark.slow) for one in calls(weak=True, dtype=torch.bfloat16)),
    ],
    ids=lambda call: f"{call.backend}-{call.causal}-{call.verb}-{call.weak}",
)
def test_a_call_on_meta_mixes_no_devices_and_makes_no_float64(call):
    sizes = {size: SIZES[size]} if (size := ea.spec(call.backend).size_option) in SIZES else {}
    backend, inputs = prepared(
        call.backend, causal=call.causal, tokens=call.tokens, heads=HEADS, head_dim=HEAD_DIM, **sizes
    )
    move(backend, "meta")
    q, k, v = (torch.empty(x.shape, dtype=call.dtype, device="meta") for x in inputs)
    mask = torch.empty(1, call.tokens, dtype=torch.bool, device="meta")
    with Watch("meta", weak=call.weak) as watch:
        found = VERBS[call.verb](backend, q, k, v, mask)
    # The reference of every choice of keys ranks in float64 where there is one.
    wide = call.backend == "oracle-topk"
    assert sorted(x for x in watch.faults if not (wide and "float64" in x)) == []
    for x, like in found:
        assert (x.shape, x.dtype, x.device) == (like.shape, call.dtype, q.device)


def test_positions_make_no_float64_on_a_device_without_it():
    x = torch.empty(1, 5, 8, device="meta", dtype=torch.bfloat16)
    with patch.object(dtypes, "WITHOUT_FLOAT64", {"meta"}), Watch("meta", weak=False) as watch:
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
