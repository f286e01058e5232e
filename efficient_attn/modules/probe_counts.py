"""Operation counts of attention to near keys, opened clusters and summaries."""

from typing import NamedTuple

from efficient_attn.operation_counts import MatMul, OperationCounts, softmax_matmuls
from efficient_attn.ops.clusters.trees import causal_stages, full_stages, places, sorting_products
from efficient_attn.problem import AttentionProblem


class ProbingSizes(NamedTuple):
    """Sizes of `ops.clusters.probing.probe_clusters`.

    Attributes:
        block: Number of queries that share a slice, and of keys in the smallest clusters.
        clusters: Largest number of clusters per query.
        first: Number of global tokens.
    """

    block: int
    clusters: int
    first: int


def probing_operations(
    problem: AttentionProblem,
    sizes: ProbingSizes,
    tokens: int,
    value_dim: int,
    *,
    number: int,
) -> OperationCounts:
    """Counts of one head's forward pass; `number` is that of the probes."""
    plan = causal_stages if problem.causal else full_stages
    stages = plan(tokens, **sizes._asdict())
    first = min(sizes.first, tokens)
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
            rows, probes = stop - start, number if number < sizes.clusters else len(clusters)
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
