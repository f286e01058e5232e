"""Accumulation dtypes, masked tokens as zeros, and contexts without autocast or inference mode."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Types of devices without float64.
WITHOUT_FLOAT64 = {"mps"}


def upcast(x: Tensor) -> Tensor:
    """`x` in float32 or better, the accumulation dtype of sums, exponentials and states."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def upcast_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of `upcast(x)` for an `x` of this dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def attend_in(
    dtype: str | None, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> Tensor:
    """The output of `attend` on q, k and v cast to a dtype, in q's dtype. None: no cast."""
    if dtype is None:
        return attend(q, k, v, **options)
    return attend(*(x.to(getattr(torch, dtype)) for x in (q, k, v)), **options).to(q.dtype)


def float64_device(device: torch.device) -> torch.device:
    """The device for float64 tensors: the device itself, or the CPU if it has no float64."""
    return torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device


def zero_masked(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Keys or values [batch kv_heads k_tokens dim] with zeros in place of masked tokens.

    A weight of zero is not enough: zero times NaN is NaN.
    """
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0.0)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Context without autocast, which would lower the accumulation dtype again."""
    # A tensor without contents, on the meta device, has no autocast to leave.
    if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def without_inference_mode() -> AbstractContextManager[Any]:
    """Context for new parameters and buffers, which inference mode would keep from training."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
