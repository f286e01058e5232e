"""Attention to near keys, opened clusters and the summaries of the others, computed for every input."""

from typing import Any

from torch import Tensor, nn

from efficient_attn.modules.probe_counts import ProbingSizes
from efficient_attn.ops.clusters.decoding import ClusterCache, extend_clusters
from efficient_attn.ops.clusters.probing import probe_clusters
from efficient_attn.ops.sharded.clusters import own_rows
from efficient_attn.ops.sharded.layout import Layout
from efficient_attn.ops.sharded.softmax import all_keys
from efficient_attn.problem import AttentionProblem


class Probing(nn.Module):
    """Attention to near keys, to the keys of a few far clusters, and to the other clusters."""

    def __init__(self, problem: AttentionProblem, sizes: ProbingSizes, probes: int) -> None:
        super().__init__()
        self._causal = problem.causal
        self._sizes: dict[str, Any] = {"scale": problem.factor, "probes": probes, **sizes._asdict()}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        positions: list[range] | None = None,
    ) -> Tensor:
        return probe_clusters(
            q, k, v, causal=self._causal, key_mask=key_mask, positions=positions, **self._sizes
        )

    def forward_sharded(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
    ) -> Tensor:
        return own_rows(self, q, *all_keys(k, v, key_mask, layout), layout, causal=self._causal)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: ClusterCache | None, key_mask: Tensor | None
    ) -> tuple[Tensor, ClusterCache]:
        return extend_clusters(q, k, v, state, key_mask, **self._sizes)
