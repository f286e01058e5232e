"""Exact softmax attention with a score bias: an attention pattern or a position bias."""

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.softmax.definition import softmax_over
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values, Weights


def biased_weights(
    q: Queries, k: Keys, *, scale: float, bias: Tensor | None, key_mask: KeyMask | None
) -> Weights:
    """softmax(scale · q·k + bias) over the keys that neither the bias (−inf) nor the mask excludes.

    Args:
        bias: Broadcastable to [batch heads q_tokens k_tokens].
    """
    scores = (upcast(q) * scale) @ upcast(zero_masked(k, key_mask)).mT
    visible = None if key_mask is None else key_mask[:, None, None, :]
    if bias is not None:
        seen = bias != -torch.inf
        # Softmax of a fully-masked row of −inf would be NaN.
        scores = scores + bias.masked_fill(~seen, 0.0)
        visible = seen if visible is None else visible & seen
    return softmax_over(scores, visible)


def biased_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float,
    bias: Tensor,
    key_mask: KeyMask | None,
    dropout: float,
) -> Output:
    """softmax(scale · q kᵀ + bias) v through torch's fused kernel; `bias` as in `biased_weights`."""
    bias = bias.to(q.dtype)
    if key_mask is not None:
        bias = bias.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    k, v = zero_masked(k, key_mask), zero_masked(v, key_mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
