"""Performer with trigonometric random features: random Fourier features for the softmax kernel."""

from efficient_attn.modules.features import RandomFeatureOptions, RandomFeatures, check_pairs
from efficient_attn.modules.linear import LinearAttention
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


def flops(problem: AttentionProblem, options: RandomFeatureOptions, tokens: int) -> int:
    """Two projections on half as many directions, a summary and a reading of all features."""
    return 6 * tokens * options.num_features * problem.head_dim


@register(
    "performer-trig",
    summary="Cosines and sines of random projections: unbiased, of either sign.",
    paper="https://arxiv.org/abs/2009.14794",
    options=RandomFeatureOptions,
    size_option="num_features",
    capabilities=Capabilities(causal=True, nonnegative=False),
    flops=flops,
)
def build(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    check_pairs(options, "trigonometric features come in pairs of a cosine and a sine")
    return LinearAttention(RandomFeatures("trigonometric", problem.head_dim, options), problem)
