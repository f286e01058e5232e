"""Performer with hyperbolic random features: positive features at w and −w."""

from efficient_attn.modules.features import RandomFeatureOptions, RandomFeatures, check_pairs
from efficient_attn.modules.linear import LinearAttention
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


def flops(problem: AttentionProblem, options: RandomFeatureOptions, tokens: int) -> int:
    """Two projections on half as many directions, a summary and a reading of all features."""
    return 6 * tokens * options.num_features * problem.head_dim


@register(
    "performer-hyperbolic",
    summary="Positive random features in pairs of opposite directions: unbiased, never negative.",
    paper="https://arxiv.org/abs/2009.14794",
    options=RandomFeatureOptions,
    size_option="num_features",
    capabilities=Capabilities(causal=True),
    flops=flops,
)
def build(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    check_pairs(options, "hyperbolic features come in pairs of exp(w·x) and exp(−w·x)")
    return LinearAttention(RandomFeatures("hyperbolic", problem.head_dim, options), problem)
