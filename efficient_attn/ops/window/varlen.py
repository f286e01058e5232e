"""Window attention by FlashAttention's sliding window on CUDA, in half precision and without a key mask.

`torch.nn.attention.varlen` serves packed sequences. Here all of them are equally long.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from efficient_attn.ops.alignment import first_columns, padded_rows
from efficient_attn.ops.paths import constant_result, note_kernel, only_torch
from efficient_attn.ops.window.global_keys import WindowInputs

_DTYPES = (torch.float16, torch.bfloat16)
# The kernel reads vectors of a multiple of 8 numbers; its backward pass takes no more than 192 on every GPU.
_MULTIPLE, _WIDEST = 8, 192
# Sequences in a grid of programs, and tokens that positions in int32 can count.
_SEQUENCES, _TOKENS = 2**16 - 1, 2**31 - 1


@cache
def _function() -> Callable[..., Tensor] | None:
    """`varlen_attn`, or None in a PyTorch without it or without its window. Its import takes a second."""
    try:
        function: Callable[..., Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return function if inspect.signature(function).parameters.keys() >= {"scale", "window_size"} else None


def supports_varlen(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> bool:
    return (
        key_mask is None
        and _serves(q.device, q.dtype)
        and (q.shape[1] == k.shape[1] or _grouped())
        and all(x.dtype is q.dtype and x.shape[-1] <= _WIDEST and x.numel() > 0 for x in (q, k, v))
        and bool(q.shape[0] * q.shape[1] * k.shape[2] <= _TOKENS)
    )


def varlen_window(inputs: WindowInputs) -> Tensor:
    """softmax(scale · q kᵀ) v over the keys i−back … i+ahead. The queries are the last positions."""
    # Imported here, since the compiler traces an import but not the cache of `_function`.
    from torch.nn.attention.varlen import varlen_attn

    kernel: Callable[..., Any] = varlen_attn
    q, k, v, key_mask, back, ahead, scale = inputs[:7]
    assert key_mask is None, "callers ask `supports_varlen` first"
    (batch, heads), value_dim = q.shape[:2], v.shape[-1]
    lengths, grouped = (q.shape[2], k.shape[2]), heads != k.shape[1]
    width = -(-max(q.shape[-1], value_dim) // _MULTIPLE) * _MULTIPLE
    # The kernel requires one width for all three; zero columns change no product.
    q, k, v = (padded_rows(x, width) for x in (q, k, v))
    # Contiguous heads are passed as separate sequences, without a copy.
    alone = not grouped and batch * heads <= _SEQUENCES and all(x.is_contiguous() for x in (q, k, v))
    packed = (x.flatten(0, 2).unsqueeze(1) if alone else x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    sides = min(back, k.shape[2]), min(ahead, k.shape[2])
    numbers = torch.arange((batch * heads if alone else batch) + 1, dtype=torch.int32, device=q.device)
    ends = (numbers * length for length in lengths)
    groups = {"enable_gqa": True} if grouped else {}
    note_kernel("varlen")
    out: Tensor = kernel(*packed, *ends, *lengths, scale=scale, window_size=sides, **groups)
    out = out.unflatten(0, (batch, -1))
    out = out.squeeze(2).unflatten(1, (heads, -1)) if alone else out.transpose(1, 2)
    return first_columns(out, value_dim)


# Queries the driver, so it stays out of the graph; dynamic sizes must not be arguments.
@constant_result
def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype in _DTYPES and not only_torch() and _has_flash(device) and _function() is not None


@constant_result
def _grouped() -> bool:
    """Whether `varlen_attn` of this PyTorch version supports grouped queries."""
    function = _function()
    return function is not None and "enable_gqa" in inspect.signature(function).parameters


@cache
def _has_flash(device: torch.device) -> bool:
    """Whether the device is Nvidia's Ampere or later, for which FlashAttention is compiled."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
