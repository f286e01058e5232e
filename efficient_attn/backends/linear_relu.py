"""Performer-ReLU: rectified random projections."""

from functools import partial

from efficient_attn.modules.features import RandomFeatureOptions, RandomFeatures
from efficient_attn.modules.linear import LinearAttention, linear_operations
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


@register(
    "linear-relu",
    summary="Performer-ReLU, with rectified random projections: a kernel other than softmax.",
    paper="https://arxiv.org/abs/2009.14794",
    options=RandomFeatureOptions,
    size_option="num_features",
    capabilities=Capabilities(causal=True, approximates_softmax=False, sharded="states"),
    operations=partial(linear_operations, "relu"),
)
def build(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    return LinearAttention(RandomFeatures("relu", problem.head_dim, options), problem)
