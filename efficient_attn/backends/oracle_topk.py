"""Softmax over the keys with the largest scores: an upper bound on the weight of that many keys."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from efficient_attn.ops.dtypes import WITHOUT_FLOAT64, upcast, zero_masked
from efficient_attn.ops.grouped_queries import fold, unfold
from efficient_attn.ops.paths import parts, step_capacity
from efficient_attn.ops.softmax.definition import apply_weights, softmax_over
from efficient_attn.ops.softmax.kv_cache import KVCache, append_tokens, mask_of
from efficient_attn.options import option
from efficient_attn.problem import AttentionProblem, positive_count
from efficient_attn.registry import Capabilities, register

from .exact import operations

# Weights tie that differ by this share: equal keys have weights that differ by rounding.
_TIE = 1e-12


@dataclass(frozen=True, kw_only=True)
class OracleTopKOptions:
    keys: int = option(64, "Number of keys per query, of the largest scores; more where weights tie.")

    def __post_init__(self) -> None:
        positive_count("keys", self.keys)


@register(
    "oracle-topk",
    summary="Exact softmax over the keys with the largest scores: a reference, never faster.",
    formula="out_i = Σ_{j ∈ T(i)} softmax_j(s q_i·k_j) v_j, T(i) the keys of the `keys` largest scores",
    paper="https://arxiv.org/abs/2106.06899",
    options=OracleTopKOptions,
    size_option="keys",
    capabilities=Capabilities(causal=True, second_derivatives=True, time_growth=2, memory_growth=2),
    operations=operations,
    compared=False,
)
class OracleTopK(nn.Module):
    def __init__(self, problem: AttentionProblem, options: OracleTopKOptions) -> None:
        super().__init__()
        self._scale, self._causal, self._keys = problem.factor, problem.causal, options.keys

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        rows, size = torch.arange(q.shape[2], device=q.device), q.shape[0] * q.shape[1] * k.shape[2]
        outs = [
            apply_weights(self._weights(q, k, key_mask, rows[part]), _wide(v), key_mask=key_mask)
            for part in parts(max(q.shape[2], 1), step_capacity(size))
        ]
        return torch.cat(outs, dim=2).to(q.dtype)

    def keys_read(self, q: Tensor, k: Tensor, key_mask: Tensor | None, rows: Tensor) -> Tensor:
        """Keys of the largest weights, bool [batch heads rows k_tokens]."""
        return self._weights(q, k, key_mask, rows) > 0

    def _weights(self, q: Tensor, k: Tensor, key_mask: Tensor | None, rows: Tensor) -> Tensor:
        visible = None if key_mask is None else key_mask[:, None, None]
        if self._causal:
            past = torch.arange(k.shape[2], device=q.device) <= rows[:, None] + k.shape[2] - q.shape[2]
            visible = past if visible is None else visible & past
        scores = fold(_wide(q[:, :, rows]) * self._scale, k.shape[1]) @ _wide(zero_masked(k, key_mask)).mT
        weights = softmax_over(unfold(scores, q.shape[1]), visible)
        least = weights.detach().topk(min(self._keys, k.shape[2]), dim=3).values[..., -1:]
        weights = weights.masked_fill(weights < (1 - _TIE) * least, 0.0)
        total = weights.sum(dim=3, keepdim=True)
        return weights / total.masked_fill(total == 0, 1.0)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KVCache | None, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        cache = append_tokens(state, k, v, key_mask)
        return self(q, cache.k, cache.v, mask_of(cache)), cache


def _wide(x: Tensor) -> Tensor:
    """`x` in float64 where the device has it, so that rounding does not decide which key is the last."""
    return upcast(x) if x.device.type in WITHOUT_FLOAT64 else x.double()
