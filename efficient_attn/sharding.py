"""The hook of sequence parallelism: None unless `distributed.context_parallel` is active."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from efficient_attn.errors import UnsupportedError

# `distributed.calls.Calls` of the process, not of a thread: autograd recomputes in threads of its own.
hook: Any = None


@contextmanager
def installed(value: Any) -> Iterator[None]:
    """Context in which tensors hold the tokens of this rank alone."""
    global hook
    before, hook = hook, value
    try:
        yield
    finally:
        hook = before


def check_alone() -> None:
    """Refuse to compute from the tokens of one rank."""
    if hook is not None:
        raise UnsupportedError(
            "Inside efficient_attn's context_parallel only backend(q, k, v) and its extend without a "
            "state read the tokens of other ranks; call everything else outside, on whole sequences."
        )


def whole_tokens(tokens: int) -> int:
    """Number of tokens of all ranks, for `tokens` of this rank."""
    return tokens if hook is None else tokens * hook.layout.ranks


def at_positions(apply: Callable[[Tensor, int], Tensor], x: Tensor, start: int) -> Tensor:
    """Apply a function of x [… tokens dim] and its first position to each segment of this rank."""
    if hook is None:
        return apply(x, start)
    layout, tokens = hook.layout, x.shape[-2]
    segments = zip(layout.parts(tokens), layout.positions(tokens), strict=True)
    rows = [apply(x[..., part, :], start + positions.start) for part, positions in segments]
    return torch.cat(rows, dim=-2)
