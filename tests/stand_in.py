"""Calls on a device without memory: meta, or on fake tensors a stand-in of a GPU.

A dispatch mode enters the bodies of registered operators, answers the questions that they ask the device,
and writes down operators that mix devices, that make float64 tensors, or that copy to the host.

    python tests/stand_in.py

runs every backend on the stand-in, which a process cannot give back, and prints a line of JSON.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from launches import SCALARS, Entering, line, prepared
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves

import efficient_attn as ea
from efficient_attn.ops import dtypes

STAND_IN = "standin"
HEADS, HEAD_DIM = 2, 8
# Two chunks of every backend.
TOKENS = 66
SIZES = {"rank": 2, "window": 5, "num_features": 16}


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
            self._note(f"{name} mixes {' and '.join(sorted(devices))}")
        out = func(*args, **kwargs)
        for x in _tensors(out):
            if x.device.type == self.device and x.dtype is torch.float64:
                self._note(f"{name} makes float64")
            if x.device.type == "cpu" and self.device in devices:
                self._note(f"{name} copies to the host")
        return out

    def _answer(self, x: Tensor) -> bool | int | float:
        if x.dtype is torch.bool:
            return self.weak
        return (1e9 if self.weak else 1.0) if x.is_floating_point() else 1

    def _note(self, fault: str) -> None:
        self.faults.add(f"{fault} at {line()}")


def _tensors(x: Any) -> list[Tensor]:
    return [one for one in tree_leaves(x) if isinstance(one, Tensor)]


def fake_or_meta(device: str) -> AbstractContextManager[Any]:
    """The mode in which tensors of a device without memory exist."""
    return nullcontext() if device == "meta" else FakeMode()


class FakeMode(FakeTensorMode):
    """Fake tensors that no constructor puts on the stand-in in fact."""

    avoid_device_init = True


def move(module: nn.Module, device: str) -> None:
    """Put empty tensors of a device in place of parameters and buffers."""
    for part in module.modules():
        for kept in (part._parameters, part._buffers):
            for name, x in kept.items():
                if x is not None:
                    empty = torch.empty(x.shape, dtype=x.dtype, device=device)
                    kept[name] = nn.Parameter(empty) if isinstance(x, nn.Parameter) else empty


def faults(call: Call, device: str) -> list[str]:
    """Faults of a call; also outputs and gradients of another device, dtype or shape than the inputs'."""
    sizes = {size: SIZES[size]} if (size := ea.spec(call.backend).size_option) in SIZES else {}
    backend, inputs = prepared(
        call.backend, causal=call.causal, tokens=call.tokens, heads=HEADS, head_dim=HEAD_DIM, **sizes
    )
    with fake_or_meta(device):
        move(backend, device)
        q, k, v = (torch.empty(x.shape, dtype=call.dtype, device=device) for x in inputs)
        mask = torch.empty(1, call.tokens, dtype=torch.bool, device=device)
        watch = Watch(device, weak=call.weak)
        with watch:
            found = VERBS[call.verb](backend, q, k, v, mask)
        wrong = [
            f"{list(x.shape)}, {x.dtype}, {x.device} in place of {list(like.shape)}"
            for x, like in found
            if (x.shape, x.dtype, x.device) != (like.shape, call.dtype, q.device)
        ]
    return wrong + sorted(watch.faults)


def _gradients(
    backend: ea.Backend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> list[tuple[Tensor, Tensor]]:
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = backend(*leaves, key_mask=mask)
    return [(out, v), *zip(torch.autograd.grad(out, leaves, torch.ones_like(out)), leaves, strict=True)]


def _extend(
    backend: ea.Backend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        out, state = backend.extend(q, k, v, key_mask=mask)
        one = [x[..., :1, :] for x in (q, k, v)]
        return [(out, v), (backend.extend(*one, state)[0], one[2])]


VERBS: dict[str, Callable[..., list[tuple[Tensor, Tensor]]]] = {"gradients": _gradients, "extend": _extend}


def without_float64(device: str) -> AbstractContextManager[Any]:
    """Devices without float64, this one among them."""
    return patch.object(dtypes, "WITHOUT_FLOAT64", {device, *dtypes.WITHOUT_FLOAT64})


def float64_faults(use: Callable[[str], list[Tensor]], device: str, *, weak: bool) -> list[str]:
    """Faults of a use on a device without float64, which may copy to the host, and results left there."""
    with fake_or_meta(device), without_float64(device), Watch(device, weak=weak) as watch:
        wrong = [str(x.device) for x in use(device) if x.device.type != device]
    return wrong + [fault for fault in sorted(watch.faults) if "to the host" not in fault]


def _calibrate(name: str, device: str) -> list[Tensor]:
    backend = ea.build(name, head_dim=HEAD_DIM, num_heads=HEADS)
    move(backend, device)
    backend.calibrate(*(torch.empty(1, HEADS, TOKENS, HEAD_DIM, device=device) for _ in range(2)))
    return list(backend.buffers())


def _generate(device: str) -> list[Tensor]:
    def step(ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.empty(*ids.shape, 11, device=device), torch.empty(len(ids), 2, device=device)

    first = torch.ones(2, 3, dtype=torch.int64, device=device)
    return [ea.generate(step, first, 3, temperature=1.0)]


def register() -> None:
    """Make the stand-in a device of this process, by PyTorch's interface for backends in Python."""
    backend_registration._setup_privateuseone_for_python_backend(STAND_IN)
    getattr(torch, STAND_IN).get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]


def main() -> None:
    register()
    found = {}
    for call in (*calls(), *calls(weak=True), *calls(dtype=torch.bfloat16)):
        try:
            found[str(call)] = faults(call, STAND_IN)
        except Exception as error:
            found[str(call)] = [f"{type(error).__name__}: {error}"]
    for name in ea.list_backends():
        if ea.spec(name).capabilities.needs_calibration:
            found[f"calibrate {name}"] = float64_faults(partial(_calibrate, name), STAND_IN, weak=True)
    found["generate"] = float64_faults(_generate, STAND_IN, weak=False)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
