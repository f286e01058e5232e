"""Performer with trigonometric random features: random Fourier features for the softmax kernel."""

from functools import partial

from efficient_attn.modules.features import RandomFeatureOptions, RandomFeatures, check_pairs
from efficient_attn.modules.linear import LinearAttention, linear_work
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


@register(
    "performer-trig",
    summary="Cosines and sines of random projections: unbiased, of either sign.",
    paper="https://arxiv.org/abs/2009.14794",
    options=RandomFeatureOptions,
    size_option="num_features",
    capabilities=Capabilities(causal=True, nonnegative=False),
    work=partial(linear_work, "trigonometric"),
)
def build(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    check_pairs(options, "trigonometric features come in pairs of a cosine and a sine")
    return LinearAttention(RandomFeatures("trigonometric", problem.head_dim, options), problem)
