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

KERNELS = ("default", "flash", "cudnn", "efficient", "math", "flex", "fa3")

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
    """Named kernels that serve a call on this machine."""
    return [kernel for kernel in KERNELS[1:] if _obstacle(kernel, q, k, v, mask, causal) is None]


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
    # The kernel of the CPU rounds gradients of each query head, and before PyTorch 2.10 serves no groups.
    each = torch.is_grad_enabled() or torch.__version__ < "2.10"
    if enable_gqa and (kernel == "efficient" or (kernel == "flash" and not q.is_cuda and each)):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if not (q.numel() and k.numel()):
        # Kernels divide by sizes, and nothing is computed.
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, enable_gqa=enable_gqa)
    inputs = (q, k, v, attn_mask, is_causal)
    if obstacle := _obstacle(kernel, *inputs):
        serving = ", ".join(["default", *kernels_for(*inputs)])
        raise UnsupportedError(f"exact(kernel={kernel!r}) {obstacle}. Kernels for this call: {serving}.")
    note_kernel(kernel)
    return _output(kernel, *inputs, scale)


def _obstacle(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> str | None:
    """Reason why a kernel cannot serve a call, or None."""
    device, dtype = q.device.type, str(q.dtype).removeprefix("torch.")
    devices = {"flash": ("cpu", "cuda"), "flex": ("cpu", "cuda"), "math": (device,)}.get(kernel, ("cuda",))
    if device not in devices:
        return f"runs on {' or '.join(devices)}, not on {device}"
    if kernel == "fa3" and find_spec(_FA3) is None:
        return f"needs the package {_FA3}, which is not installed"
    if dtype in {"flex": ("float64",), "fa3": ("float32", "float64")}.get(kernel, ()):
        return f"does not compute in {dtype}"
    if kernel == "flex" and q.shape[2] != k.shape[2]:
        return f"needs as many queries as keys, not {q.shape[2]} and {k.shape[2]}"
    if mask is not None and (kernel == "fa3" or (kernel == "flex" and mask.shape[2] > 1)):
        return f"takes no mask {list(mask.shape)}"
    if device == "cpu" or kernel in ("math", "flex"):
        asks = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return "has no backward pass on a CPU" if kernel == "flex" and device == "cpu" and asks else None
    if q.shape[-1] % 8:
        return f"needs a head size that is a multiple of 8, not {q.shape[-1]}"
    if kernel == "fa3":
        return None
    # PyTorch gives no reason.
    cuda: Any = torch.backends.cuda
    able = getattr(cuda, f"can_use_{kernel}_attention")
    masked = "" if mask is None else " with a mask"
    served = able(cuda.SDPAParams(q, k, v, mask, 0.0, causal, q.shape[1] != k.shape[1]))
    return None if served else f"serves no {dtype} {list(q.shape)}{masked} here"


def _output(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    operators: Any = torch.ops.aten
    if kernel == "flex":
        return _by_flex(q, k, v, None if mask is None else mask[:, 0, 0], causal, scale)
    if kernel == "fa3":
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out: Any = import_module(_FA3).flash_attn_func(*rows, softmax_scale=scale, causal=causal)
        # Earlier versions return the log-sum-exps too.
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
    if kernel == "flash" and q.is_cuda:
        return operators._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[0]
    bias = _bias(mask, q, upcast_dtype(q.dtype) if kernel == "flash" else q.dtype)
    if kernel == "flash":
        return flash_rows(q, k, v, bias, scale, causal)[0]
    if kernel == "math":
        operator, grouped = operators._scaled_dot_product_attention_math, q.shape[1] != k.shape[1]
        return operator(q, k, v, bias, 0.0, causal, scale=scale, enable_gqa=grouped)[0]
    operator = getattr(operators, f"_scaled_dot_product_{kernel}_attention")
    return operator(q, k, v, bias, True, 0.0, causal, scale=scale)[0]


def _bias(mask: Tensor | None, q: Tensor, dtype: torch.dtype) -> Tensor | None:
    """0, or −inf where a row may not read a key, [batch heads rows keys]."""
    if mask is None:
        return None
    *sizes, keys = mask.shape
    bias = q.new_zeros(*sizes, -(-keys // _ALIGNED) * _ALIGNED, dtype=dtype)[..., :keys]
    return bias.masked_fill_(~mask, -torch.inf).expand(*q.shape[:-1], keys)


def _by_flex(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    try:
        return compiled_window(q, k, v, key_mask, _ENDLESS, 0 if causal else _ENDLESS, scale, 0)
    except NotCompiledError as error:
        reason = str(error).partition("; ")[2]
        message = "exact(kernel='flex') needs a compiler; kernel='default' does not."
        raise UnsupportedError(f"{message} {reason}") from None
