"""Performer with hyperbolic random features: positive features at w and −w."""

from functools import partial

from efficient_attn.modules.features import RandomFeatureOptions, RandomFeatures, check_even
from efficient_attn.modules.linear import LinearAttention, linear_operations
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


@register(
    "performer-hyperbolic",
    summary="Positive random features in pairs of opposite directions: unbiased, never negative.",
    paper="https://arxiv.org/abs/2009.14794",
    options=RandomFeatureOptions,
    size_option="num_features",
    capabilities=Capabilities(causal=True, sharded="states"),
    operations=partial(linear_operations, "hyperbolic"),
)
def build(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    check_even(options, "hyperbolic features come in pairs of exp(w·x) and exp(−w·x)")
    return LinearAttention(RandomFeatures("hyperbolic", problem.head_dim, options), problem)
