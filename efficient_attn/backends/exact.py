"""Exact softmax attention by PyTorch's fused kernel."""

from dataclasses import dataclass

from torch import Tensor, nn

from efficient_attn.modules.options import option, probability
from efficient_attn.modules.relative import (
    MAX_DISTANCE,
    check_one_sequence,
    count,
    distance_bias,
)
from efficient_attn.operation_counts import OperationCounts, softmax_matmuls, visible_pairs
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.ops.softmax.kv_cache import KVCache, append_tokens, mask_of
from efficient_attn.ops.softmax.relative import relative_attention
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


@dataclass(frozen=True, kw_only=True)
class DropoutOptions:
    """Options of the backends with attention dropout."""

    dropout: float = option(0.0, "Dropout probability of the attention weights in training.")

    def __post_init__(self) -> None:
        probability("dropout", self.dropout)


@dataclass(frozen=True, kw_only=True)
class ExactOptions(DropoutOptions):
    """Options of `exact`."""

    max_distance: int = option(0, MAX_DISTANCE, added=True)


class FusedAttention(nn.Module):
    """softmax(scale · q kᵀ) v without materialised scores.

    Attributes:
        distance_bias: Score bias of each head and distance, or None.
    """

    distance_bias: nn.Parameter | None

    def __init__(self, problem: AttentionProblem, options: ExactOptions) -> None:
        super().__init__()
        self._scale, self._causal, self._dropout = problem.factor, problem.causal, options.dropout
        self.register_parameter("distance_bias", distance_bias(problem, options.max_distance))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, zeroed: bool = False
    ) -> Tensor:
        if self.distance_bias is not None:
            check_one_sequence(q, k, causal=self._causal)
            return relative_attention(
                q,
                k,
                v,
                self.distance_bias,
                scale=self._scale,
                back=k.shape[-2],
                ahead=0 if self._causal else k.shape[-2],
                key_mask=key_mask,
                dropout=self._dropout if self.training else 0.0,
            )
        return fused_attention(
            q,
            k,
            v,
            scale=self._scale,
            causal=self._causal,
            key_mask=key_mask,
            dropout=self._dropout if self.training else 0.0,
            zeroed=zeroed,
        )

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KVCache | None, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        cache = append_tokens(state, k, v, key_mask)
        if q.shape[-2] == 0:
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), cache
        return self(q, cache.k, cache.v, mask_of(cache), zeroed=True), cache


def operations(
    problem: AttentionProblem, options: ExactOptions | DropoutOptions, tokens: int, value_dim: int
) -> OperationCounts:
    """Products of every query with every key; if causal, with the keys up to its own position."""
    pairs = visible_pairs(tokens, back=tokens - 1, ahead=0 if problem.causal else tokens - 1)
    matmuls = softmax_matmuls(pairs, problem.head_dim, value_dim)
    return OperationCounts(matmuls, learned=count(problem, getattr(options, "max_distance", 0)))


@register(
    "exact",
    summary="Exact softmax attention by PyTorch's fused kernel.",
    paper="https://arxiv.org/abs/1706.03762",
    options=ExactOptions,
    capabilities=Capabilities(causal=True, exact=True, sharded="keys", time_growth=2),
    operations=operations,
)
def build(problem: AttentionProblem, options: ExactOptions) -> FusedAttention:
    return FusedAttention(problem, options)
