"""Softmax attention with a learned score bias for each distance, in blocks of queries."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.grouped_queries import fold, unfold
from efficient_attn.ops.operators import transformed
from efficient_attn.ops.softmax.definition import apply_weights
from efficient_attn.shapes import DistanceBias, KeyMask, Keys, Output, Queries, Values

# Queries per block: of a block alone scores, or masked biases, are materialised, [batch heads rows keys].
_ROWS = 128
# Queries per block of the fused kernel, which reads biases from a view of the table.
_FUSED_ROWS = 2048


def relative_attention(
    q: Queries,
    k: Keys,
    v: Values,
    table: DistanceBias,
    *,
    scale: float,
    back: int,
    ahead: int,
    key_mask: KeyMask | None,
    dropout: float = 0.0,
) -> Output:
    """softmax over j of scale · q_i·k_j + b(j − i) for the keys i−back … i+ahead; the queries come last.

    Distances beyond the table have the bias of its nearest end (Shaw et al. 2018, section 3.2, with a scalar
    for each head and distance, as in Raffel et al. 2020, section 2.1).

    Args:
        table: Bias b of the distances −R … R, or −R … 0 if `ahead` is 0, R the longest.
    """
    before, k_tokens = k.shape[-2] - q.shape[-2], k.shape[-2]
    k, v = (upcast(zero_masked(x, key_mask)) for x in (k, v))
    # A block's scores would live until the backward pass, tokens² in all, were they not computed again.
    again = torch.is_grad_enabled() and not transformed(q, k, v, table)
    fused = not torch.is_grad_enabled() and key_mask is None
    size = max(_ROWS, min(back + ahead, _FUSED_ROWS)) if fused else _ROWS
    outs = []
    for start in range(0, q.shape[-2], size):
        # In reversed order each row of biases begins one distance after the row before: a view of all.
        rows = (upcast(q[..., start : start + size, :]) * scale).flip(-2)
        first, last = before + start, before + start + rows.shape[-2] - 1
        read = slice(max(0, first - back), min(k_tokens, last + ahead + 1))
        distances = torch.arange(read.start - last, read.stop - first, device=q.device)
        mask = None if key_mask is None else key_mask[:, read]
        given = (rows, k[..., read, :], v[..., read, :], table, distances, back, ahead, mask, dropout)
        outs.append(checkpoint(_attend, *given, use_reentrant=False) if again else _attend(*given))
    return torch.cat([out.flip(-2) for out in outs], dim=-2).to(q.dtype)


def _attend(
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    distances: Tensor,
    back: int,
    ahead: int,
    mask: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention of scaled queries in reversed order; `distances` holds all of them, in ascending order."""
    zero = table.shape[-1] // 2 if ahead else table.shape[-1] - 1
    biases = table.to(rows.dtype)[:, (distances + zero).clamp(0, table.shape[-1] - 1)]
    biases = biases.masked_fill((distances < -back) | (distances > ahead), -torch.inf)
    bias = biases.unfold(-1, k.shape[-2], 1)
    if mask is not None:
        hidden = ~mask[:, None, None, :]
        bias = bias.masked_fill(hidden, -torch.inf)
        # The values of masked keys are zero, and so is a mean of them: the output of a row without keys.
        bias = bias.masked_fill((bias == -torch.inf).all(dim=-1, keepdim=True) & hidden, 0.0)
    if not torch.is_grad_enabled():
        grouped = rows.shape[1] != k.shape[1]
        bias = bias.expand(len(rows), *bias.shape[-3:])
        return F.scaled_dot_product_attention(rows, k, v, bias, dropout, scale=1.0, enable_gqa=grouped)
    # The fused kernel has no gradient of a bias.
    scores = unfold(fold(rows, k.shape[1]) @ k.mT, rows.shape[1])
    weights = F.dropout((scores + bias).softmax(dim=-1), dropout)
    return apply_weights(weights, v, key_mask=None)
