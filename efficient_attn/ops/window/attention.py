"""Softmax attention over a window of neighbouring keys, in blocks of queries: O(tokens · window)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import zero_masked
from efficient_attn.ops.operators import transformable, transformed
from efficient_attn.ops.softmax import cpu_flash
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.ops.window import flex, varlen
from efficient_attn.ops.window.global_keys import GlobalKeys, attend_one
from efficient_attn.ops.window.operator import WindowInputs, fused_window, fused_window_backward
from efficient_attn.ops.window.unfused import unfused_window
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values


def window_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    back: int,
    ahead: int,
    key_mask: KeyMask | None,
    first: GlobalKeys | None = None,
) -> Output:
    """softmax over the keys i−back … i+ahead (Vaswani et al. 2017, section 4, restricted self-attention).

    The queries are the last positions of the keys; `ahead` ends at the last key.

    Args:
        first: Global keys, which rows read besides.
    """
    q_tokens, k_tokens, mapped = q.shape[-2], k.shape[-2], transformed(q, k, v)
    if not mapped and back >= k_tokens - 1:
        if first is not None and q_tokens == 1:
            return attend_one(q, k, v, key_mask, first, scale)
        if first is None and (ahead == 0 or ahead >= q_tokens - 1):
            return fused_attention(q, k, v, scale=scale, causal=ahead == 0, key_mask=key_mask, dropout=0.0)
    fused = None if mapped else _fused(q, k, v, key_mask, first)
    if fused is None:
        return unfused_window(q, k, v, key_mask, back, ahead, scale, first)
    if scale <= 0:
        q, scale = q * scale, 1.0
    return fused(q, zero_masked(k, key_mask), zero_masked(v, key_mask), key_mask, back, ahead, scale)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: GlobalKeys | None
) -> Callable[..., Tensor] | None:
    """The fused attention that serves these tensors, or None."""
    if cpu_flash.available(q, k, v):
        return partial(_tuned, first=first)
    if first is not None:
        return None
    if varlen.available(q, k, v, key_mask):
        return varlen.attend
    return flex.attend if flex.available(q, k, v) else None


def _tuned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    back: int,
    ahead: int,
    scale: float,
    *,
    first: GlobalKeys | None,
) -> Tensor:
    back, ahead = min(back, k.shape[2]), min(ahead, k.shape[2])
    value_dim, widest = v.shape[-1], max(q.shape[-1], v.shape[-1])
    # The kernel requires one width for all three; zero columns change no product.
    q, k, v = (x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    if first is None:
        out, _ = fused_window(q, k, v, key_mask, back, ahead, scale)
    else:
        first_k, first_v = (F.pad(x, (0, widest - x.shape[-1])) for x in first[:2])
        if first.at is not None:
            # Gradients of the keys hold theirs.
            first_k, first_v = first_k.detach(), first_v.detach()
        out, _ = fused_window(q, k, v, key_mask, back, ahead, scale, first_k, first_v, first.far, first.at)
    return out if value_dim == widest else out[..., :value_dim]


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, key_mask, ctx.back, ctx.ahead, ctx.scale, *first = inputs
    ctx.save_for_backward(*output, q, k, v, key_mask, *first)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple:
    out, log_sum, q, k, v, key_mask, *first = ctx.saved_tensors
    inputs = WindowInputs(q, k, v, key_mask, ctx.back, ctx.ahead, ctx.scale, *first)
    grad_q, grad_k, grad_v, *grad_first = _differentiate(grad_out, out, log_sum, *inputs)
    if inputs.first is None or inputs.at is not None:
        grad_first = [None, None]
    return grad_q, grad_k, grad_v, *[None] * 4, *grad_first, None, None


_differentiate = transformable(fused_window_backward)
torch.library.register_autograd(fused_window, _backward, setup_context=_keep)
