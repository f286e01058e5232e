"""The exponential's first three Taylor terms in place of it."""

from functools import partial

from efficient_attn.modules.features import FixedFeatures
from efficient_attn.modules.linear import LinearAttention, linear_operations
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, NoOptions, register


@register(
    "linear-taylor-2",
    summary="Another kernel than softmax: 1 + q·k + (q·k)²/2, its first three Taylor terms.",
    paper="https://arxiv.org/abs/2402.18668",
    capabilities=Capabilities(causal=True, approximates_softmax=False),
    operations=partial(linear_operations, "taylor-2"),
)
def build(problem: AttentionProblem, options: NoOptions) -> LinearAttention:
    return LinearAttention(FixedFeatures("taylor-2"), problem)
