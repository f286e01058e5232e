"""Linear transformers: features of kernels other than softmax."""

from dataclasses import replace
from functools import partial

from efficient_attn.backends.linear_attention import (
    FixedFeatures,
    LearnedFeatures,
    LinearAttention,
    RandomFeatureOptions,
    RandomFeatures,
    feature_count,
    linear_operations,
)
from efficient_attn.operation_counts import MatMul, MatMuls
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, NoOptions, register

_AVERAGES = Capabilities(causal=True, approximates_softmax=False, sharded="states")


@register(
    "linear-elu",
    summary="Linear transformer, with features elu(x) + 1: a kernel other than softmax.",
    formula="out_i = Σ_j φ(√s q_i)·φ(√s k_j) v_j / Σ_j φ(√s q_i)·φ(√s k_j), φ(x) = elu(x) + 1",
    paper="https://arxiv.org/abs/2006.16236",
    capabilities=_AVERAGES,
    operations=partial(linear_operations, "elu"),
    rank=partial(feature_count, "elu"),
)
def build_elu(problem: AttentionProblem, options: NoOptions) -> LinearAttention:
    return LinearAttention(FixedFeatures("elu"), problem)


@register(
    "linear-relu",
    summary="Performer-ReLU, with rectified random projections: a kernel other than softmax.",
    formula="out_i = Σ_j φ(√s q_i)·φ(√s k_j) v_j / Σ_j φ(√s q_i)·φ(√s k_j), φ(x) = max(w·x, 0)/√m + 0.001",
    paper="https://arxiv.org/abs/2009.14794",
    options=RandomFeatureOptions,
    size_option="num_features",
    capabilities=_AVERAGES,
    operations=partial(linear_operations, "relu"),
    rank=partial(feature_count, "relu"),
)
def build_relu(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    return LinearAttention(RandomFeatures("relu", problem.head_dim, options), problem)


@register(
    "linear-taylor-1",
    summary="First-order Taylor features, 1 + q·k: a kernel other than softmax, possibly negative.",
    formula="out_i = Σ_j w_ij v_j / Σ_j w_ij, w_ij = 1 + s q_i·k_j",
    paper="https://arxiv.org/abs/2402.18668",
    capabilities=replace(_AVERAGES, nonnegative=False),
    operations=partial(linear_operations, "taylor-1"),
    rank=partial(feature_count, "taylor-1"),
    compared=False,
)
def build_taylor_1(problem: AttentionProblem, options: NoOptions) -> LinearAttention:
    return LinearAttention(FixedFeatures("taylor-1"), problem)


@register(
    "linear-taylor-2",
    summary="Second-order Taylor features, 1 + q·k + (q·k)²/2: a kernel other than softmax.",
    formula="out_i = Σ_j w_ij v_j / Σ_j w_ij, w_ij = 1 + s q_i·k_j + (s q_i·k_j)²/2",
    paper="https://arxiv.org/abs/2402.18668",
    capabilities=_AVERAGES,
    operations=partial(linear_operations, "taylor-2"),
    rank=partial(feature_count, "taylor-2"),
)
def build_taylor_2(problem: AttentionProblem, options: NoOptions) -> LinearAttention:
    return LinearAttention(FixedFeatures("taylor-2"), problem)


def hedgehog_features(problem: AttentionProblem, options: NoOptions) -> int:
    """Number of features."""
    return 2 * problem.head_dim


def hedgehog_operations(
    problem: AttentionProblem, options: NoOptions, tokens: int, value_dim: int
) -> MatMuls:
    """Products of W with queries and keys, then linear attention with 2·head_dim features."""
    dim, heads = problem.head_dim, problem.num_heads
    doubled = replace(problem, head_dim=2 * dim)
    linear = linear_operations("exponential", doubled, options, tokens, value_dim)
    mapped = MatMul(tokens * dim * dim)
    matmuls = (mapped, mapped._replace(shared=True), *linear)
    if heads is not None:
        # Every query head has a key map of its own, so a group of heads shares no product.
        matmuls = tuple(matmul._replace(shared=False) for matmul in matmuls)
    return matmuls


@register(
    "linear-hedgehog",
    summary="Hedgehog, with feature maps learned per head: a kernel other than softmax until trained.",
    formula="out_i = Σ_j φ(√s q_i)·φ(√s k_j) v_j / Σ_j φ(√s q_i)·φ(√s k_j), "
    "φ(x) = [softmax(Wx + b), softmax(−Wx − b)]",
    paper="https://arxiv.org/abs/2402.04347",
    capabilities=_AVERAGES,
    operations=hedgehog_operations,
    rank=hedgehog_features,
)
def build_hedgehog(problem: AttentionProblem, options: NoOptions) -> LinearAttention:
    return LinearAttention(LearnedFeatures(problem), problem)
