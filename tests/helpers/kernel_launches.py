"""Kernel launches and host synchronisations of a call, counted on CPU tensors.

The path of a device other than the CPU runs on the CPU (`other_device`), and a dispatch mode sees its
operators, also inside registered operators and backward passes. Views and allocations launch nothing.
tests/backends/test_stand_in.py shows copies to the host.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import efficient_attn as ea
from efficient_attn.ops import paths
from efficient_attn.ops.operators import FUNCTIONS

# Whether bounds hold for backward passes: formulas of derivatives of earlier versions take more operators.
COUNTED = torch.__version__ >= (2, 13)

_PACKAGE = Path(ea.__file__).parent

# Operators that allocate or relabel memory, apart from those with `is_view`.
_FREE = {
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_"),
    *("detach", "_unsafe_view", "_reshape_alias", "lift_fresh", "_has_compatible_shallow_copy_type"),
}
# Operators that return a number to the host.
SCALARS = {"_local_scalar_dense", "is_nonzero", "equal"}
# Operators whose result, or its size, the host waits for.
SYNC = SCALARS | {
    *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
    "repeat_interleave",
}
_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_"}


@contextmanager
def other_device() -> Iterator[None]:
    """The path of a device other than the CPU, on the CPU."""
    with patch.dict(os.environ, {paths.VARIABLE: "torch"}):
        yield


@dataclass
class Count:
    """Operators of a call.

    Attributes:
        operators: Number of launches by operator.
        syncs: Number of host synchronisations by file and line.
    """

    operators: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        return self.operators.total()


class Entering(TorchDispatchMode):
    """Dispatch mode that runs `seen` for every operator, inside registered and composite operators too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = func.name().split(".")[0].split("::")
        if namespace == "efficient_attn":
            with self:
                return FUNCTIONS[name](*args, **kwargs)
        if namespace == "aten" and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        return self.seen(name, func, args, kwargs)

    def seen(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operator."""
        return func(*args, **kwargs)


class Counting(Entering):
    """Dispatch mode that fills a count."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def seen(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name in SYNC or (name in _INDEX and any(map(_is_mask, args[1]))):
            self.count.syncs[line()] += 1
        if not (func.is_view or name in _FREE or name in SCALARS):
            self.count.operators[name] += 1
        return func(*args, **kwargs)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def line() -> str:
    """File and line of the package that called the current operator."""
    frame = sys._getframe()
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_PACKAGE):
            return f"{file.relative_to(_PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def counted(call: Callable[[], Any]) -> Count:
    """The launches and synchronisations of a call."""
    with Counting(Count()) as counting:
        call()
    return counting.count


def prepared(
    name: str, *, causal: bool, tokens: int, heads: int, head_dim: int, **options: Any
) -> tuple[ea.Backend, list[torch.Tensor]]:
    """A backend, calibrated if it needs this, and q, k and v [1 heads tokens head_dim] ~ N(0, 1)."""
    backend = ea.build(name, head_dim=head_dim, num_heads=heads, max_tokens=tokens, causal=causal, **options)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, tokens, head_dim, generator=generator).unbind()
    if backend.needs_calibration:
        backend.calibrate(q, k)
    return backend, [q, k, v]


def forward(backend: ea.Backend, inputs: list[torch.Tensor]) -> Count:
    """Count of a forward pass without gradients."""
    with torch.no_grad():
        return counted(lambda: backend(*inputs))


def forward_backward(backend: ea.Backend, inputs: list[torch.Tensor]) -> Count:
    """Count of a forward pass and of the gradients with respect to q, k and v."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    gradient = torch.ones_like(inputs[2])
    return counted(lambda: torch.autograd.grad(backend(*leaves), leaves, gradient))


def step(backend: ea.Backend, inputs: list[torch.Tensor]) -> Count:
    """Count of a decoding step, one token after a state of the others, which an earlier step left."""
    with torch.no_grad():
        _, state = backend.extend(*(x[..., :-2, :] for x in inputs))
        _, state = backend.extend(*(x[..., -2:-1, :] for x in inputs), state)
        return counted(lambda: backend.extend(*(x[..., -1:, :] for x in inputs), state))
