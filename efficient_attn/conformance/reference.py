"""Reference softmax attention, computed from the definition in the dtype of its inputs."""

import torch
from torch import Tensor

from efficient_attn.conformance.cases import Inputs


def exact(inputs: Inputs, *, scale: float, causal: bool, reach: int | None = None, first: int = 0) -> Tensor:
    """Σ_j exp(scale · q_i·k_j) v_j / Σ_j exp(scale · q_i·k_j) over visible j; zeros for fully-masked rows.

    Args:
        reach: Maximum distance between a query and a visible key; None: unlimited.
        first: Number of first real keys that are visible at any distance.
    """
    q, k, v, key_mask = inputs
    group = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    k, v = k[:, group], v[:, group]
    visible = _visible(q.shape[2], k.shape[2], causal, reach)[None, None]
    if first:
        real = k.new_ones(len(k), k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        of_all = (real & (real.cumsum(dim=-1) <= first))[:, None, None, :]
        visible = visible | (of_all & _visible(q.shape[2], k.shape[2], causal, None))
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
        v = torch.where(key_mask[:, None, :, None], v, 0)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    scores = torch.where(visible, scores, -torch.inf)
    highest = scores.amax(dim=-1, keepdim=True)
    weights = torch.where(visible, (scores - highest.nan_to_num(neginf=0.0)).exp(), 0)
    total = weights.sum(dim=-1, keepdim=True)
    return torch.einsum("bhij,bhjd->bhid", weights / torch.where(total > 0, total, 1), v)


def _visible(q_tokens: int, k_tokens: int, causal: bool, reach: int | None) -> Tensor:
    ahead = torch.arange(k_tokens) - (torch.arange(q_tokens)[:, None] + k_tokens - q_tokens)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if causal:
        seen &= ahead <= 0
    return seen if reach is None else seen & (ahead.abs() <= reach)
