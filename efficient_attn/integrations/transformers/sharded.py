"""Checks of transformers models inside `distributed.context_parallel`."""

import inspect
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from efficient_attn import sharding
from efficient_attn.errors import ShapeError, UnsupportedError
from efficient_attn.integrations.transformers.sites import ignored

_POSITIONS = "position_ids"
# Rotary positions with frequencies that depend on the largest position of a call.
_BY_LENGTH = ("dynamic", "longrope")


def check_model(model: PreTrainedModel, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse calls that would compute from the tokens of one rank alone, on all ranks alike.

    Raises:
        UnsupportedError: If `context_parallel` is active, and positions are missing or depend on the length,
            or a module computes attention in its own code.
    """
    if sharding.hook is None:
        return
    kind, forward = type(model).__name__, inspect.signature(model.forward)
    if _POSITIONS not in forward.parameters:
        raise UnsupportedError(
            f"{kind} makes the positions of its tokens itself, which inside context_parallel begin at 0 on "
            f"every process; models that take {_POSITIONS} work there."
        )
    if forward.bind_partial(*args, **named).arguments.get(_POSITIONS) is None:
        raise UnsupportedError(
            f"Inside context_parallel {kind} needs {_POSITIONS} of the tokens of this process: give "
            f"{_POSITIONS}=shard(torch.arange(tokens)[None], mesh, dim=1)."
        )
    rotary = getattr(model.config, "rope_parameters", None) or {}
    if rotary.get("rope_type") in _BY_LENGTH:
        raise UnsupportedError(
            f"{kind} has {rotary['rope_type']!r} rotary positions, which depend on the length of the "
            "sequence and would differ between processes, inside context_parallel."
        )
    if rest := ignored(model):
        raise UnsupportedError(
            f"{next(iter(rest))} of {kind} computes attention in its own code, which inside context_parallel "
            "reads the tokens of this process alone."
        )


def check_own_mask(attention_mask: Tensor | None, keys: int) -> None:
    """Refuse a mask of another length than the tokens of this rank.

    Raises:
        ShapeError: If `context_parallel` is active and the length differs.
    """
    if sharding.hook is not None and attention_mask is not None and attention_mask.shape[1] != keys:
        raise ShapeError(
            f"attention_mask has {attention_mask.shape[1]} tokens and this process holds {keys}: inside "
            "context_parallel give shard(attention_mask, mesh, dim=1)."
        )


def check_no_pairs(name: str, what: str) -> None:
    """Refuse attention by a mask of queries and keys, or by scores of the model's own code.

    Raises:
        UnsupportedError: If `context_parallel` is active.
    """
    if sharding.hook is not None:
        raise UnsupportedError(
            f"{name} {what}, which reads the tokens of this process alone inside context_parallel. If "
            f"{_POSITIONS} of a head-tail layout look like packed sequences, give an attention_mask of ones."
        )
