"""Softmax attention over a window of neighbouring keys (restricted self-attention)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.errors import OptionError
from efficient_attn.operation_counts import MatMuls, softmax_matmuls, visible_pairs
from efficient_attn.ops.dtypes import attend_in
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.ops.softmax.kv_cache import (
    KVCache,
    append_tokens,
    last_tokens,
    mask_of,
    summarise_tokens,
)
from efficient_attn.ops.window.attention import window_attention
from efficient_attn.ops.window.global_keys import AgedKeys, GlobalKeys, first_keys
from efficient_attn.ops.window.streaming import WindowState, extend_window, slide_window
from efficient_attn.options import check_compute_dtype, compute_dtype_option, option, whole_number
from efficient_attn.problem import AttentionProblem, positive_count
from efficient_attn.registry import Capabilities, register


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    window: int = option(
        257, "Number of keys per query, itself included: odd and centred; if causal, the last keys."
    )
    global_tokens: int = option(
        0, "Number of first real tokens that every query reads besides its window.", added=True
    )
    compute_dtype: str | None = compute_dtype_option()

    def __post_init__(self) -> None:
        positive_count("window", self.window)
        whole_number("global_tokens", self.global_tokens)
        check_compute_dtype(self.compute_dtype)

    def sides(self, *, causal: bool) -> tuple[int, int]:
        """Number of keys before and after its position that a query reads."""
        half = self.window // 2
        return (self.window - 1, 0) if causal else (half, half)


def operations(problem: AttentionProblem, options: WindowOptions, tokens: int, value_dim: int) -> MatMuls:
    """Products of every query with the existing keys of its window and the global keys outside it."""
    back, ahead = options.sides(causal=problem.causal)
    pairs = visible_pairs(tokens, back=back, ahead=ahead)
    for at in range(min(options.global_tokens, tokens)):
        pairs += max(tokens - 1 - back - at, 0) + (0 if problem.causal else max(at - ahead, 0))
    return softmax_matmuls(pairs, problem.head_dim, value_dim)


@register(
    "window",
    summary="Softmax over a window of neighbouring keys, exact within the window.",
    formula="out_i = Σ_{j ∈ N(i)} softmax_j(s q_i·k_j) v_j, "
    "N(i) the `window` keys around i (causal: up to i) and the global ones",
    paper="https://arxiv.org/abs/1706.03762",
    options=WindowOptions,
    size_option="window",
    capabilities=Capabilities(causal=True, cross=False, second_derivatives=True, sharded="neighbours"),
    operations=operations,
    also=({"global_tokens": 4},),
)
class WindowAttention(nn.Module):
    def __init__(self, problem: AttentionProblem, options: WindowOptions) -> None:
        super().__init__()
        if not problem.causal and options.window % 2 == 0:
            raise OptionError(
                f"window={options.window} has no middle; a window that is not causal is odd: "
                f"{options.window - 1} or {options.window + 1}."
            )
        self._scale, self._causal, self._count = problem.factor, problem.causal, options.global_tokens
        self._back, self._ahead = options.sides(causal=problem.causal)
        self._sides = {"scale": problem.factor, "back": self._back, "ahead": self._ahead}
        self._dtype = options.compute_dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        # A window that reaches both ends of the sequence has every key.
        alone = not self._count or (not self._causal and self._ahead >= k.shape[2] - 1)
        first = None if alone else first_keys(k, v, key_mask, self._count)
        return self.attend(q, k, v, key_mask, first)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: AgedKeys | None
    ) -> Tensor:
        """The output, with global keys aged from the last key."""
        back, ahead = self._back, self._ahead
        keys = None
        if first is not None:
            keys = first.seen_by(q.shape[2], k.shape[2], back=back, ahead=ahead, causal=self._causal)
        return attend_in(self._dtype, window_attention, q, k, v, key_mask=key_mask, first=keys, **self._sides)

    def keys_read(self, q: Tensor, k: Tensor, key_mask: Tensor | None, rows: Tensor) -> Tensor:
        """Keys of the windows and global tokens, bool [batch 1 rows k_tokens], later keys included."""
        keys = torch.arange(k.shape[2], device=k.device)
        offset = keys - (rows[:, None] + k.shape[2] - q.shape[2])
        real = keys.new_ones(k.shape[0], len(keys), dtype=torch.bool) if key_mask is None else key_mask
        first = real & (real.cumsum(dim=1) <= self._count)
        return ((offset >= -self._back) & (offset <= self._ahead) | first[:, None])[:, None]

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache | WindowState]:
        if k.shape[2] == 0 and state is not None:
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), state
        step = None
        if state is not None and key_mask is None:
            step = slide_window(state, q, k, v, back=self._back)
        if step is not None:
            keys, values, after = step
            options = {"scale": self._scale, "key_mask": None, "dropout": 0.0}
            return attend_in(self._dtype, fused_attention, q, keys, values, **options), after
        first: GlobalKeys | None = None
        if self._count:
            back, count = self._back, self._count
            cache, first, after = extend_window(state, k, v, key_mask, count=count, back=back)
        else:
            # Only the last tokens are stored, and the first call copies only them.
            cache = append_tokens(state, k, v, key_mask) if state else summarise_tokens(k, v, key_mask)
            after = last_tokens(cache, self._back)
        if k.shape[2] == 0:
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), after
        k, v, mask = cache.k, cache.v, mask_of(cache)
        if first is None:
            return self(q, k, v, mask), after
        out = attend_in(self._dtype, window_attention, q, k, v, key_mask=mask, first=first, **self._sides)
        return out, after
