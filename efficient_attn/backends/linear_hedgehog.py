"""Hedgehog: linear attention through learned feature maps."""

from dataclasses import dataclass, replace

from efficient_attn.modules.learned_features import LearnedFeatures
from efficient_attn.modules.linear import LinearAttention, linear_operations
from efficient_attn.modules.options import one_of, option
from efficient_attn.operation_counts import MatMul, OperationCounts
from efficient_attn.ops.linear.features import LEARNED_MAPS
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


@dataclass(frozen=True, kw_only=True)
class HedgehogOptions:
    """Options of Hedgehog."""

    features: str = option(
        "softmax",
        "softmax: softmax(Wx + b) and softmax(−Wx − b); exponential: exp(Wx + b) and exp(−Wx − b).",
    )

    def __post_init__(self) -> None:
        one_of("features", self.features, LEARNED_MAPS)


def operations(
    problem: AttentionProblem, options: HedgehogOptions, tokens: int, value_dim: int
) -> OperationCounts:
    """Products of W with queries and keys, then linear attention with 2·head_dim features."""
    dim, heads = problem.head_dim, problem.num_heads
    doubled = replace(problem, head_dim=2 * dim)
    linear = linear_operations("exponential", doubled, options, tokens, value_dim).matmuls
    normalising = 2 * tokens * dim if options.features == "softmax" else 0
    maps = (MatMul(tokens * dim * dim, exponentials=normalising, shared=own) for own in (False, True))
    matmuls = (*maps, *linear)
    if heads is not None:
        # A key map for each query head leaves nothing that a group of heads could share.
        matmuls = tuple(one._replace(shared=False) for one in matmuls)
    return OperationCounts(matmuls, learned=2 * (heads or 1) * dim * (dim + 1))


@register(
    "linear-hedgehog",
    summary="Hedgehog, with feature maps learned per head: a kernel other than softmax until trained.",
    paper="https://arxiv.org/abs/2402.04347",
    options=HedgehogOptions,
    capabilities=Capabilities(causal=True, approximates_softmax=False, sharded="states"),
    operations=operations,
)
def build(problem: AttentionProblem, options: HedgehogOptions) -> LinearAttention:
    return LinearAttention(LearnedFeatures(problem, options.features), problem)
