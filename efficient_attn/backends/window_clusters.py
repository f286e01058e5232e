"""Exact softmax over near keys, and one summary for each cluster of far keys."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.modules.options import one_of, option, positive_number, whole_number
from efficient_attn.modules.probe_counts import ProbingSizes, probing_operations
from efficient_attn.modules.probes import FittedProbes
from efficient_attn.modules.probing import Probing
from efficient_attn.operation_counts import MatMul, OperationCounts, softmax_matmuls
from efficient_attn.ops.clusters.attention import window_clusters, window_segments
from efficient_attn.ops.clusters.estimate import clusters_with_errors, segments_with_errors
from efficient_attn.ops.clusters.history import plan
from efficient_attn.ops.clusters.near import Layout as NearKeys
from efficient_attn.ops.sharded.clusters import own_rows
from efficient_attn.ops.sharded.exchange import total
from efficient_attn.ops.sharded.layout import Layout
from efficient_attn.ops.sharded.softmax import all_keys
from efficient_attn.ops.softmax.kv_cache import KVCache, append_tokens, mask_of
from efficient_attn.problem import AttentionProblem, positive_count
from efficient_attn.registry import Capabilities, register

_SUMMARIES = ("auto", "kmeans", "segments")
_SINKS = 4


@dataclass(frozen=True, kw_only=True)
class WindowClustersOptions:
    """Options of `window-clusters`."""

    clusters: int = option(64, "Number of cluster summaries per query, for all keys outside its window.")
    window: int = option(
        64,
        "Number of near keys per query, a multiple of 4; blocks of window/2 queries share them.",
    )
    summary: str = option(
        "auto",
        "Kind of cluster. kmeans: keys near each other; segments: consecutive keys; "
        "auto: kmeans, or segments if causal.",
    )
    steps: int = option(1, "Number of k-means steps.")
    probes: int = option(
        0,
        "Number of clusters per query whose keys are read one by one. 0: none; as many as clusters: exact.",
        added=True,
    )
    target_error: float | None = option(
        None,
        "Relative error of each head on the inputs of calibrate, which gives the head the fewest probes that "
        "reach it. None: probes.",
        added=True,
    )
    global_tokens: int = option(
        None, "Number of tokens at the beginning that every query reads exactly. None: 4 with probes, else 0."
    )

    def __post_init__(self) -> None:
        if self.global_tokens is None:
            # Many heads give the first tokens most of their weight (Xiao et al. 2024, "Efficient Streaming
            # Language Models with Attention Sinks"); a cluster would hide them among other keys.
            object.__setattr__(self, "global_tokens", _SINKS if self.opens else 0)
        positive_count("clusters", self.clusters)
        positive_count("window", self.window)
        positive_count("steps", self.steps)
        whole_number("probes", self.probes)
        whole_number("global_tokens", self.global_tokens)
        one_of("summary", self.summary, _SUMMARIES)
        if self.target_error is not None:
            positive_number("target_error", self.target_error)
            if self.probes:
                raise OptionError(
                    f"target_error={self.target_error} gives every head its own number of probes, and "
                    f"probes={self.probes} gives all the same; set one of them."
                )
        if self.opens and self.summary != "auto":
            asked = f"probes={self.probes}" if self.probes else f"target_error={self.target_error}"
            raise OptionError(f"summary={self.summary!r} has no clusters to open; {asked} needs 'auto'.")
        if self.window % 4:
            below, above = self.window // 4 * 4, self.window // 4 * 4 + 4
            near = f"{above}" if below == 0 else f"{below} or {above}"
            raise OptionError(
                f"window={self.window} cannot be a block of half and a quarter on each side; a multiple of 4 "
                f"can: {near}."
            )

    @property
    def opens(self) -> bool:
        """Whether queries open clusters."""
        return self.probes > 0 or self.target_error is not None

    @property
    def sizes(self) -> ProbingSizes:
        return ProbingSizes(self.window // 2, self.clusters, self.global_tokens)


class WindowClusters(nn.Module):
    """Attention to near keys and to clusters of far keys, computed for every input."""

    def __init__(self, problem: AttentionProblem, options: WindowClustersOptions) -> None:
        super().__init__()
        self._scale, self._options = problem.factor, options
        self._layout = _layout(problem, options)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        positions: list[range] | None = None,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        return window_clusters(q, k, v, key_mask=key_mask, positions=positions, total=total, **self._sizes())

    def forward_sharded(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
    ) -> Tensor:
        attend = partial(self, total=partial(total, layout=layout))
        return own_rows(attend, q, *all_keys(k, v, key_mask, layout), layout, causal=False)

    def estimate_error(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return clusters_with_errors(q, k, v, key_mask=key_mask, **self._sizes())[..., -1]

    def _sizes(self) -> dict[str, Any]:
        return {
            "scale": self._scale,
            "layout": self._layout,
            "clusters": self._options.clusters,
            "steps": None if self._options.summary == "segments" else self._options.steps,
        }


class WindowSegments(nn.Module):
    """Causal attention to near keys and to segments of the past."""

    def __init__(self, problem: AttentionProblem, options: WindowClustersOptions) -> None:
        super().__init__()
        self._scale, self._segments = problem.factor, options.clusters
        self._layout = _layout(problem, options)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        positions: list[range] | None = None,
    ) -> Tensor:
        return window_segments(q, k, v, key_mask=key_mask, positions=positions, **self._sizes())

    def forward_sharded(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
    ) -> Tensor:
        return own_rows(self, q, *all_keys(k, v, key_mask, layout), layout, causal=True)

    def estimate_error(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return segments_with_errors(q, k, v, key_mask=key_mask, **self._sizes())[..., -1]

    def _sizes(self) -> dict[str, Any]:
        return {"scale": self._scale, "layout": self._layout, "clusters": self._segments}

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KVCache | None, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        # Segments merge as the past grows and start at the first real token, so all keys are kept.
        cache = append_tokens(state, k, v, key_mask)
        if q.shape[2] == 0:
            return q.new_zeros(*q.shape[:3], v.shape[3]), cache
        return self(q, cache.k, cache.v, mask_of(cache)), cache


def _layout(problem: AttentionProblem, options: WindowClustersOptions) -> NearKeys:
    block = options.window // 2
    sides = (block, 0) if problem.causal else (block // 2, block // 2)
    return NearKeys(block, *sides, options.global_tokens)


def operations(
    problem: AttentionProblem, options: WindowClustersOptions, tokens: int, value_dim: int
) -> OperationCounts | None:
    """Products of every query with its slice, the global tokens outside it, and the cluster summaries.

    K-means adds products of every key with every centre at each step, and one with the mean query. Sums
    over clusters are additions, not products. With probes, opened clusters count as full, a summary has a
    third product, the spread of its scores, and all keys are multiplied with their directions, causal:
    the keys of every run with directions of its own.
    Unknown for a target error: `calibrate` finds the probes.
    """
    if options.target_error is not None:
        return None
    if options.probes:
        return probing_operations(problem, options.sizes, tokens, value_dim, number=options.probes)
    layout = _layout(problem, options)
    first = min(layout.first, tokens)
    pairs = products = 0
    for start in range(0, tokens, layout.block):
        stop = min(start + layout.block, tokens)
        low, high = max(start - layout.back, 0), min(stop + layout.ahead, tokens)
        rows = stop - start
        # Causal rows do not read later keys of their own block.
        pairs += rows * (high - low) - (rows * (rows - 1) // 2 if problem.causal else 0)
        pairs += rows * (min(first, low) + (0 if problem.causal else max(first - high, 0)))
        if problem.causal:
            pairs += rows * min(len(plan(low // layout.cell, options.clusters)), options.clusters)
    if not problem.causal:
        clusters = min(options.clusters, tokens)
        pairs += tokens * clusters
        steps = 0 if options.summary == "segments" else options.steps
        products = tokens * problem.head_dim * (steps * clusters + 1)
    choice = (MatMul(products, gradients=0, shared=True),) if products else ()
    return OperationCounts((*choice, *softmax_matmuls(pairs, problem.head_dim, value_dim)))


@register(
    "window-clusters",
    summary="Exact softmax over near keys, and one summary for each cluster of far keys.",
    options=WindowClustersOptions,
    size_option="clusters",
    capabilities=Capabilities(causal=True, cross=False, sharded="keys"),
    operations=operations,
    also=({"probes": 8},),
)
def build(problem: AttentionProblem, options: WindowClustersOptions) -> nn.Module:
    if options.target_error is not None:
        return FittedProbes(Probing(problem, options.sizes), problem, options.sizes, options.target_error)
    if options.probes:
        return Probing(problem, options.sizes, options.probes)
    if not problem.causal:
        return WindowClusters(problem, options)
    if options.summary == "kmeans":
        raise UnsupportedError(
            "summary='kmeans' cannot be causal: a cluster mixes past keys with later ones; "
            "summary='segments' can."
        )
    return WindowSegments(problem, options)
