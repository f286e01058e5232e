"""The fused kernel of the CPU with its rows' log-sum-exps: what parts of a softmax are put together with.

torch offers both, and the matching backward pass, only under private names, which are used in this file
alone; where a torch lacks them, and on other devices, `available` is false and callers go another way.
"""

from typing import Any

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast_dtype

_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_FORWARD: Any = getattr(torch.ops.aten, _NAME, None)
_BACKWARD: Any = getattr(torch.ops.aten, f"{_NAME}_backward", None)


def available(*tensors: Tensor) -> bool:
    """Whether the kernel takes these: on the CPU, nothing empty, which it divides by."""
    return _FORWARD is not None and all(x.device.type == "cpu" and x.numel() > 0 for x in tensors)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ + bias) v, and the logarithm of what each row was divided by.

    Args:
        q: [batch heads rows dim]; k and v: [batch heads keys dim], equally wide.
        bias: Broadcast to [batch heads rows keys], in the dtype of q or float32; −inf hides a key.
        scale: Above 0.

    Returns:
        [batch heads rows dim] and [batch heads rows]; both are 0 for a row without a visible key.
    """
    if bias is not None:
        # A mask in another dtype than the scores' is read as if it were in theirs.
        bias = bias.to(upcast_dtype(q.dtype)).expand(*q.shape[:-1], k.shape[-2])
    return _FORWARD(_rows(q), _rows(k), _rows(v), 0.0, False, attn_mask=bias, scale=scale)


def gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives by q, k and v of what `attend` gives; that by the log-sum-exps is taken to be zero."""
    if bias is not None:
        bias = bias.to(upcast_dtype(q.dtype)).expand(*q.shape[:-1], k.shape[-2])
    rows = [_rows(x) for x in (grad_out, q, k, v, out)]
    return _BACKWARD(*rows, log_sum, 0.0, False, attn_mask=bias, scale=scale)


def _rows(x: Tensor) -> Tensor:
    """The kernel reads rows in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()
