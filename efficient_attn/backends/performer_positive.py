"""Performer with positive random features (FAVOR+)."""

from functools import partial

from efficient_attn.modules.features import RandomFeatureOptions, RandomFeatures
from efficient_attn.modules.linear import LinearAttention, linear_operations
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


@register(
    "performer-positive",
    summary="Positive random features: an unbiased kernel estimate, never negative.",
    paper="https://arxiv.org/abs/2009.14794",
    options=RandomFeatureOptions,
    size_option="num_features",
    capabilities=Capabilities(causal=True, sharded="states"),
    operations=partial(linear_operations, "positive"),
)
def build(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    return LinearAttention(RandomFeatures("positive", problem.head_dim, options), problem)
