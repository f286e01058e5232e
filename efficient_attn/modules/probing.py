"""Attention to near keys, opened clusters and the summaries of the others, computed for every input."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from efficient_attn.modules.probe_counts import ProbingSizes
from efficient_attn.ops.clusters.decoding import ClusterCache, extend_clusters
from efficient_attn.ops.clusters.estimate_probes import probing_with_errors
from efficient_attn.ops.clusters.probing import probe_clusters
from efficient_attn.problem import AttentionProblem


class Probing(nn.Module):
    """Attention to near keys, to the keys of a few far clusters, and to the other clusters."""

    def __init__(self, problem: AttentionProblem, sizes: ProbingSizes, probes: int = 0) -> None:
        super().__init__()
        self._causal, self._probes = problem.causal, probes
        self._sizes: dict[str, Any] = {"scale": problem.factor, **sizes._asdict()}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        positions: list[range] | None = None,
    ) -> Tensor:
        return self.attend(q, k, v, key_mask, [self._probes] * q.shape[1], positions)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        probes: Sequence[int],
        positions: list[range] | None = None,
    ) -> Tensor:
        """The output with the number of probes of each head."""
        options: dict[str, Any] = {**self._sizes, "causal": self._causal, "positions": positions}
        return probe_clusters(q, k, v, probes=probes, key_mask=key_mask, **options)

    def estimate_error(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, probes: Sequence[int] | None = None
    ) -> Tensor:
        probes = probes or [self._probes] * q.shape[1]
        found = probing_with_errors(
            q, k, v, probes=probes, causal=self._causal, key_mask=key_mask, **self._sizes
        )
        return found[..., -1]

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: ClusterCache | None, key_mask: Tensor | None
    ) -> tuple[Tensor, ClusterCache]:
        return self.attend_next(q, k, v, state, key_mask, [self._probes] * q.shape[1])

    def attend_next(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: ClusterCache | None,
        key_mask: Tensor | None,
        probes: Sequence[int],
    ) -> tuple[Tensor, ClusterCache]:
        """`extend` with the number of probes of each head."""
        return extend_clusters(q, k, v, state, key_mask, probes=probes, **self._sizes)
