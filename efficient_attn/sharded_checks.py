"""Checks of calls inside `distributed.context_parallel`."""

from typing import Any

import torch
from torch import Tensor

from efficient_attn.errors import ShapeError, UnsupportedError
from efficient_attn.ops.sharded.agreement import check_agreement
from efficient_attn.ops.sharded.layout import Layout, layout_in_force
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import SPECS


def check_alone() -> None:
    """Refuse to compute from the tokens of one rank.

    Raises:
        UnsupportedError: If `context_parallel` is active.
    """
    if layout_in_force() is not None:
        raise UnsupportedError(
            "Inside efficient_attn's context_parallel only backend(q, k, v) and its extend without a "
            "state read the tokens of other ranks; call everything else outside, on whole sequences."
        )


def check_exact_alone(name: str, reason: str) -> None:
    """Refuse a call that stays exact, on the tokens of one rank.

    Raises:
        UnsupportedError: If `context_parallel` is active.
    """
    if layout_in_force() is None:
        return
    raise UnsupportedError(
        f"{name} stays exact, which inside context_parallel would read the tokens of this process alone: "
        f"{reason.rstrip('.')}. Serve it by a backend, such as 'exact', or call it outside, on whole "
        "sequences."
    )


def check_agreeing(
    backend: Any,
    q: Any,
    k: Any,
    v: Any,
    key_mask: Tensor | None,
    layout: Layout,
    *,
    streaming: bool = False,
) -> None:
    """Refuse backends without an exchange, and calls that differ between ranks, on all ranks alike.

    Raises:
        UnsupportedError: If the backend has no exchange between ranks.
        ShapeError: If the calls differ.
        UnsupportedError: If parameters or buffers differ.
    """
    if backend.spec.capabilities.sharded is None:
        able = ", ".join(name for name, one in sorted(SPECS.items()) if one.capabilities.sharded)
        raise UnsupportedError(
            f"Backend {backend.spec.name!r} cannot read the tokens of other ranks, inside context_parallel: "
            f"{able} can."
        )
    if streaming and not hasattr(backend.core, "extend_sharded"):
        raise UnsupportedError(
            f"Backend {backend.spec.name!r} cannot extend inside context_parallel: extend outside, on whole "
            "sequences."
        )
    tensors = {"q": q, "k": k, "v": v, "key_mask": key_mask}
    device = q.device if isinstance(q, Tensor) else torch.get_default_device()
    call = "extend of " * streaming + _description(backend, tensors, layout)
    check_agreement(call, backend, layout, device)


def check_segments(problem: AttentionProblem, q: Tensor, k: Tensor, layout: Layout) -> None:
    """Refuse tokens that are no whole segments, and causal queries without keys of their own.

    Raises:
        ShapeError: If the segments of a rank do not divide its tokens.
        UnsupportedError: If a causal problem has another number of queries than of keys.
    """
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] % len(layout.own):
            raise ShapeError(
                f"{name} has {x.shape[2]} tokens on this rank, and layout {layout.kind!r} has "
                f"{len(layout.own)} segments of equal length there: pad the sequence and mask the padding."
            )
    if problem.causal and q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            f"q has {q.shape[2]} tokens and k has {k.shape[2]}: inside context_parallel causal queries and "
            "keys are the same tokens."
        )


def _description(backend: Any, tensors: dict[str, Any], layout: Layout) -> str:
    """A call, as far as ranks have to agree on it."""
    shown = ", ".join(f"{name} {_show(x)}" for name, x in tensors.items() if x is not None)
    options = ", ".join(f"{name}={value}" for name, value in vars(backend.options).items())
    causal = "causal" if backend.problem.causal else "full"
    place = f"{layout.kind}, gathered from {len(layout.near)} ranks"
    scale = f"scale {backend.problem.factor}"
    return f"{backend.spec.name}({options}), {causal}, {scale}, {place}, with {shown}"


def _show(x: Any) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    gradient = " that needs a gradient" if x.requires_grad and torch.is_grad_enabled() else ""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{gradient}"
