"""Exact softmax attention by a named kernel: PyTorch's operators, FlexAttention, FlashAttention 3.

Operators are called themselves: the context `torch.nn.attention.sdpa_kernel` sets flags of the process.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.errors import UnsupportedError
from efficient_attn.ops.dtypes import upcast_dtype
from efficient_attn.ops.paths import note_kernel
from efficient_attn.ops.softmax.cpu_flash import flash_rows
from efficient_attn.ops.softmax.flex import NotCompiledError
from efficient_attn.ops.window.flex import compiled_window

# Module of FlashAttention 3.
_FA3 = "flash_attn_interface"
# Keys on either side of a query in a window without ends.
_ENDLESS = 2**30
# CUDA aligns the rows of a bias to so many numbers.
_ALIGNED = 16


def operator_of(kernel: str) -> Callable[..., Tensor] | None:
    """A kernel under the arguments of `scaled_dot_product_attention`, None for PyTorch's choice."""
    return None if kernel == "default" else partial(_attend, kernel)


def kernels_for(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> list[str]:
    """Names of the kernels that serve a call on this machine, apart from PyTorch's choice."""
    return [kernel for kernel in _OPERATORS if _obstacle(kernel, q, k, v, mask, causal) is None]


def _attend(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    dropout_p: float,
    enable_gqa: bool,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    if enable_gqa:
        # Not all kernels serve groups of query heads.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if not (q.numel() and k.numel()):
        # Kernels divide by sizes, and nothing is computed.
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p)
    inputs = (q, k, v, attn_mask, is_causal)
    if obstacle := _obstacle(kernel, *inputs):
        serving = ", ".join(["default", *kernels_for(*inputs)])
        raise UnsupportedError(f"exact(kernel={kernel!r}) {obstacle}. Kernels for this call: {serving}.")
    note_kernel(kernel)
    return _OPERATORS[kernel](*inputs, scale)


def _obstacle(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> str | None:
    """Reason why a kernel cannot serve a call, or None."""
    device, dtype, dim = q.device.type, str(q.dtype).removeprefix("torch."), q.shape[-1]
    devices = {"flash": ("cpu", "cuda"), "flex": ("cpu", "cuda"), "math": (device,)}.get(kernel, ("cuda",))
    asks = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    refused = {"flex": ("float64",), "fa3": ("float32", "float64")}.get(kernel, ())
    if device not in devices:
        return f"runs on {' or '.join(devices)}, not on {device}"
    if kernel == "fa3" and find_spec(_FA3) is None:
        return f"needs the package {_FA3}, which is not installed"
    if dtype in refused:
        return f"does not compute in {dtype}"
    if kernel == "flex" and q.shape[2] != k.shape[2]:
        return f"needs as many queries as keys, not {q.shape[2]} and {k.shape[2]}"
    if mask is not None and (kernel == "fa3" or (kernel == "flex" and mask.shape[2] > 1)):
        return f"takes no mask {list(mask.shape)}"
    if kernel == "flex" and device == "cpu" and asks:
        return "has no backward pass on a CPU"
    if device == "cpu" or kernel in ("math", "flex"):
        return None
    if dim % 8:
        return f"needs a head size that is a multiple of 8, not {dim}"
    # PyTorch gives no reason.
    cuda: Any = torch.backends.cuda
    able = kernel == "fa3" or getattr(cuda, f"can_use_{kernel}_attention")(
        cuda.SDPAParams(q, k, v, mask, 0.0, causal, False)
    )
    return None if able else f"serves no {dtype} {list(q.shape)}{' with a mask' * (mask is not None)} here"


def _bias(mask: Tensor | None, q: Tensor, dtype: torch.dtype) -> Tensor | None:
    """0, or −inf where a row may not read a key, [batch heads rows keys]."""
    if mask is None:
        return None
    *sizes, keys = mask.shape
    bias = q.new_zeros(*sizes, -(-keys // _ALIGNED) * _ALIGNED, dtype=dtype)[..., :keys]
    return bias.masked_fill_(~mask, -torch.inf).expand(*q.shape[:-1], keys)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    if q.is_cuda:
        operator: Any = torch.ops.aten._scaled_dot_product_flash_attention
        return operator(q, k, v, 0.0, causal, scale=scale)[0]
    return flash_rows(q, k, v, _bias(mask, q, upcast_dtype(q.dtype)), scale, causal)[0]


def _by_operator(
    name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    operator: Any = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    return operator(q, k, v, _bias(mask, q, q.dtype), True, 0.0, causal, scale=scale)[0]


def _math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    operator: Any = torch.ops.aten._scaled_dot_product_attention_math
    return operator(q, k, v, _bias(mask, q, q.dtype), 0.0, causal, scale=scale)[0]


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    key_mask, ahead = None if mask is None else mask[:, 0, 0], 0 if causal else _ENDLESS
    try:
        return compiled_window(q, k, v, key_mask, _ENDLESS, ahead, scale, 0)
    except NotCompiledError as error:
        reason = str(error).partition("; ")[2]
        message = "exact(kernel='flex') needs a compiler; kernel='default' does not."
        raise UnsupportedError(f"{message} {reason}") from None


def _fa3(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    rows = (x.transpose(1, 2) for x in (q, k, v))
    out: Any = import_module(_FA3).flash_attn_func(*rows, softmax_scale=scale, causal=causal)
    # Earlier versions return the log-sum-exps too.
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "flash": _flash,
    "cudnn": partial(_by_operator, "cudnn"),
    "efficient": partial(_by_operator, "efficient"),
    "math": _math,
    "flex": _flex,
    "fa3": _fa3,
}
KERNELS = ("default", *_OPERATORS)
