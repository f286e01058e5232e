"""Exact softmax attention through PyTorch's fused kernel, which never materialises the scores."""

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import zero_masked
from efficient_attn.ops.softmax.definition import causal_mask
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values

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
) -> Output:
    """softmax(scale · q kᵀ) v in O(tokens) memory, excluding inputs and output.

    Args:
        dropout: Dropout probability of the weights, 0 outside training.
        zeroed: Whether keys and values are already zero where they are masked.
    """
    if scale <= 0:
        # The kernel multiplies the −inf of its causal mask by the scale, which would give NaN or +inf.
        q, scale = q * scale, 1.0
    value_dim, widest = v.shape[-1], max(q.shape[-1], v.shape[-1])
    if not zeroed:
        k, v = zero_masked(k, key_mask), zero_masked(v, key_mask)
    # The O(tokens) kernel requires one width for all three; zero columns change no product.
    q, k, v = (x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    rowwise = causal and q.shape[-2] > 1
    if rowwise and (key_mask is not None or q.shape[-2] != k.shape[-2]):
        out = _causal_in_blocks(q, k, v, scale=scale, key_mask=key_mask, dropout=dropout)
    else:
        mask = None if key_mask is None else _without_fully_masked(key_mask[:, None, None, :], key_mask)
        out = _kernel(q, k, v, scale=scale, causal=rowwise, visible=mask, dropout=dropout)
    # A slice of the whole tensor would copy its gradient in the backward pass.
    return out if value_dim == widest else out[..., :value_dim]


def _causal_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_mask: Tensor | None, dropout: float
) -> Tensor:
    """Attention block by block of rows, over the keys up to the block's last row, with one mask each."""
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
    """The mask, with masked keys visible to fully-masked rows, whose output is then a mean of zeros.

    Kernels of different devices return different outputs for a fully-masked row.
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
