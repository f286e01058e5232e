"""Registered operators, for autograd and the compiler, and their device check."""

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from efficient_attn.errors import ShapeError, UnsupportedError

# Functions of the operators, by name.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function without side effects as `torch.ops.efficient_attn.<name>`, for every device.

    `torch.library.custom_op` imports the compiler at the first call in a process, which takes seconds.
    """

    def register(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def uncompiled(*args: Any) -> Any:
            # A process that has not imported the compiler compiles nothing.
            return (_disabled(function) if "torch._dynamo" in sys.modules else function)(*args)

        FUNCTIONS[name] = function
        path = f"efficient_attn::{name}"
        torch.library.define(path, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(path, "default", uncompiled)
        return getattr(torch.ops.efficient_attn, name).default

    return register


@cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which the compiler leaves alone."""
    return torch.compiler.disable(function)


def check_one_device(**inputs: Any) -> None:
    """Refuse tensors on several devices; every fake implementation of an operator calls this function.

    Torch runs the fake implementation as soon as one argument lies on meta. The result then lies on the
    device of the other arguments and holds uninitialised memory.
    """
    (first, reference), *rest = ((name, x) for name, x in inputs.items() if isinstance(x, Tensor))
    for name, x in rest:
        if x.device != reference.device:
            raise ShapeError(
                f"{name} lies on {x.device} and {first} on {reference.device}; move one to the other."
            )


def refuse_derivatives(ctx: Any, *gradients: Any) -> Any:
    """Backward pass of an operator that computes gradients."""
    raise UnsupportedError(
        "The gradients of this attention have no derivatives of their own; backend 'exact-dense' has "
        "derivatives of every order."
    )
