"""Performer with centred, transformed positive features and one quadratic exponent per axis (FAVOR#)."""

from efficient_attn.modules.calibrated import CalibratedFeatures
from efficient_attn.modules.features import RandomFeatureOptions
from efficient_attn.modules.linear import LinearAttention, linear_operations
from efficient_attn.operation_counts import MatMul, OperationCounts
from efficient_attn.ops.linear.kernel import fit_full
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


def operations(
    problem: AttentionProblem, options: RandomFeatureOptions, tokens: int, value_dim: int
) -> OperationCounts:
    """Products of positive features, after the transforms of queries and keys."""
    made = linear_operations("positive", problem, options, tokens, value_dim)
    # The transforms are calibrated, so only the tokens' side of these products has a gradient.
    transform = MatMul(tokens * problem.head_dim**2, gradients=1)
    return made._replace(matmuls=(transform, transform._replace(shared=True), *made.matmuls))


@register(
    "performer-full",
    summary="Positive random features fitted to means and covariances of sample activations (FAVOR#).",
    paper="https://arxiv.org/abs/2302.00787",
    options=RandomFeatureOptions,
    size_option="num_features",
    capabilities=Capabilities(causal=True, needs_calibration=True, sharded="states"),
    operations=operations,
)
def build(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    return LinearAttention(CalibratedFeatures(fit_full, problem.head_dim, options), problem)
