"""Performers: random features that estimate the softmax kernel (Choromanski et al. 2021)."""

from functools import partial

from efficient_attn.backends.linear_attention import (
    CalibratedFeatures,
    LinearAttention,
    RandomFeatureOptions,
    RandomFeatures,
    check_even,
    feature_count,
    linear_operations,
)
from efficient_attn.operation_counts import MatMul, MatMuls
from efficient_attn.ops.linear.kernel import fit_full, fit_oprf
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register

_PAPER = "https://arxiv.org/abs/2009.14794"
_performer = partial(
    register,
    options=RandomFeatureOptions,
    size_option="num_features",
    rank=partial(feature_count, "positive"),
)


@_performer(
    "performer-positive",
    summary="Positive random features: an unbiased kernel estimate, never negative.",
    formula="exp(s q·k) ≈ φ(√s q)·φ(√s k), φ(x) = exp(w·x − |x|²/2)/√m, rows w of random orthogonal blocks",
    paper=_PAPER,
    capabilities=Capabilities(causal=True, sharded="states"),
    operations=partial(linear_operations, "positive"),
)
def build_positive(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    return LinearAttention(RandomFeatures("positive", problem.head_dim, options), problem)


@_performer(
    "performer-hyperbolic",
    summary="Positive random features in pairs of opposite directions: unbiased, never negative.",
    formula="exp(s q·k) ≈ φ(√s q)·φ(√s k), φ(x) = [exp(w·x), exp(−w·x)] exp(−|x|²/2)/√2m",
    paper=_PAPER,
    capabilities=Capabilities(causal=True, sharded="states"),
    operations=partial(linear_operations, "hyperbolic"),
    compared=False,
)
def build_hyperbolic(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    check_even(options, "hyperbolic features come in pairs of exp(w·x) and exp(−w·x)")
    return LinearAttention(RandomFeatures("hyperbolic", problem.head_dim, options), problem)


@_performer(
    "performer-trig",
    summary="Trigonometric random features (random Fourier features): unbiased, possibly negative.",
    formula="exp(s q·k) ≈ φ(√s q)·φ(√s k), φ(x) = [cos(w·x), sin(w·x)] exp(|x|²/2)/√m",
    paper=_PAPER,
    capabilities=Capabilities(causal=True, nonnegative=False, sharded="states"),
    operations=partial(linear_operations, "trigonometric"),
)
def build_trigonometric(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    check_even(options, "trigonometric features come in pairs of a cosine and a sine")
    return LinearAttention(RandomFeatures("trigonometric", problem.head_dim, options), problem)


@_performer(
    "performer-oprf",
    summary="Positive random features with the optimal quadratic exponent for sample activations (FAVOR++).",
    formula="exp(s q·k) ≈ φ(√s q)·φ(√s k), φ(x) = (1 − 4a)^{d/4} exp(a|w|² + √(1 − 4a) w·x − |x|²/2)/√m",
    paper="https://arxiv.org/abs/2205.15317",
    capabilities=Capabilities(causal=True, needs_calibration=True, sharded="states"),
    operations=partial(linear_operations, "positive"),
    compared=False,
)
def build_oprf(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    return LinearAttention(CalibratedFeatures(fit_oprf, problem.head_dim, options), problem)


def full_operations(
    problem: AttentionProblem, options: RandomFeatureOptions, tokens: int, value_dim: int
) -> MatMuls:
    """Products of positive features, after the transforms of queries and keys."""
    positive = linear_operations("positive", problem, options, tokens, value_dim)
    # The transforms are calibrated, so only the tokens' side of these products has a gradient.
    transform = MatMul(tokens * problem.head_dim**2, gradients=1)
    return transform, transform._replace(shared=True), *positive


@_performer(
    "performer-full",
    summary="Positive random features fitted to means and covariances of sample activations (FAVOR#).",
    formula="exp(s q·k) ≈ φ(q')·φ(k'), "
    "φ(x) = Π_l (1 − 4a_l)^¼ exp(Σ_l a_l w_l² + Σ_l √(1 − 4a_l) w_l x_l − |x|²/2)/√m",
    paper="https://arxiv.org/abs/2302.00787",
    capabilities=Capabilities(causal=True, needs_calibration=True, sharded="states"),
    operations=full_operations,
)
def build_full(problem: AttentionProblem, options: RandomFeatureOptions) -> LinearAttention:
    return LinearAttention(CalibratedFeatures(fit_full, problem.head_dim, options), problem)
