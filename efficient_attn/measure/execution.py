"""Executions of a call other than eager: compiled by torch.compile, or replayed from a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from efficient_attn.errors import UnsupportedError
from efficient_attn.measure.checked import WrongOutputError
from efficient_attn.measure.record import COMPILED
from efficient_attn.registry import BackendSpec

Call = Callable[[], Any]

# Calls on a side stream before a capture, as torch's documentation asks.
_CALLS_BEFORE_CAPTURE = 3


def executed(
    execution: str, module: Any, called: Callable[[Any], Call], *, spec: BackendSpec, device: str
) -> Call:
    """The call compiled or captured, made once and held against the eager call.

    Args:
        called: Function that makes the measured call of a module.
        spec: The backend in the module.
    """
    if execution == COMPILED and not spec.capabilities.compile:
        raise UnsupportedError(
            f"Backend {spec.name!r} does not support torch.compile; measure it without --compile."
        )
    call = called(_compiled(module)) if execution == COMPILED else _captured(called(module), device)
    _check_alike(call(), called(module)())
    return call


def _compiled(module: Any) -> Any:
    """The module as one graph for the measured shapes; a graph break is an error."""
    # Compiled code of earlier points counts against the limit of recompilations, beyond which torch is eager.
    torch.compiler.reset()
    return torch.compile(module, fullgraph=True, dynamic=False)


def _captured(call: Call, device: str) -> Call:
    """Replay of the kernels of the call, from inputs in place."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_CALLS_BEFORE_CAPTURE):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _check_alike(result: Any, eager: Any) -> None:
    """Refuse results that are not finite, or unlike the eager ones in number, shape or dtype."""
    found, wanted = (one if isinstance(one, tuple) else (one,) for one in (result, eager))
    forms = [[_form(one) for one in side] for side in (found, wanted)]
    if forms[0] != forms[1]:
        raise WrongOutputError(f"the results are {forms[0]}, of the eager call {forms[1]}.")
    if not all(one is None or one.isfinite().all() for one in found):
        raise WrongOutputError("the results are not finite, although those of the eager call are.")


def _form(one: Tensor | None) -> tuple[Any, ...] | None:
    return None if one is None else (list(one.shape), one.dtype, one.device)
