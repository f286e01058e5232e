"""Second-order Taylor expansion of the exponential."""

from functools import partial

from efficient_attn.modules.features import FixedFeatures
from efficient_attn.modules.linear import LinearAttention, linear_operations
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, NoOptions, register


@register(
    "linear-taylor-2",
    summary="Second-order Taylor features, 1 + q·k + (q·k)²/2: a kernel other than softmax.",
    paper="https://arxiv.org/abs/2402.18668",
    capabilities=Capabilities(causal=True, approximates_softmax=False, sharded="states"),
    operations=partial(linear_operations, "taylor-2"),
)
def build(problem: AttentionProblem, options: NoOptions) -> LinearAttention:
    return LinearAttention(FixedFeatures("taylor-2"), problem)
