"""Exact softmax over near keys, and one summary for each cluster of far keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from efficient_attn.errors import OptionError
from efficient_attn.operation_counts import MatMul, MatMuls, softmax_matmuls
from efficient_attn.ops.alignment import aligned
from efficient_attn.ops.clusters import near_keys, window_clusters
from efficient_attn.options import option
from efficient_attn.problem import AttentionProblem, positive_count
from efficient_attn.registry import Capabilities, register


@dataclass(frozen=True, kw_only=True)
class WindowClustersOptions:
    clusters: int = option(64, "Number of cluster summaries per query, for all keys outside its window.")
    window: int = option(
        64, "Number of near keys per query, a multiple of 4; blocks of window/2 queries share them."
    )

    def __post_init__(self) -> None:
        positive_count("clusters", self.clusters)
        positive_count("window", self.window)
        if self.window % 4:
            below, above = self.window // 4 * 4, self.window // 4 * 4 + 4
            near = f"{above}" if below == 0 else f"{below} or {above}"
            raise OptionError(
                f"window={self.window} cannot be a block of half and a quarter on each side; a multiple of 4 "
                f"can: {near}."
            )

    @property
    def block(self) -> int:
        """Number of queries that share a slice of keys."""
        return self.window // 2


def operations(
    problem: AttentionProblem, options: WindowClustersOptions, tokens: int, value_dim: int
) -> MatMuls:
    """Products of every query with its slice and the cluster summaries.

    The choice of clusters adds products of every key with every centre, and one with the mean query.
    Sums over clusters are additions, not products.
    """
    block, clusters = options.block, min(options.clusters, tokens)
    pairs = tokens * clusters
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        pairs += (stop - start) * (min(stop + block // 2, tokens) - max(start - block // 2, 0))
    choice = MatMul(tokens * problem.head_dim * (clusters + 1), gradients=0, shared=True)
    return (choice, *softmax_matmuls(pairs, problem.head_dim, value_dim))


@register(
    "window-clusters",
    summary="Exact softmax over near keys, and one summary for each cluster of far keys.",
    formula="softmax over the near keys and, for every cluster c of the others, its mean v̄_c with score "
    "s q·k̄_c + log Σ_j w_j − m·k̄_c + log(1 + a_c + a_c²/2), w_j = e^(m·k_j), m the mean of s q",
    options=WindowClustersOptions,
    size_option="clusters",
    capabilities=Capabilities(causal=False, cross=False, sharded="clusters"),
    operations=operations,
)
class WindowClusters(nn.Module):
    def __init__(self, problem: AttentionProblem, options: WindowClustersOptions) -> None:
        super().__init__()
        self._sizes: dict[str, Any] = {
            "scale": problem.factor,
            "block": options.block,
            "clusters": options.clusters,
        }

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        positions: list[range] | None = None,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        return window_clusters(q, k, v, key_mask=key_mask, positions=positions, total=total, **self._sizes)

    def keys_read(self, q: Tensor, k: Tensor, key_mask: Tensor | None, rows: Tensor) -> Tensor:
        """Keys of the slices, bool [batch 1 rows k_tokens]."""
        tokens = k.shape[2]
        return near_keys(self._sizes["block"], aligned(rows, tokens, key_mask), tokens, key_mask)[:, None]
