"""Exact softmax attention with materialised scores (naive attention), the baseline of the papers."""

import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.backends import exact
from efficient_attn.backends.exact import DropoutOptions
from efficient_attn.operation_counts import OperationCounts
from efficient_attn.ops.softmax.definition import apply_weights, softmax_weights
from efficient_attn.ops.softmax.kv_cache import KVCache, append_tokens, mask_of
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


class DenseAttention(nn.Module):
    """softmax(scale · q kᵀ) v by its definition, with O(tokens²) memory."""

    def __init__(self, problem: AttentionProblem, options: DropoutOptions) -> None:
        super().__init__()
        self._scale, self._causal, self._dropout = problem.factor, problem.causal, options.dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        weights = softmax_weights(q, k, scale=self._scale, causal=self._causal, key_mask=key_mask)
        weights = F.dropout(weights, self._dropout, self.training)
        return apply_weights(weights, v, key_mask=key_mask).to(q.dtype)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KVCache | None, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        cache = append_tokens(state, k, v, key_mask)
        return self(q, cache.k, cache.v, mask_of(cache)), cache


def operations(
    problem: AttentionProblem, options: DropoutOptions, tokens: int, value_dim: int
) -> OperationCounts:
    """Products of the fused kernel, with all scores in memory."""
    scores, reading = exact.operations(problem, options, tokens, value_dim).matmuls
    return OperationCounts((scores._replace(kept=tokens**2), reading))


@register(
    "exact-dense",
    summary="Exact softmax attention with materialised scores (naive attention), the papers' baseline.",
    paper="https://arxiv.org/abs/1706.03762",
    options=DropoutOptions,
    capabilities=Capabilities(
        causal=True, exact=True, second_derivatives=True, sharded="keys", time_growth=2, memory_growth=2
    ),
    operations=operations,
)
def build(problem: AttentionProblem, options: DropoutOptions) -> DenseAttention:
    return DenseAttention(problem, options)
