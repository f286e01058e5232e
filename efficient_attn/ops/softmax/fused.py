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
    if key_mask is not None and not zeroed:
        k, v = zero_masked(k, key_mask), zero_masked(v, key_mask)
    # The O(tokens) kernel requires one width for all three; zero columns change no product.
    missing = q.shape[-1] - v.shape[-1]
    if missing > 0:
        v = F.pad(v, (0, missing))
    elif missing < 0:
        q, k = F.pad(q, (0, -missing)), F.pad(k, (0, -missing))
    rowwise = causal and q.shape[-2] > 1
    if rowwise and (key_mask is not None or q.shape[-2] != k.shape[-2]):
        out = _causal_in_blocks(q, k, v, scale=scale, key_mask=key_mask, dropout=dropout)
    else:
        mask = None if key_mask is None else _without_fully_masked(key_mask[:, None, None, :], key_mask)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=rowwise,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    # A slice of the whole tensor would copy its gradient in the backward pass.
    return out[..., :-missing] if missing > 0 else out


def _causal_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_mask: Tensor | None, dropout: float
) -> Tensor:
    """Attention block by block of rows, over the keys up to the block's last row, with one mask each.

    Autograd keeps the masks.
    """
    blocks = []
    for start in range(0, q.shape[-2], _ROWS):
        stop = min(start + _ROWS, q.shape[-2])
        end = k.shape[-2] - q.shape[-2] + stop
        visible = causal_mask(stop - start, end, q.device)
        if key_mask is not None:
            visible = _without_fully_masked(visible & key_mask[:, None, None, :end], key_mask[:, :end])
        block = F.scaled_dot_product_attention(
            q[..., start:stop, :],
            k[..., :end, :],
            v[..., :end, :],
            attn_mask=visible,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        blocks.append(block)
    return torch.cat(blocks, dim=-2)


def _without_fully_masked(visible: Tensor, key_mask: Tensor) -> Tensor:
    """The mask, with masked keys visible to fully-masked rows, whose output is then a mean of zeros.

    Kernels of different devices return different outputs for a fully-masked row.
    """
    fully_masked = ~visible.any(dim=-1, keepdim=True)
    return visible | (fully_masked & ~key_mask[:, None, None, :])
