"""Softmax attention over a window of neighbouring keys, in blocks of queries: O(tokens · window)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.alignment import first_columns, padded_rows
from efficient_attn.ops.dtypes import zero_masked
from efficient_attn.ops.operators import transformed
from efficient_attn.ops.paths import bfloat16_instructions, dynamic, parts
from efficient_attn.ops.softmax import cpu_flash
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.ops.window import flex, varlen
from efficient_attn.ops.window.global_keys import (
    GlobalKeys,
    WindowInputs,
    attend_one,
    global_keys_of,
    tokens_at,
)
from efficient_attn.ops.window.operator import fused_window, fused_window_backward
from efficient_attn.ops.window.unfused import unfused_window
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values

# Queries of a slice, and keys of the smallest window whose products are worth a call.
_BLOCK, _FEWEST_KEYS = 128, 129


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
        first: Global keys, which rows read in addition.
    """
    q_tokens, k_tokens = q.shape[-2], k.shape[-2]
    if first is not None:
        # A state has the dtype of its inputs.
        first = first._replace(k=first.k.to(k.dtype), v=first.v.to(v.dtype))
    mapped = transformed(q, k, v)
    # The fused kernel of exact attention has no second derivatives, which the window declares.
    tensors = (q, k, v) if first is None else (q, k, v, first.k, first.v)
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if not (mapped or trained or dynamic(k_tokens)) and back >= k_tokens - 1:
        if first is not None and q_tokens == 1:
            return attend_one(q, k, v, key_mask, first, scale)
        if first is None and (ahead == 0 or ahead >= q_tokens - 1):
            return fused_attention(q, k, v, scale=scale, causal=ahead == 0, key_mask=key_mask, dropout=0.0)
    if not (mapped or trained or dynamic(k_tokens)) and _supports_slices(q, back, ahead, key_mask):
        return _sliced_window(q, k, v, back, ahead, scale, first)
    fused = None if mapped else _fused(q, k, v, key_mask)
    if first is not None and fused is not _tuned:
        # A global key of a window of one token may come later than its query, or not.
        alike = first.at is not None and key_mask is None and (back or ahead)
        flexible = not (mapped or trained) and alike and flex.supports_window(q, k, v, kernel="window-global")
        fused = flex.flex_window if flexible else None
    if fused is None:
        return unfused_window(WindowInputs(q, k, v, key_mask, back, ahead, scale, *(first or ())))
    if scale <= 0:
        q, scale = q * scale, 1.0
    k, v = zero_masked(k, key_mask), zero_masked(v, key_mask)
    inputs = WindowInputs(q, k, v, key_mask, back, ahead, scale, *(first or ()))
    # Inside compiled code gradients have no derivatives, whatever the operators.
    if first is not None or not trained or fused is _tuned or torch.compiler.is_compiling():
        return fused(inputs)
    kernel_q, kernel_k, kernel_v = _Enter.apply(q, k, v)
    out = fused(WindowInputs(kernel_q, kernel_k, kernel_v, *inputs[3:]))
    return _Leave.apply(out, *inputs[:7])


def _supports_slices(q: Tensor, back: int, ahead: int, key_mask: Tensor | None) -> bool:
    """Whether slices serve a call in inference: in float32, and on a CPU without tiles, they are slower."""
    cpu = q.device.type == "cpu" and q.dtype is torch.bfloat16 and key_mask is None
    wide = back + ahead + 1 >= _FEWEST_KEYS
    return cpu and wide and not torch.compiler.is_compiling() and bfloat16_instructions() == "amx_bf16"


def _sliced_window(
    q: Tensor, k: Tensor, v: Tensor, back: int, ahead: int, scale: float, first: GlobalKeys | None
) -> Tensor:
    """The output, each block of queries on the global keys and a slice of the keys."""
    q_tokens, k_tokens = q.shape[-2], k.shape[-2]
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    for rows in parts(q_tokens, _BLOCK):
        begin, end = rows.start + k_tokens - q_tokens, rows.stop + k_tokens - q_tokens
        keys = slice(max(begin - back, 0), min(end + ahead, k_tokens))
        age = torch.arange(begin, end)[:, None] - torch.arange(keys.start, keys.stop)
        visible = ((age <= back) & (age >= -ahead)).expand(len(q), 1, -1, -1)
        keys_read, values_read = k[..., keys, :], v[..., keys, :]
        if first is not None:
            far = torch.ones(*first.k.shape[:3:2], q_tokens, dtype=torch.bool)
            if first.far is not None:
                far = F.pad(first.far, (q_tokens - first.far.shape[-1], 0))
            visible = torch.cat([far[..., rows].mT.unsqueeze(1), visible], dim=-1)
            keys_read = torch.cat([first.k, keys_read], dim=-2)
            values_read = torch.cat([first.v, values_read], dim=-2)
        bias = q.new_zeros(visible.shape).masked_fill(~visible, -torch.inf)
        out[..., rows, :] = F.scaled_dot_product_attention(
            q[..., rows, :], keys_read, values_read, attn_mask=bias, scale=scale, enable_gqa=True
        )
    return out


def _fused(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> Callable[[WindowInputs], Tensor] | None:
    """The fused attention that serves these tensors without global keys, or None."""
    if cpu_flash.available(q, k, v):
        return _tuned
    if varlen.supports_varlen(q, k, v, key_mask):
        return varlen.varlen_window
    return flex.flex_window if flex.supports_window(q, k, v) else None


def _tuned(inputs: WindowInputs) -> Tensor:
    value_dim, first = inputs.v.shape[-1], global_keys_of(inputs)
    widest = max(inputs.q.shape[-1], value_dim)
    # The kernel requires one width for all three; zero columns change no product.
    q, k, v = (padded_rows(x, widest) for x in inputs[:3])
    if first is None:
        out, _ = fused_window(q, k, v, *inputs[3:7])
    else:
        first_k, first_v = (padded_rows(x, widest) for x in first[:2])
        if first.at is not None:
            # Gradients of the keys include the gradients of these copies.
            first_k, first_v = first_k.detach(), first_v.detach()
        out, _ = fused_window(q, k, v, *inputs[3:7], first_k, first_v, first.far, first.at)
    return first_columns(out, value_dim)


class _Enter(torch.autograd.Function):
    """Pass q, k and v to a kernel. Gradients go back through it unless they need derivatives."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None,) * len(gradients) if torch.is_grad_enabled() else gradients


class _Leave(torch.autograd.Function):
    """Output of a kernel. Gradients that need derivatives bypass it, straight to q, k and v."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Any) -> Tensor:
        *tensors, ctx.back, ctx.ahead, ctx.scale = inputs
        ctx.save_for_backward(*tensors)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grad_out, *[None] * 7
        q, k, v, key_mask = ctx.saved_tensors
        inputs = WindowInputs(q, k, v, key_mask, ctx.back, ctx.ahead, ctx.scale)
        return None, *_differentiable(grad_out, inputs), *[None] * 4


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, key_mask, ctx.back, ctx.ahead, ctx.scale, *first = inputs
    ctx.save_for_backward(*output, q, k, v, key_mask, *first)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple:
    out, log_sum, q, k, v, key_mask, *first = ctx.saved_tensors
    inputs = WindowInputs(q, k, v, key_mask, ctx.back, ctx.ahead, ctx.scale, *first)
    if not torch.is_grad_enabled():
        grads = fused_window_backward(grad_out, out, log_sum, *inputs)
    else:
        grads = _differentiable(grad_out, inputs)
    grad_q, grad_k, grad_v, *grad_first = grads
    if inputs.first_k is None or inputs.at is not None:
        grad_first = [None, None]
    return grad_q, grad_k, grad_v, *[None] * 4, *grad_first, None, None


def _differentiable(grad_out: Tensor, inputs: WindowInputs) -> list[Tensor | None]:
    """Gradients with derivatives, which exist for the unfused operators only."""
    first, tensors = global_keys_of(inputs), list(inputs[:3])
    if first is not None and first.at is not None:
        # Gradients of the keys include gradients through their global keys.
        first = GlobalKeys(tokens_at(inputs.k, first.at), tokens_at(inputs.v, first.at), first.far)
    elif first is not None:
        tensors += first[:2]
    out = unfused_window(WindowInputs(*inputs[:7], *(first or ())))
    trained = [x for x in tensors if x.requires_grad]
    grads = iter(torch.autograd.grad(out, trained, grad_out, create_graph=True))
    return [next(grads) if x.requires_grad else None for x in tensors]


torch.library.register_autograd(fused_window, _backward, setup_context=_keep)
