"""Registered operators: device check, and the transforms of torch.func (grad, vmap, jacrev).

`torch.library` serves autograd and the compiler; the transforms need an `autograd.Function` as well, and a
mapped axis is a loop.
"""

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from efficient_attn.errors import ShapeError, UnsupportedError

# Functions of the operators, by name.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function without side effects as `torch.ops.efficient_attn.<name>`, for every device.

    `torch.library.custom_op` imports the compiler at the first call in a process, which takes seconds.
    """

    disabled = cache(torch.compiler.disable)

    def register(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def uncompiled(*args: Any) -> Any:
            # Without an import of the compiler nothing can be compiling.
            return (disabled(function) if "torch._dynamo" in sys.modules else function)(*args)

        FUNCTIONS[name] = function
        path = f"efficient_attn::{name}"
        torch.library.define(path, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(path, "default", uncompiled)
        return getattr(torch.ops.efficient_attn, name).default

    return register


def check_one_device(**inputs: Any) -> None:
    """Refuse tensors on several devices. Every fake implementation of an operator calls this function.

    Torch runs the fake implementation as soon as one argument lies on meta. The result then lies on the
    device of the other arguments and holds uninitialised memory.
    """
    (first, reference), *rest = ((name, x) for name, x in inputs.items() if isinstance(x, Tensor))
    for name, x in rest:
        if x.device != reference.device:
            raise ShapeError(
                f"{name} lies on {x.device} and {first} on {reference.device}; move one to the other."
            )


def transformed(*args: Any) -> bool:
    """Whether a transform of torch.func is active, or a tensor carries a forward-mode derivative."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    # Outside of a dual level no tensor carries a derivative.
    return forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in args
    )


def transformable(
    registered: Any, backward: Callable | None = None, keep: Callable | None = None
) -> Callable[..., Any]:
    """Register the gradient of an operator for autograd and for the transforms of torch.func.

    Args:
        backward: Function of a context and the output gradients. None: a backward pass raises an error.
        keep: Function of a context, the inputs and the output that saves tensors for `backward`.
    """
    backward, keep = backward or _refuse_derivatives, keep or (lambda ctx, inputs, output: None)
    torch.library.register_autograd(registered, backward, setup_context=keep)

    def entry_by_entry(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple, tuple]:
        places = list(zip(args, in_dims, strict=True))
        outputs = [
            carrier.apply(*(x if dim is None else x.select(dim, number) for x, dim in places))
            for number in range(info.batch_size)
        ]
        return tuple(map(torch.stack, zip(*outputs, strict=True))), (0,) * len(outputs[0])

    members = {
        "forward": lambda *args: registered(*args),
        "setup_context": keep,
        "backward": backward,
        "jvp": _refuse_tangents,
        "vmap": entry_by_entry,
    }
    carrier: Any = type(
        registered.name(),
        (torch.autograd.Function,),
        {name: staticmethod(member) for name, member in members.items()},
    )

    def call(*args: Any) -> Any:
        if not transformed(*args):
            return registered(*args)
        return carrier.apply(*args) if torch._C._are_functorch_transforms_active() else _refuse_tangents()

    return call


def _refuse_derivatives(ctx: Any, *gradients: Any) -> Any:
    raise UnsupportedError(
        "The gradients of this attention have no derivatives of their own; backend 'exact-dense' has "
        "derivatives of every order."
    )


def _refuse_tangents(*_: Any) -> Any:
    raise UnsupportedError(
        "This attention has no forward-mode derivatives (jvp, jacfwd): use torch.func.vjp or jacrev, or "
        "backend 'exact-dense'."
    )
