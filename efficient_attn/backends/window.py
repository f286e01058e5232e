"""Softmax attention over a window of neighbouring keys (restricted self-attention)."""

from dataclasses import dataclass

from torch import Tensor, nn

from efficient_attn.errors import OptionError
from efficient_attn.modules.options import option
from efficient_attn.modules.relative import MAX_DISTANCE, check_no_bias, count, distance_bias
from efficient_attn.operation_counts import OperationCounts, softmax_matmuls, visible_pairs
from efficient_attn.ops.sharded.layout import Layout
from efficient_attn.ops.sharded.softmax import last_keys, near_keys_attention
from efficient_attn.ops.softmax.kv_cache import (
    KVCache,
    append_tokens,
    last_tokens,
    mask_of,
    summarise_tokens,
)
from efficient_attn.ops.softmax.relative import relative_attention
from efficient_attn.ops.window.attention import window_attention
from efficient_attn.problem import AttentionProblem, positive_count
from efficient_attn.registry import Capabilities, register


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Options of `window`."""

    window: int = option(
        257, "Number of keys per query, itself included: odd and centred; if causal, the last keys."
    )
    max_distance: int = option(0, MAX_DISTANCE, added=True)

    def __post_init__(self) -> None:
        positive_count("window", self.window)


class WindowAttention(nn.Module):
    """Attention to the window of each query.

    Attributes:
        distance_bias: Score bias of each head and distance, or None.
    """

    distance_bias: nn.Parameter | None

    def __init__(self, problem: AttentionProblem, options: WindowOptions) -> None:
        super().__init__()
        self._scale = problem.factor
        self._back, self._ahead = _sides(problem, options)
        self.register_parameter("distance_bias", distance_bias(problem, options.max_distance))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        scale, back, ahead = self._scale, self._back, self._ahead
        if self.distance_bias is None:
            return window_attention(q, k, v, scale=scale, back=back, ahead=ahead, key_mask=key_mask)
        table = self.distance_bias
        return relative_attention(q, k, v, table, scale=scale, back=back, ahead=ahead, key_mask=key_mask)

    def forward_sharded(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
    ) -> Tensor:
        check_no_bias(self.distance_bias)
        return near_keys_attention(self, q, k, v, key_mask, layout, back=self._back, ahead=self._ahead)

    def extend_sharded(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
    ) -> tuple[Tensor, KVCache]:
        out = self.forward_sharded(q, k, v, key_mask, layout)
        return out, last_keys(k, v, key_mask, layout, tokens=self._back)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KVCache | None, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        # Only the last tokens are kept, and the first call copies no others.
        first = state is None
        cache = summarise_tokens(k, v, key_mask) if first else append_tokens(state, k, v, key_mask)
        after = last_tokens(cache, self._back)
        if q.shape[-2] == 0:
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), after
        return self(q, cache.k, cache.v, mask_of(cache)), after


def _sides(problem: AttentionProblem, options: WindowOptions) -> tuple[int, int]:
    """Number of keys before and after its own position that a query reads."""
    half = options.window // 2
    return (options.window - 1, 0) if problem.causal else (half, half)


def operations(
    problem: AttentionProblem, options: WindowOptions, tokens: int, value_dim: int
) -> OperationCounts:
    """Products of every query with the existing keys of its window."""
    back, ahead = _sides(problem, options)
    matmuls = softmax_matmuls(visible_pairs(tokens, back=back, ahead=ahead), problem.head_dim, value_dim)
    return OperationCounts(matmuls, learned=count(problem, options.max_distance))


@register(
    "window",
    summary="Softmax over a window of neighbouring keys, exact within the window.",
    paper="https://arxiv.org/abs/1706.03762",
    options=WindowOptions,
    size_option="window",
    capabilities=Capabilities(causal=True, cross=False, second_derivatives=True, sharded="neighbours"),
    operations=operations,
)
def build(problem: AttentionProblem, options: WindowOptions) -> WindowAttention:
    if not problem.causal and options.window % 2 == 0:
        raise OptionError(
            f"window={options.window} has no middle; a window that is not causal is odd: "
            f"{options.window - 1} or {options.window + 1}."
        )
    return WindowAttention(problem, options)
