"""Fused CPU kernel with the rows' log-sum-exps, by which partial softmaxes are merged.

PyTorch exposes the kernel, its log-sum-exps and its backward pass only under private names, which this file
alone uses. `available` is False on other devices and for a PyTorch without them; callers then use operators.
"""

from typing import Any

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast_dtype
from efficient_attn.ops.paths import tuned_for_cpu

_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_FORWARD: Any = getattr(torch.ops.aten, _NAME, None)
_BACKWARD: Any = getattr(torch.ops.aten, f"{_NAME}_backward", None)


def available(*tensors: Tensor) -> bool:
    """Whether the kernel supports these tensors: on the CPU and not empty, since it divides by sizes."""
    return _FORWARD is not None and all(tuned_for_cpu(x) and x.numel() > 0 for x in tensors)


def flash_rows(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ + bias) v, and the log-sum-exp of each row.

    Args:
        q: [batch heads rows dim]; k and v: [batch heads keys dim], equally wide.
        bias: Broadcast to [batch heads rows keys], in the dtype of q or float32; −inf masks a key.
        scale: Positive factor on the scores.
        causal: Whether a row reads the keys up to its position alone; rows and keys are equally many.

    Returns:
        [batch heads rows dim] and [batch heads rows]; both are 0 for a fully masked row.
    """
    mask = _expanded(bias, q, k)
    return _FORWARD(_rows(q), _rows(k), _rows(v), 0.0, causal, attn_mask=mask, scale=scale)


def gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    bias: Tensor | None,
    scale: float,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the output of `attend` with respect to q, k and v."""
    rows = [_rows(x) for x in (grad_out, q, k, v, out)]
    return _BACKWARD(*rows, log_sum, 0.0, causal, attn_mask=_expanded(bias, q, k), scale=scale)


def _expanded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias of every score, [batch heads rows keys]."""
    if bias is None:
        return None
    # The kernel reinterprets a bias of another dtype as the dtype of the scores.
    dtype = upcast_dtype(q.dtype)
    bias = bias if bias.dtype is dtype else bias.to(dtype)
    return bias.expand(*q.shape[:-1], k.shape[-2])


def _rows(x: Tensor) -> Tensor:
    """Rows that are contiguous in memory, as the kernel requires."""
    return x if x.stride(-1) == 1 else x.contiguous()
