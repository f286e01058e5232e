"""Exact softmax attention through torch's fused kernel, which never builds the scores."""

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import zero_masked
from efficient_attn.ops.softmax.definition import causal_mask
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values

# Rows per call where the kernel needs a mask that differs from row to row: such a mask would
# otherwise take tokens² bytes.
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
    hidden: bool = False,
) -> Output:
    """softmax(scale · q kᵀ) v in O(tokens) memory beyond inputs and output.

    `dropout` is the probability with which a weight is dropped, 0 outside training; `hidden` tells that
    keys and values hold zeros already where they are masked.
    """
    if scale <= 0:
        # The kernel multiplies the −inf of its own causal mask by the scale: NaN, or +inf.
        q, scale = q * scale, 1.0
    value_dim, widest = v.shape[-1], max(q.shape[-1], v.shape[-1])
    if not hidden:
        k, v = zero_masked(k, key_mask), zero_masked(v, key_mask)
    # The kernel in O(tokens) memory wants all three equally wide; zeros change no product.
    q, k, v = (x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    rowwise = causal and q.shape[-2] > 1
    if rowwise and (key_mask is not None or q.shape[-2] != k.shape[-2]):
        out = _causal_in_blocks(q, k, v, scale=scale, key_mask=key_mask, dropout=dropout)
    else:
        mask = None if key_mask is None else _without_fully_masked(key_mask[:, None, None, :], key_mask)
        out = _kernel(q, k, v, scale=scale, causal=rowwise, visible=mask, dropout=dropout)
    # A slice of everything would copy its gradient on the way back.
    return out if value_dim == widest else out[..., :value_dim]


def _causal_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_mask: Tensor | None, dropout: float
) -> Tensor:
    """A block of rows at a time, each with the keys up to its last row and a mask of its own."""
    before = k.shape[-2] - q.shape[-2]
    blocks = []
    for start in range(0, q.shape[-2], _ROWS):
        rows = q[..., start : start + _ROWS, :]
        end = before + start + rows.shape[-2]
        keys, mask = k[..., :end, :], None if key_mask is None else key_mask[:, :end]
        visible = causal_mask(rows.shape[-2], end, q.device)
        if mask is not None:
            visible = _without_fully_masked(visible & mask[:, None, None, :], mask)
        blocks.append(
            _kernel(rows, keys, v[..., :end, :], scale=scale, causal=False, visible=visible, dropout=dropout)
        )
    return torch.cat(blocks, dim=-2)


def _without_fully_masked(visible: Tensor, key_mask: Tensor) -> Tensor:
    """Let a row that sees no key see the masked ones: their values are hidden, zero, and so is the average.

    What a kernel makes of a row without any key differs from device to device.
    """
    fully_masked = ~visible.any(dim=-1, keepdim=True)
    return visible | (fully_masked & ~key_mask[:, None, None, :])


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, visible: Tensor | None, dropout: float
) -> Tensor:
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=visible,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
