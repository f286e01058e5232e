"""Registered operators: device check, and the transforms of torch.func (grad, vmap, jacrev).

`torch.library` serves autograd and the compiler; the transforms need an `autograd.Function` as well.
Batch entries are independent, so a mapped axis is folded into the batch.
"""

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from efficient_attn.errors import ShapeError, UnsupportedError

# Arguments without a batch axis: parameters of the model.
_SHARED = {"directions", "log_weights"}

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
    """The operator, registered with its gradient for autograd and for the transforms of torch.func.

    Args:
        registered: An operator, without keyword arguments.
        backward: Takes a context and the output gradients; None: a backward pass raises an error.
        keep: Takes a context, the inputs and the output, and saves for `backward`.
    """
    backward, keep = backward or _refuse_derivatives, keep or (lambda ctx, inputs, output: None)
    torch.library.register_autograd(registered, backward, setup_context=keep)
    shared = [argument.name in _SHARED for argument in registered._schema.arguments]

    def over_batches(info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
        if any(dim is not None for dim, without_batch in zip(in_dims, shared, strict=True) if without_batch):
            return _one_by_one(carrier.apply, info.batch_size, in_dims, args)
        return _folded(carrier.apply, info.batch_size, in_dims, args, shared)

    members = {
        "forward": lambda *args: registered(*args),
        "setup_context": keep,
        "backward": backward,
        "jvp": _refuse_tangents,
        "vmap": over_batches,
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


def _folded(
    call: Callable, size: int, in_dims: tuple, args: tuple, shared: list[bool]
) -> tuple[tuple, tuple]:
    """One call on a batch of all mapped entries."""

    def entries_first(x: Tensor, dim: int | None) -> Tensor:
        return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)

    whole = [
        x if without_batch or not isinstance(x, Tensor) else entries_first(x, dim).flatten(0, 1)
        for x, dim, without_batch in zip(args, in_dims, shared, strict=True)
    ]
    outputs = call(*whole)
    return tuple(x.unflatten(0, (size, len(x) // size)) for x in outputs), (0,) * len(outputs)


def _one_by_one(call: Callable, size: int, in_dims: tuple, args: tuple) -> tuple[tuple, tuple]:
    """One call per mapped entry, for mapped parameters (an ensemble of models)."""
    outputs = [
        call(*(x if dim is None else x.select(dim, number) for x, dim in zip(args, in_dims, strict=True)))
        for number in range(size)
    ]
    return tuple(map(torch.stack, zip(*outputs, strict=True))), (0,) * len(outputs[0])


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
