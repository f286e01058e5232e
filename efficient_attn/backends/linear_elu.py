"""Linear transformer: features elu(x) + 1."""

from functools import partial

from efficient_attn.modules.features import FixedFeatures
from efficient_attn.modules.linear import LinearAttention, linear_operations
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, NoOptions, register


@register(
    "linear-elu",
    summary="Linear transformer, with features elu(x) + 1: a kernel other than softmax.",
    paper="https://arxiv.org/abs/2006.16236",
    capabilities=Capabilities(causal=True, approximates_softmax=False, sharded="states"),
    operations=partial(linear_operations, "elu"),
)
def build(problem: AttentionProblem, options: NoOptions) -> LinearAttention:
    return LinearAttention(FixedFeatures("elu"), problem)
