"""Linear attention with any feature map."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from efficient_attn.errors import UnsupportedError
from efficient_attn.modules.features import RandomFeatureOptions
from efficient_attn.operation_counts import MatMul, OperationCounts, visible_pairs
from efficient_attn.ops.linear import causal_exponential, scaled_chunks
from efficient_attn.ops.linear.causal import causal_linear_attention, extend_linear_attention
from efficient_attn.ops.linear.features import MAPS
from efficient_attn.ops.linear.full import full_linear_attention
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.kernel import (
    SOFTMAX_KERNELS,
    denominators,
    kernel_ratios,
    kernel_weights,
    rows_of,
)
from efficient_attn.ops.linear.state import LinearState, Means
from efficient_attn.ops.sharded.layout import Layout
from efficient_attn.ops.sharded.linear import final_state, sharded_linear_attention
from efficient_attn.problem import AttentionProblem

_WITHOUT_EXPONENTIALS = ("relu", "taylor-1", "taylor-2")


class LinearAttention(nn.Module):
    """Attention through features: linear in the number of inputs, full or causal.

    `redraw` and `calibrate` exist if the feature map has them.
    """

    def __init__(self, features: nn.Module, problem: AttentionProblem) -> None:
        super().__init__()
        # A module that maps (q, k, v, key_mask, scale) to LinearInputs.
        self.features: Any = features
        self._scale, self._causal = problem.factor, problem.causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        attention = causal_linear_attention if self._causal else full_linear_attention
        return attention(self.features(q, k, v, key_mask, self._scale)).out.to(q.dtype)

    def forward_sharded(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
    ) -> Tensor:
        inputs = self._inputs(q, k, v, key_mask)
        return sharded_linear_attention(inputs, layout, causal=self._causal).to(q.dtype)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | Means | None, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState | Means]:
        out, state = extend_linear_attention(self._inputs(q, k, v, key_mask), state)
        return out.to(q.dtype), state

    def extend_sharded(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
    ) -> tuple[Tensor, LinearState | Means]:
        inputs = self._inputs(q, k, v, key_mask)
        out = sharded_linear_attention(inputs, layout, causal=True)
        return out.to(q.dtype), final_state(inputs, layout)

    def denominators(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        inputs = self._inputs(q, k, k, key_mask)
        if not inputs.map.signed:
            raise UnsupportedError(
                "denominators are of interest for signed features, as in 'performer-trig'; "
                "this backend's features are positive, and so is every sum of them."
            )
        return denominators(inputs, causal=self._causal)

    def kernel_ratios(self, q: Tensor, k: Tensor) -> Tensor:
        return kernel_ratios(self._softmax_inputs(q, k))

    def kernel_rows(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rows_of(self._softmax_inputs(q, k))

    def kernel_weights(self, q: Tensor, k: Tensor) -> Tensor:
        return kernel_weights(self._softmax_inputs(q, k))

    def _softmax_inputs(self, q: Tensor, k: Tensor) -> LinearInputs:
        inputs = self._inputs(q, k, k, None)
        if inputs.kind not in SOFTMAX_KERNELS:
            raise UnsupportedError(f"{inputs.kind!r} features are of another kernel than that of softmax.")
        return inputs

    @property
    def redraw(self) -> Callable[[int], None]:
        return self.features.redraw

    @property
    def calibrate(self) -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None], None]:
        return partial(self.features.calibrate, scale=self._scale)

    @property
    def calibrated(self) -> bool:
        return self.features.calibrated

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> LinearInputs:
        return self.features(q, k, v, key_mask, self._scale)


def linear_operations(
    kind: str,
    problem: AttentionProblem,
    options: object,
    tokens: int,
    value_dim: int,
) -> OperationCounts:
    """Products for features, state and output; if causal, also for the pairs of tokens within a chunk."""
    directions = 0
    if isinstance(options, RandomFeatureOptions):
        directions = options.num_features // MAPS[kind].per_direction
    features = MAPS[kind].num_features(directions, problem.head_dim)
    projected, made = tokens * directions * problem.head_dim, tokens * features
    exponentials = 0 if kind in _WITHOUT_EXPONENTIALS else made
    steps = [
        # Directions are random, so only the tokens' side of these products has a gradient.
        MatMul(projected, exponentials=exponentials, gradients=1),
        MatMul(projected, exponentials=exponentials, gradients=1, shared=True),
        MatMul(made * value_dim, kept=features * value_dim, shared=True),
        # The denominator is a product with ones, which have no gradient.
        MatMul(made, gradients=1, kept=features, shared=True),
        MatMul(made * (value_dim + 1)),
    ]
    if problem.causal:
        algorithm = causal_exponential if MAPS[kind].exponential else scaled_chunks
        chunks, rest = divmod(tokens, algorithm.CHUNK)
        pairs = chunks * _pairs_up_to_itself(algorithm.CHUNK) + _pairs_up_to_itself(rest)
        steps += [MatMul(pairs * features), MatMul(pairs * value_dim), MatMul(pairs, gradients=1)]
    return OperationCounts(tuple(steps), drawn=directions * problem.head_dim)


def _pairs_up_to_itself(tokens: int) -> int:
    return visible_pairs(tokens, back=tokens, ahead=0)
