"""Exact softmax attention: PyTorch's fused kernel, materialised scores, and learned biases of distances."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.operation_counts import OperationCounts, softmax_matmuls, visible_pairs
from efficient_attn.ops.softmax.definition import apply_weights, softmax_weights
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.ops.softmax.kv_cache import KVCache, append_tokens, mask_of
from efficient_attn.ops.softmax.relative import relative_attention
from efficient_attn.options import option, probability, whole_number
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register

MAX_DISTANCE = "Longest distance with a learned score bias of its own, per head (relative position); 0: none."


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
    problem: AttentionProblem, options: ExactOptions | DropoutOptions, tokens: int, value_dim: int
) -> OperationCounts:
    """Products of every query with every key; if causal, with the keys up to its own position."""
    pairs = visible_pairs(tokens, back=tokens - 1, ahead=0 if problem.causal else tokens - 1)
    matmuls = softmax_matmuls(pairs, problem.head_dim, value_dim)
    return OperationCounts(matmuls, learned=count(problem, getattr(options, "max_distance", 0)))


def dense_operations(
    problem: AttentionProblem, options: DropoutOptions, tokens: int, value_dim: int
) -> OperationCounts:
    """Products of the fused kernel, with all scores in memory."""
    scores, reading = operations(problem, options, tokens, value_dim).matmuls
    return OperationCounts((scores._replace(kept=tokens**2), reading))


@register(
    "exact",
    summary="Exact softmax attention by PyTorch's fused kernel.",
    formula="out_i = Σ_j softmax_j(s q_i·k_j) v_j, s = 1/√head_dim",
    paper="https://arxiv.org/abs/1706.03762",
    options=ExactOptions,
    capabilities=Capabilities(causal=True, exact=True, sharded="keys", time_growth=2),
    operations=operations,
)
def build(problem: AttentionProblem, options: ExactOptions) -> FusedAttention:
    return FusedAttention(problem, options)


@register(
    "exact-dense",
    summary="Exact softmax attention with materialised scores (naive attention), the papers' baseline.",
    formula="out_i = Σ_j softmax_j(s q_i·k_j) v_j, s = 1/√head_dim",
    paper="https://arxiv.org/abs/1706.03762",
    options=DropoutOptions,
    capabilities=Capabilities(
        causal=True, exact=True, second_derivatives=True, sharded="keys", time_growth=2, memory_growth=2
    ),
    operations=dense_operations,
)
def build_dense(problem: AttentionProblem, options: DropoutOptions) -> DenseAttention:
    return DenseAttention(problem, options)


def distance_bias(problem: AttentionProblem, max_distance: int) -> nn.Parameter | None:
    """Zeros, [num_heads, 2 max_distance + 1], or of a causal problem [num_heads, max_distance + 1].

    Raises:
        OptionError: If the problem leaves the number of heads open.
    """
    if not (learned := count(problem, max_distance)):
        return None
    if problem.num_heads is None:
        raise OptionError(f"max_distance={max_distance} is a learned bias for each head: give num_heads.")
    return nn.Parameter(torch.zeros(problem.num_heads, learned // problem.num_heads))


def count(problem: AttentionProblem, max_distance: int) -> int:
    """Number of biases, of one head if the problem leaves the number of heads open."""
    whole_number("max_distance", max_distance)
    distances = max_distance + 1 if problem.causal else 2 * max_distance + 1
    return (problem.num_heads or 1) * distances if max_distance else 0


def check_one_sequence(q: Tensor, k: Tensor, *, causal: bool) -> None:
    """Refuse keys of another sequence, from whose tokens queries have no distance."""
    if not causal and q.shape[-2] != k.shape[-2]:
        raise UnsupportedError(
            f"q has {q.shape[-2]} tokens and k has {k.shape[-2]}: relative positions compare tokens of one "
            "sequence; build with max_distance=0 for cross-attention."
        )


def check_no_bias(bias: nn.Parameter | None) -> None:
    """Refuse relative positions where the tokens of a sequence are distributed over ranks."""
    if bias is not None:
        raise UnsupportedError(
            "Inside efficient_attn's context_parallel no backend has relative positions; build it with "
            "max_distance=0, or use rotary positions."
        )
