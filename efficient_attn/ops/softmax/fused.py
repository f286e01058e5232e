"""Exact softmax attention through PyTorch's fused kernel, which never materialises the scores."""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from efficient_attn.ops.alignment import Spans, first_columns, padded_rows, real_spans
from efficient_attn.ops.dtypes import upcast, upcast_dtype, zero_masked
from efficient_attn.ops.paths import parts
from efficient_attn.ops.softmax import cpu_flash
from efficient_attn.ops.softmax.biased import eager, readable
from efficient_attn.ops.softmax.definition import causal_mask
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values

# Kernel under the arguments of `scaled_dot_product_attention`; None: the choice of PyTorch.
_Operator = Callable[..., Tensor] | None

# Rows per call with a mask per row: the mask of all rows would take tokens² bytes.
_ROWS = 512


def fused_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    causal: bool = False,
    key_mask: KeyMask | None,
    dropout: float,
    zeroed: bool = False,
    operator: _Operator = None,
) -> Output:
    """softmax(scale · q kᵀ) v in O(tokens) memory, excluding inputs and output.

    Args:
        zeroed: Whether keys and values are already zero where they are masked.
        operator: Kernel in place of `scaled_dot_product_attention`, without dropout.
    """
    if scale <= 0:
        # The kernel multiplies the −inf of its causal mask by the scale, which would give NaN or +inf.
        q, scale = q * scale, 1.0
    rowwise, spans = causal and _plain(q.shape[-2] > 1), None
    whole = rowwise and q.shape[-2] == k.shape[-2] and not dropout and operator is None
    if whole and key_mask is not None and readable(key_mask, q, k, v) and cpu_flash.available(q, k, v):
        spans = real_spans(key_mask)
    if spans is not None:
        key_mask = None
    elif key_mask is not None and not zeroed:
        k, v = zero_masked(k, key_mask), zero_masked(v, key_mask)
    # The O(tokens) kernel requires one width for all three; zero columns change no product.
    value_dim, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (padded_rows(x, width) for x in (q, k, v))
    options = _options(q, k, scale, dropout)
    if spans:
        out = _by_flash(q, k, v, None, scale, spans)
    elif rowwise and (key_mask is not None or q.shape[-2] != k.shape[-2]):
        out = _causal_in_blocks(q, k, v, key_mask, operator, options)
    else:
        mask = None if key_mask is None else _without_fully_masked(key_mask[:, None, None, :], key_mask)
        operator = operator or F.scaled_dot_product_attention
        out = operator(q, k, v, attn_mask=mask, is_causal=rowwise, **options)
    return first_columns(out, value_dim)


def _plain(condition: bool) -> bool:
    """Convert a compiler's symbol or a trace's tensor to a bool for the kernel."""
    # In compiled code bool() of a symbol stays a symbol.
    return any([condition])


def _options(q: Tensor, k: Tensor, scale: float, dropout: float) -> dict[str, Any]:
    return {"scale": scale, "dropout_p": dropout, "enable_gqa": _plain(q.shape[1] != k.shape[1])}


def _causal_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, operator: _Operator, options: dict[str, Any]
) -> Tensor:
    """Attention block by block of rows, over the keys up to the block's last row, with one mask each."""
    asks = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    long = asks and q.shape[-2] > _ROWS and not options["dropout_p"] and operator is None
    if long and eager(q, k, v) and cpu_flash.available(q, k, v):
        return _by_flash(q, k, v, key_mask, options["scale"], None)
    operator = operator or F.scaled_dot_product_attention
    blocks = []
    for rows, keys, _ in _blocks(q, k, None):
        mask = _visible(rows[2], keys[2].stop, q, key_mask)
        block = operator(q[rows], k[keys], v[keys], attn_mask=mask, **options)
        blocks.append(block)
    return torch.cat(blocks, dim=-2)


def _blocks(
    q: Tensor, k: Tensor, spans: Spans | None
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], bool]]:
    """Rows of each block, the keys that they share, and whether a row reads them up to its position.

    Without spans the keys end at the block's last row, and rows have masks.
    """
    whole, tokens = slice(None), q.shape[-2]
    if spans is None:
        for rows in parts(tokens, _ROWS):
            yield (whole, whole, rows), (whole, whole, slice(k.shape[-2] - tokens + rows.stop)), False
        return
    stop, group = 0, q.shape[1] // k.shape[1]
    # Outputs and gradients of a block are copied: half of the heads take half of the memory.
    most = -(-k.shape[1] // 2) if tokens > _ROWS else k.shape[1]
    for (start, end), run in groupby(spans):
        entries, real = slice(stop, stop + len(list(run))), slice(start, end)
        stop = entries.stop
        for heads in parts(k.shape[1], most) if start < end else ():
            readers = slice(heads.start * group, heads.stop * group)
            yield (entries, readers, real), (entries, heads, real), True
            if end < tokens:
                yield (entries, readers, slice(end, tokens)), (entries, heads, real), False


def _visible(rows: slice, end: int, q: Tensor, key_mask: Tensor | None) -> Tensor:
    """Keys that the rows of a block may read, bool [… rows end]."""
    visible = causal_mask(rows.stop - rows.start, end, q.device)
    if key_mask is None:
        return visible
    return _without_fully_masked(visible & key_mask[:, None, None, :end], key_mask[:, :end])


def _by_flash(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float, spans: Spans | None
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    # The kernel would round the gradients of each query head, and before PyTorch 2.10 serves no groups.
    if group > 1 and (torch.is_grad_enabled() or torch.__version__ < "2.10"):
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return _CausalBlocks.apply(q, k, v, key_mask, scale, spans)


class _CausalBlocks(torch.autograd.Function):
    """Attention in blocks that rebuilds its masks in the backward pass, since they take tokens² bytes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
        key_mask, scale, spans = options
        # The memory format of the kernel's outputs.
        out = torch.zeros_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        log_sum = q.new_zeros(q.shape[:-1], dtype=upcast_dtype(q.dtype))
        for rows, keys, causal in _blocks(q, k, spans):
            bias = _bias(rows[2], keys[2].stop, q, key_mask) if spans is None else None
            out[rows], log_sum[rows] = cpu_flash.flash_rows(q[rows], k[keys], v[keys], bias, scale, causal)
            # The bias of a block is gone before that of the next is made.
            del bias
        ctx.save_for_backward(q, k, v, key_mask, out, log_sum)
        ctx.scale, ctx.spans = scale, spans
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask, out, log_sum = ctx.saved_tensors
        grad_q, (grad_k, grad_v) = torch.zeros_like(q), (torch.zeros_like(upcast(x)) for x in (k, v))
        for rows, keys, causal in _blocks(q, k, ctx.spans):
            bias = _bias(rows[2], keys[2].stop, q, key_mask) if ctx.spans is None else None
            tensors = (grad_out[rows], q[rows], k[keys], v[keys], out[rows], log_sum[rows].contiguous())
            grad_rows, grad_keys, grad_values = cpu_flash.gradients(*tensors, bias, ctx.scale, causal)
            grad_q[rows] = grad_rows
            grad_k[keys] += grad_keys
            grad_v[keys] += grad_values
            del bias, tensors, grad_rows, grad_keys, grad_values
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _bias(rows: slice, end: int, q: Tensor, key_mask: Tensor | None) -> Tensor:
    """0, or −inf where a row may not read a key, [… rows end]."""
    visible = _visible(rows, end, q, key_mask)
    return torch.zeros_like(visible, dtype=upcast_dtype(q.dtype)).masked_fill_(~visible, -torch.inf)


def _without_fully_masked(visible: Tensor, key_mask: Tensor) -> Tensor:
    """The mask, with masked keys visible to fully masked rows, whose output is then a mean of zeros.

    Kernels of different devices return different outputs for a fully masked row.
    """
    fully_masked = ~visible.any(dim=-1, keepdim=True)
    return visible | (fully_masked & ~key_mask[:, None, None, :])
