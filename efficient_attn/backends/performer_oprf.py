"""Performer with optimal positive random features (FAVOR++)."""

import math
from dataclasses import dataclass
from functools import partial

import torch

from efficient_attn.errors import DtypeError, OptionError
from efficient_attn.modules.calibrated import CalibratedFeatures
from efficient_attn.modules.features import RandomFeatureOptions
from efficient_attn.modules.linear import LinearAttention, linear_operations
from efficient_attn.modules.options import option
from efficient_attn.ops.linear.kernel import fit_oprf, one_curvature
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, register


@dataclass(frozen=True, kw_only=True)
class OptimalFeatureOptions(RandomFeatureOptions):
    """Options of positive features with a quadratic exponent."""

    a: float | None = option(
        None, "A < 1/8 in exp(A|w|² + …); 0: performer-positive; None: set by calibrate."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.a is None:
            return
        if isinstance(self.a, bool) or not isinstance(self.a, (int, float)):
            raise DtypeError(f"a is a number or None, not {self.a!r}.")
        if not -math.inf < self.a < 1 / 8:
            raise OptionError(
                f"a is finite and below 1/8, not {self.a}: the variance is infinite from 1/8 on."
            )


@register(
    "performer-oprf",
    summary="Positive random features with the optimal quadratic exponent for sample activations (FAVOR++).",
    paper="https://arxiv.org/abs/2205.15317",
    options=OptimalFeatureOptions,
    size_option="num_features",
    capabilities=Capabilities(causal=True, needs_calibration=True, sharded="states"),
    operations=partial(linear_operations, "positive"),
)
def build(problem: AttentionProblem, options: OptimalFeatureOptions) -> LinearAttention:
    features = CalibratedFeatures(fit_oprf, problem.head_dim, options)
    if options.a is not None:
        features.use(one_curvature(torch.full((1, problem.head_dim), float(options.a))))
    return LinearAttention(features, problem)
