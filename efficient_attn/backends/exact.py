"""Exact softmax attention: PyTorch's fused kernel, and materialised scores."""

from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.errors import OptionError
from efficient_attn.operation_counts import MatMuls, softmax_matmuls, visible_pairs
from efficient_attn.ops.dtypes import attend_in
from efficient_attn.ops.exact_kernels import KERNELS, operator_of
from efficient_attn.ops.softmax.definition import apply_weights, softmax_weights
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.ops.softmax.kv_cache import KVCache, append_tokens, mask_of
from efficient_attn.options import check_compute_dtype, compute_dtype_option, one_of, option, probability
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


@dataclass(frozen=True, kw_only=True)
class ExactOptions:
    dropout: float = option(0.0, "Dropout probability of the attention weights in training.")
    compute_dtype: str | None = compute_dtype_option()
    kernel: str = option("default", f"Kernel: {', '.join(KERNELS)}. default is PyTorch's choice.", added=True)

    def __post_init__(self) -> None:
        probability("dropout", self.dropout)
        check_compute_dtype(self.compute_dtype)
        one_of("kernel", self.kernel, KERNELS)
        if self.dropout and self.kernel != "default":
            raise OptionError(f"kernel={self.kernel!r} has no dropout; kernel='default' has.")


@dataclass(frozen=True, kw_only=True)
class DenseOptions:
    dropout: float = option(0.0, "Dropout probability of the attention weights in training.")

    def __post_init__(self) -> None:
        probability("dropout", self.dropout)


def operations(problem: AttentionProblem, options: object, tokens: int, value_dim: int) -> MatMuls:
    """Products of every query with every key or, if causal, with the keys up to its own position."""
    pairs = visible_pairs(tokens, back=tokens - 1, ahead=0 if problem.causal else tokens - 1)
    return softmax_matmuls(pairs, problem.head_dim, value_dim)


@register(
    "exact",
    summary="Exact softmax attention by PyTorch's fused kernel.",
    formula="out_i = Σ_j softmax_j(s q_i·k_j) v_j, s = 1/√head_dim",
    paper="https://arxiv.org/abs/1706.03762",
    options=ExactOptions,
    capabilities=Capabilities(causal=True, exact=True, sharded="keys", time_growth=2),
    operations=operations,
    also=({"compute_dtype": "bfloat16"},),
)
class FusedAttention(nn.Module):
    """softmax(scale · q kᵀ) v without materialised scores."""

    def __init__(self, problem: AttentionProblem, options: ExactOptions) -> None:
        super().__init__()
        self._scale, self._causal, self._dropout = problem.factor, problem.causal, options.dropout
        self._dtype = options.compute_dtype
        self._attend = partial(fused_attention, operator=operator_of(options.kernel))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, zeroed: bool = False
    ) -> Tensor:
        options = {"scale": self._scale, "causal": self._causal, "key_mask": key_mask, "zeroed": zeroed}
        dropout = self._dropout if self.training else 0.0
        return attend_in(self._dtype, self._attend, q, k, v, dropout=dropout, **options)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KVCache | None, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        cache = append_tokens(state, k, v, key_mask)
        if q.shape[-2] == 0:
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), cache
        return self(q, cache.k, cache.v, mask_of(cache), zeroed=True), cache


@register(
    "exact-dense",
    summary="Exact softmax attention with materialised scores (naive attention), the papers' baseline.",
    formula="out_i = Σ_j softmax_j(s q_i·k_j) v_j, s = 1/√head_dim",
    paper="https://arxiv.org/abs/1706.03762",
    options=DenseOptions,
    capabilities=Capabilities(
        causal=True, exact=True, second_derivatives=True, sharded="keys", time_growth=2, memory_growth=2
    ),
    operations=operations,
)
class DenseAttention(nn.Module):
    """softmax(scale · q kᵀ) v by its definition, with O(tokens²) memory."""

    def __init__(self, problem: AttentionProblem, options: DenseOptions) -> None:
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
