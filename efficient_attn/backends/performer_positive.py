"""Performer with positive random features (FAVOR+)."""

from efficient_attn.modules.features import RandomFeatureOptions, RandomFeatures
from efficient_attn.modules.linear import LinearAttention
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


def flops(problem: AttentionProblem, options: RandomFeatureOptions, tokens: int) -> int:
    """Two projections, a summary and a reading, each of tokens · features · head_dim."""
    return 8 * tokens * options.num_features * problem.head_dim


@register(
    "performer-positive",
    summary="Positive random features: an unbiased kernel estimate, never negative.",
    paper="https://arxiv.org/abs/2009.14794",
    options=RandomFeatureOptions,
    size_option="num_features",
    capabilities=Capabilities(causal=True),
    flops=flops,
)
def build(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    return LinearAttention(RandomFeatures("positive", problem.head_dim, options), problem)
