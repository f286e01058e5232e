"""Exact softmax over near keys, and one summary for each cluster of far keys, of which some are opened."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.operation_counts import MatMul, OperationCounts, softmax_matmuls
from efficient_attn.ops.clusters.closed import window_clusters
from efficient_attn.ops.clusters.decoding import ClusterCache, extend_clusters
from efficient_attn.ops.clusters.probing import keys_read, probe_clusters
from efficient_attn.ops.clusters.slices import Layout as NearKeys
from efficient_attn.ops.clusters.slices import aligned, near_keys
from efficient_attn.ops.clusters.trees import causal_stages, full_stages, places, sorting_products
from efficient_attn.options import option, whole_number
from efficient_attn.problem import AttentionProblem, positive_count
from efficient_attn.registry import Capabilities, register

_SINKS = 4
# Without opened clusters a causal past costs a language model 1.7 nats, no less than as many near keys would.
_CAUSAL_PROBES, _CAUSAL_WINDOW, _WINDOW = 4, 128, 64


@dataclass(frozen=True, kw_only=True)
class WindowClustersOptions:
    """Options of `window-clusters`."""

    clusters: int = option(64, "Number of cluster summaries per query, for all keys outside its window.")
    window: int | None = option(
        None,
        "Number of near keys per query, a multiple of 4; blocks of window/2 queries share them. None: 128 if "
        "causal, else 64.",
    )
    probes: int | None = option(
        None,
        "Number of clusters per query whose keys are read one by one; as many as clusters: exact. None: 4 if "
        "causal, else 0.",
        added=True,
    )
    global_tokens: int | None = option(
        None, "Number of tokens at the beginning that every query reads exactly. None: 4 with probes, else 0."
    )

    def __post_init__(self) -> None:
        positive_count("clusters", self.clusters)
        if self.window is not None:
            positive_count("window", self.window)
        if self.probes is not None:
            whole_number("probes", self.probes)
        if self.global_tokens is not None:
            whole_number("global_tokens", self.global_tokens)
        if self.window is not None and self.window % 4:
            below, above = self.window // 4 * 4, self.window // 4 * 4 + 4
            near = f"{above}" if below == 0 else f"{below} or {above}"
            raise OptionError(
                f"window={self.window} cannot be a block of half and a quarter on each side; a multiple of 4 "
                f"can: {near}."
            )

    def resolved(self, *, causal: bool) -> "WindowClustersOptions":
        """The options with numbers in place of None; no probes are None if not causal."""
        probes = self.probes
        if not causal:
            probes = probes or None
        elif probes is None:
            probes = _CAUSAL_PROBES
        window = (_CAUSAL_WINDOW if causal else _WINDOW) if self.window is None else self.window
        # Many heads give the first tokens most of their weight (Xiao et al. 2024, "Efficient Streaming
        # Language Models with Attention Sinks"); a cluster would hide them among other keys.
        sinks = _SINKS if probes else 0
        first = sinks if self.global_tokens is None else self.global_tokens
        return replace(self, probes=probes, window=window, global_tokens=first)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of `probe_clusters` for options that are resolved."""
        assert self.window is not None and self.global_tokens is not None
        return {"block": self.window // 2, "clusters": self.clusters, "first": self.global_tokens}


class WindowClusters(nn.Module):
    """Attention to near keys and to clusters of far keys, computed for every input."""

    def __init__(self, problem: AttentionProblem, options: WindowClustersOptions) -> None:
        super().__init__()
        self._sizes: dict[str, Any] = {
            "scale": problem.factor,
            "layout": _layout(options),
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
        """Keys of the slices, and global tokens, bool [batch 1 rows k_tokens]."""
        tokens = k.shape[2]
        return near_keys(self._sizes["layout"], aligned(rows, tokens, key_mask), tokens, key_mask)[:, None]


class Probing(nn.Module):
    """Attention to near keys, to the keys of a few far clusters, and to the other clusters."""

    def __init__(self, problem: AttentionProblem, options: WindowClustersOptions) -> None:
        super().__init__()
        self._causal = problem.causal
        self._sizes: dict[str, Any] = {"scale": problem.factor, "probes": options.probes, **options.sizes}

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

    def keys_read(self, q: Tensor, k: Tensor, key_mask: Tensor | None, rows: Tensor) -> Tensor:
        """Keys of the slices and opened clusters, and global tokens; later keys count too."""
        return keys_read(q, k, key_mask, rows, causal=self._causal, **self._sizes)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: ClusterCache | None, key_mask: Tensor | None
    ) -> tuple[Tensor, ClusterCache]:
        return extend_clusters(q, k, v, state, key_mask, **self._sizes)


def _layout(options: WindowClustersOptions) -> NearKeys:
    block, first = options.sizes["block"], options.sizes["first"]
    return NearKeys(block, block // 2, block // 2, first)


def operations(
    problem: AttentionProblem, options: WindowClustersOptions, tokens: int, value_dim: int
) -> OperationCounts:
    """Products of every query with its slice, the global tokens outside it, and the cluster summaries.

    The choice of clusters adds products of every key with every centre, and one with the mean query.
    Sums over clusters are additions, not products. With probes, opened clusters count as full, a summary has
    a third product, the spread of its scores, and all keys are multiplied with their directions, causal:
    the keys of every run with directions of its own.
    """
    options = options.resolved(causal=problem.causal)
    if options.probes:
        return probing_operations(problem, options, tokens, value_dim)
    layout, clusters = _layout(options), min(options.clusters, tokens)
    first, pairs = min(layout.first, tokens), tokens * clusters
    for start in range(0, tokens, layout.block):
        stop = min(start + layout.block, tokens)
        low, high = max(start - layout.back, 0), min(stop + layout.ahead, tokens)
        pairs += (stop - start) * (high - low + min(first, low) + max(first - high, 0))
    choice = MatMul(tokens * problem.head_dim * (clusters + 1), gradients=0, shared=True)
    return OperationCounts((choice, *softmax_matmuls(pairs, problem.head_dim, value_dim)))


def probing_operations(
    problem: AttentionProblem, options: WindowClustersOptions, tokens: int, value_dim: int
) -> OperationCounts:
    """Products of every query with its slice, opened clusters and summaries, and of keys with directions."""
    plan = causal_stages if problem.causal else full_stages
    stages = plan(tokens, **options.sizes)
    first = min(options.sizes["first"], tokens)
    assert options.probes is not None
    pairs = summaries = sorted_keys = 0
    for stage in stages if problem.causal else stages[-1:]:
        size = stage.layout.block
        runs, read = places(stage.runs(tokens, problem.causal), -(-tokens // size))
        if problem.causal:
            sorted_keys += sum(size << level for level, _ in runs if level)
        elif runs:
            # All runs share one set of directions.
            sorted_keys = tokens
        for start, clusters in zip(range(stage.begin, stage.end, size), read, strict=True):
            low, stop = max(start - size, 0), min(start + size, tokens)
            high = stop if problem.causal else min(stop + size, tokens)
            rows = stop - start
            probes = options.probes if options.probes < options.clusters else len(clusters)
            pairs += rows * (high - low + min(first, low) + min(probes, len(clusters)) * size)
            pairs += rows * (0 if problem.causal else max(first - high, 0))
            # Causal rows do not read later keys of their own block.
            pairs -= rows * (rows - 1) // 2 if problem.causal else 0
            summaries += rows * len(clusters)
    spreads = MatMul(summaries * problem.head_dim)
    choice = MatMul(sorted_keys * sorting_products(problem.head_dim), gradients=0, shared=True)
    return OperationCounts(
        (choice, spreads, *softmax_matmuls(pairs + summaries, problem.head_dim, value_dim))
    )


@register(
    "window-clusters",
    summary="Exact softmax over near keys, and one summary for each cluster of far keys.",
    formula="softmax over the near keys, the keys of `probes` clusters and, for every other cluster c, "
    "its mean with score s q·k̄_c + log n_c + log(1 + a_c + a_c²/2)",
    options=WindowClustersOptions,
    size_option="clusters",
    # Opened clusters of a fixed number grow with the tokens; without them the time is linear.
    capabilities=Capabilities(causal=True, cross=False, sharded="clusters", time_growth=2),
    operations=operations,
    also=({"probes": 8},),
)
def build(problem: AttentionProblem, options: WindowClustersOptions) -> nn.Module:
    options = options.resolved(causal=problem.causal)
    if options.probes:
        return Probing(problem, options)
    if problem.causal:
        raise UnsupportedError(
            "'window-clusters' cannot be causal with probes=0: a past of closed clusters errs as much as a "
            "window of as many keys. probes=4 opens four clusters per query; window(global_tokens=4) is "
            "exact over a window and the first keys."
        )
    return WindowClusters(problem, options)
