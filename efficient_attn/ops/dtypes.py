"""In which dtype sums are taken, and how masked tokens are put out of the way."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """`x` in float32 or better: what sums, exponentials and states are computed in."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def upcast_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that `wide` gives a tensor of this dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def zero_masked(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Keys or values [batch kv_heads k_tokens dim] with zeros in place of masked tokens.

    A weight of zero is not enough: zero times NaN is NaN.
    """
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0.0)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which sums stay in the dtype that `wide` chose."""
    # A tensor without contents, on the meta device, has no autocast to leave.
    if x.device.type == "meta":
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
