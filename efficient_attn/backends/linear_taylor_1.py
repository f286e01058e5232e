"""First-order Taylor expansion of the exponential."""

from functools import partial

from efficient_attn.modules.features import FixedFeatures
from efficient_attn.modules.linear import LinearAttention, linear_operations
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, NoOptions, register


@register(
    "linear-taylor-1",
    summary="First-order Taylor features, 1 + q·k: a kernel other than softmax, possibly negative.",
    paper="https://arxiv.org/abs/2402.18668",
    capabilities=Capabilities(causal=True, nonnegative=False, approximates_softmax=False, sharded="states"),
    operations=partial(linear_operations, "taylor-1"),
)
def build(problem: AttentionProblem, options: NoOptions) -> LinearAttention:
    return LinearAttention(FixedFeatures("taylor-1"), problem)
