"""Exact softmax attention by its definition, with materialised scores, and with a score bias."""

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.grouped_queries import fold, unfold
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values, Weights


def causal_mask(q_tokens: int, k_tokens: int, device: torch.device) -> Tensor:
    """True where a query may attend, bool [q_tokens k_tokens]. The queries are the last positions."""
    return torch.ones(q_tokens, k_tokens, dtype=torch.bool, device=device).tril(k_tokens - q_tokens)


def visible_keys(q: Queries, k: Keys, *, causal: bool, key_mask: KeyMask | None) -> Tensor | None:
    """Mask of each query's visible keys, broadcastable to [batch heads q_tokens k_tokens], or None: all."""
    visible = None if key_mask is None else key_mask[:, None, None, :]
    if causal:
        triangle = causal_mask(q.shape[-2], k.shape[-2], q.device)
        visible = triangle if visible is None else visible & triangle
    return visible


def softmax_over(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax over the visible entries of the last axis. A fully masked row gets zeros."""
    if visible is None:
        return scores.softmax(dim=-1)
    fully_masked = ~visible.any(dim=-1, keepdim=True)
    # A fully masked row first gets a softmax over all entries, so that no NaN ever exists.
    scores = scores.masked_fill(~(visible | fully_masked), -torch.inf)
    return scores.softmax(dim=-1).masked_fill(fully_masked, 0.0)


def softmax_weights(
    q: Queries, k: Keys, *, scale: float, causal: bool = False, key_mask: KeyMask | None
) -> Weights:
    """softmax(scale · q·k) over the visible keys, in float32 or better."""
    scores = fold(upcast(q) * scale, k.shape[1]) @ upcast(zero_masked(k, key_mask)).mT
    visible = visible_keys(q, k, causal=causal, key_mask=key_mask)
    return softmax_over(unfold(scores, q.shape[1]), visible)


def apply_weights(weights: Weights, v: Values, *, key_mask: KeyMask | None) -> Output:
    """Σ_j weights_ij v_j for every head, with the values of a key head shared by its group of query heads."""
    return unfold(fold(weights, v.shape[1]) @ upcast(zero_masked(v, key_mask)), weights.shape[1])


def softmax_attention(
    q: Queries, k: Keys, v: Values, *, scale: float, causal: bool = False, key_mask: KeyMask | None
) -> Output:
    """softmax(scale · q kᵀ) v, the definition (Vaswani et al. 2017, eq. 1)."""
    weights = softmax_weights(q, k, scale=scale, causal=causal, key_mask=key_mask)
    return apply_weights(weights, v, key_mask=key_mask).to(q.dtype)
