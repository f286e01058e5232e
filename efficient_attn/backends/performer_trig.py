"""Performer with trigonometric random features: random Fourier features for the softmax kernel."""

from functools import partial

from efficient_attn.modules.features import RandomFeatureOptions, RandomFeatures, check_even
from efficient_attn.modules.linear import LinearAttention, linear_operations
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


@register(
    "performer-trig",
    summary="Trigonometric random features (random Fourier features): unbiased, possibly negative.",
    paper="https://arxiv.org/abs/2009.14794",
    options=RandomFeatureOptions,
    size_option="num_features",
    capabilities=Capabilities(causal=True, nonnegative=False, sharded="states"),
    operations=partial(linear_operations, "trigonometric"),
)
def build(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    check_even(options, "trigonometric features come in pairs of a cosine and a sine")
    return LinearAttention(RandomFeatures("trigonometric", problem.head_dim, options), problem)
