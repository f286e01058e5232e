"""Registered operators, for autograd and the compiler."""

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from efficient_attn.errors import UnsupportedError

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


def refuse_derivatives(ctx: Any, *gradients: Any) -> Any:
    """Backward pass of an operator that computes gradients."""
    raise UnsupportedError(
        "The gradients of this attention have no derivatives of their own; backend 'exact-dense' has "
        "derivatives of every order."
    )
