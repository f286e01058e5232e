"""Row sums of signed features, which may be zero or negative."""

import torch
from torch import Tensor

from efficient_attn.ops.linear.causal import causal_linear_attention
from efficient_attn.ops.linear.full import full_linear_attention
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.parts import chunks
from efficient_attn.ops.linear.state import finite


def denominators(inputs: LinearInputs, *, causal: bool) -> Tensor:
    """Σ_j φ(q)·φ(k_j) over the largest visible exp(log_scale_j), [batch heads q_tokens].

    The query's own scale, common to its row, is omitted. Fully-masked rows give 0.
    """
    # Values of width zero, since only the sum of the features is needed.
    bare = inputs._replace(v=inputs.k[..., :0])
    outputs = causal_linear_attention(bare) if causal else full_linear_attention(bare)
    logarithm = outputs.log_normaliser - finite(_largest_scale(inputs, causal=causal))
    size = logarithm.masked_fill(logarithm == torch.inf, -torch.inf).exp()
    return torch.where(outputs.negative, -size, size).squeeze(-1)


def _largest_scale(inputs: LinearInputs, *, causal: bool) -> Tensor:
    """Largest log_scale among the visible keys of a query, [batch heads q_tokens|1 1]."""
    scales = torch.cat(
        [
            inputs.key_features(inputs.key_rows(part), part).log_scale
            for part in chunks(inputs, inputs.k.shape[-2])
        ],
        dim=-2,
    )
    before = inputs.k.shape[-2] - inputs.q.shape[-2]
    largest = scales.cummax(dim=-2).values[..., before:, :] if causal else scales.amax(-2, keepdim=True)
    return largest.repeat_interleave(inputs.group, dim=1)
