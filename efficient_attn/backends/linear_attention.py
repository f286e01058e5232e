"""Linear attention with any feature map: fixed, random, calibrated or learned."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from efficient_attn.errors import CalibrationError, OptionError, ShapeError, UnsupportedError
from efficient_attn.operation_counts import MatMul, MatMuls, visible_pairs
from efficient_attn.ops.dtypes import upcast, upcast_dtype, without_inference_mode, zero_masked
from efficient_attn.ops.grouped_queries import unfold
from efficient_attn.ops.linear import causal_exponential, scaled_chunks
from efficient_attn.ops.linear.causal import causal_linear_attention, extend_linear_attention
from efficient_attn.ops.linear.features import DRAWS, MAPS, NORMS, draw_directions, softmax_map
from efficient_attn.ops.linear.full import full_linear_attention
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.kernel import (
    LENGTHS,
    SOFTMAX_KERNELS,
    DeviationSample,
    Fit,
    Moments,
    denominators,
    kernel_ratios,
    moments,
)
from efficient_attn.ops.linear.state import LinearState, Means
from efficient_attn.ops.paths import tuned_for_cpu
from efficient_attn.options import one_of, option, whole_number
from efficient_attn.problem import AttentionProblem, positive_count

_ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class RandomFeatureOptions:
    num_features: int = option(256, "Outputs of the feature map.")
    projection: str = option("orthogonal", "How the random directions are drawn: orthogonal, simplex or iid.")
    seed: int = option(0, "Seed of the draw; the same seed gives the same features on every device.")
    norms: str = option(
        "chi", "Norms of the directions: chi (unbiased), or fixed: less variance, a bias.", added=True
    )

    def __post_init__(self) -> None:
        positive_count("num_features", self.num_features)
        one_of("projection", self.projection, DRAWS)
        one_of("norms", self.norms, NORMS)
        whole_number("seed", self.seed)

    @property
    def converges(self) -> bool:
        """Whether the kernel estimate is unbiased."""
        return self.norms == "chi"


class FixedFeatures(nn.Module):
    """Feature map of `ops.linear.features.MAPS` without random directions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> LinearInputs:
        """Inputs without directions."""
        return LinearInputs(q, k, v, key_mask, None, None, None, self.kind, scale)


def check_even(options: RandomFeatureOptions, why: str) -> None:
    """Refuse an odd number of features for a map with two features per direction."""
    size = options.num_features
    if size % 2:
        raise OptionError(f"num_features={size} is odd; {why}: {size - 1} or {size + 1}.")


class Float32Buffers(nn.Module):
    """Module whose buffers move with the model but stay in float32 or better.

    `reset_parameters` recomputes buffers that leave the meta device, which holds no data.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float32Buffers":
        buffers = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, tensor in buffers.items():
            moved = getattr(self, name)
            if moved.dtype in (torch.float16, torch.bfloat16):
                setattr(self, name, tensor.to(moved.device))
        if any(x.is_meta and not getattr(self, name).is_meta for name, x in buffers.items()):
            self.reset_parameters()
        return self

    def reset_parameters(self) -> None:
        """Reset the buffers to their initial values."""
        raise NotImplementedError


class RandomFeatures(Float32Buffers):
    """Random directions of a feature map, drawn once and saved with the model.

    Attributes:
        projection: Directions [directions head_dim], shared by all heads; float32 or better.
    """

    projection: Tensor

    def __init__(self, kind: str, head_dim: int, options: RandomFeatureOptions) -> None:
        super().__init__()
        self.kind = kind
        self._draw, self.norms = options.projection, options.norms
        self._shape = (options.num_features // MAPS[kind].per_direction, head_dim)
        self._seed = options.seed
        # Directions are drawn on the CPU, then moved to the default device.
        self.register_buffer("projection", self._directions().to(torch.get_default_device()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> LinearInputs:
        """Inputs with the random directions."""
        return LinearInputs(q, k, v, key_mask, self.projection, None, None, self.kind, scale)

    @torch.no_grad()
    def redraw(self, seed: int) -> None:
        """Replace the directions by a new draw. Earlier states become invalid."""
        whole_number("seed", seed)
        if self.projection.is_meta:
            raise UnsupportedError("redraw: the random features lie on meta; load the model first.")
        self._seed = seed
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the directions of the seed again."""
        self.projection.copy_(self._directions())

    def _directions(self) -> Tensor:
        # Rounded to float32 for every model, so that a float64 model differs by rounding alone. Contiguous,
        # which a rotation is not, since torch.export writes strided buffers wrongly.
        rows = draw_directions(self._draw, *self._shape, seed=self._seed, norms=self.norms)
        return rows.float().contiguous()


class CalibratedFeatures(Float32Buffers):
    """Dense-exponential features, with one fit per key head, set by a call and saved with the model.

    Attributes:
        random: Random directions, as for positive features.
        curvatures, factors, query_transform, key_transform, shift: Fit, see `ops.linear.kernel.Fit`; without
            heads before calibration.
    """

    curvatures: Tensor
    factors: Tensor
    query_transform: Tensor
    key_transform: Tensor
    shift: Tensor

    def __init__(
        self, fit: Callable[[Moments, Moments], Fit], head_dim: int, options: RandomFeatureOptions
    ) -> None:
        super().__init__()
        self.random = RandomFeatures("positive", head_dim, options)
        self._fit = fit
        for name in Fit._fields:
            square = (head_dim,) if name.endswith("transform") else ()
            self.register_buffer(name, torch.empty(0, head_dim, *square))

    @property
    def calibrated(self) -> bool:
        return self.curvatures.shape[0] > 0

    def use(self, fit: Fit) -> None:
        for name, value in zip(Fit._fields, fit, strict=True):
            # Buffers are contiguous, since torch.export writes strided buffers wrongly.
            setattr(self, name, value.to(getattr(self, name)).contiguous())

    def reset_parameters(self) -> None:
        """Discard the fit."""
        self.use(Fit(*(getattr(self, name)[:0] for name in Fit._fields)))

    def redraw(self, seed: int) -> None:
        self.random.redraw(seed)

    @torch.no_grad()
    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor | None, key_mask: Tensor | None, scale: float
    ) -> None:
        """Fit the parameters to queries and unmasked keys. Earlier states become invalid."""
        inputs = self.random(q, k, k, key_mask, scale)
        x, y = inputs.query_rows(_ALL), inputs.key_rows(_ALL)
        keys = k.shape[0] * k.shape[2] if key_mask is None else int(key_mask.sum())
        self.use(self._fit(moments(x, x.shape[0] * x.shape[2]), moments(y, keys)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> LinearInputs:
        """Inputs with the transforms, directions and weights of each head's fit."""
        fit = self._fit_for(k.shape[1], upcast_dtype(k.dtype))
        inputs, transforms = self.random(q, k, v, key_mask, scale), None
        if fit.shift.shape[0] and (q.shape[-2] == 1 or not tuned_for_cpu(q)):
            # A single token has no chunks, and kernels of other devices read whole tensors.
            moved_q = inputs.query_rows(_ALL) @ fit.query_transform.mT
            moved_k = (inputs.key_rows(_ALL) - fit.shift.unsqueeze(1)) @ fit.key_transform.mT
            q, k, scale = unfold(moved_q, q.shape[1]), moved_k, 1.0
        elif fit.shift.shape[0]:
            offset = fit.shift.unsqueeze(1) @ fit.key_transform.mT
            of_queries = fit.query_transform.mT * inputs.query_factor, torch.zeros_like(offset)
            of_keys = fit.key_transform.mT * abs(inputs.query_factor), -offset
            transforms = torch.stack([torch.cat(x, dim=1) for x in (of_queries, of_keys)])
            scale = 1.0
        a = fit.curvatures
        assert inputs.directions is not None, "positive features have directions"
        w = inputs.directions.to(a)
        # The constants of both sides, a feature's weight, multiply the keys.
        rest = torch.rsub(a, 1, alpha=4)
        weights = torch.addmm(rest.log().sum(dim=-1, keepdim=True), a, w.square().mT, beta=0.5, alpha=2)
        directions = w * fit.factors.unsqueeze(1)
        # The compiler of torch 2.8 traces no `_replace`.
        weights = weights.unsqueeze(1)
        return LinearInputs(q, k, v, key_mask, directions, weights, transforms, inputs.kind, scale)

    def _fit_for(self, kv_heads: int, dtype: torch.dtype) -> Fit:
        """Fit of each key head. A fit of fewer heads serves groups of neighbouring heads."""
        fit = Fit(*(getattr(self, name) for name in Fit._fields))
        heads = fit.curvatures.shape[0]
        if not heads:
            raise CalibrationError(
                "This backend has to see typical queries and keys before it is used: call "
                "backend.calibrate(q, k), or ea.calibrate(model, x) for all backends of a model."
            )
        if kv_heads % heads:
            raise ShapeError(
                f"k has {kv_heads} heads; this backend was calibrated on keys of {heads} heads, which serve "
                f"{heads} or a multiple. Calibrate it on such keys, or build another."
            )
        if kv_heads == heads:
            return Fit(*(x.to(dtype) for x in fit))
        return Fit(*(x.to(dtype).repeat_interleave(kv_heads // heads, dim=0) for x in fit))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Resize the buffers to the number of heads in the state dict."""
        for name in Fit._fields:
            saved, buffer = state_dict.get(prefix + name), getattr(self, name)
            if saved is not None and saved.shape[1:] == buffer.shape[1:]:
                with without_inference_mode():
                    setattr(self, name, buffer.new_empty(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class LearnedFeatures(nn.Module):
    """Softmax features of Wx + b and −(Wx + b).

    Each query head has a W and b for queries, and others for keys; without `num_heads` all heads share one
    pair of maps. Grouped key/value heads are repeated, since every query head has a key map. The
    initial W is the identity, the initial b is 0.

    Attributes:
        query_weight, key_weight: W, [heads head_dim head_dim].
        query_bias, key_bias: b, [heads 1 head_dim].
    """

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__()
        heads, dim = problem.num_heads or 1, problem.head_dim
        identity, zeros = torch.eye(dim).repeat(heads, 1, 1), torch.zeros(heads, 1, dim)
        self.query_weight, self.query_bias = nn.Parameter(identity), nn.Parameter(zeros)
        self.key_weight, self.key_bias = nn.Parameter(identity.clone()), nn.Parameter(zeros.clone())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> LinearInputs:
        """Inputs whose queries and keys are the logarithms of their features."""
        factor = math.sqrt(abs(scale))
        rows = upcast(q) * math.copysign(factor, scale)
        # A masked key may be NaN, and would reach the gradient of W as 0 · NaN.
        keys = upcast(zero_masked(k, key_mask)) * factor
        values = upcast(v)
        if len(self.key_weight) > k.shape[1]:
            group = q.shape[1] // k.shape[1]
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        log_queries = softmax_map(rows, self.query_weight.to(rows), self.query_bias.to(rows))
        log_keys = softmax_map(keys, self.key_weight.to(keys), self.key_bias.to(keys))
        return LinearInputs(log_queries, log_keys, values, key_mask, None, None, None, "exponential", 1.0)


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

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> LinearInputs:
        """Arguments of the functions of `ops.linear`."""
        return self.features(q, k, v, key_mask, self._scale)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | Means | None, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState | Means]:
        out, state = extend_linear_attention(self.inputs(q, k, v, key_mask), state)
        return out.to(q.dtype), state

    def denominators(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        inputs = self.inputs(q, k, k, key_mask)
        if not inputs.map.signed:
            raise UnsupportedError(
                "denominators are of interest for signed features, as in 'performer-trig'; "
                "this backend's features are positive, and so is every sum of them."
            )
        return denominators(inputs, causal=self._causal)

    def kernel_ratios(self, q: Tensor, k: Tensor) -> Tensor:
        return kernel_ratios(self._softmax_inputs(q, k))

    def kernel_rows(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self._softmax_inputs(q, k)
        return inputs.query_rows(_ALL), inputs.key_rows(_ALL)

    def _softmax_inputs(self, q: Tensor, k: Tensor) -> LinearInputs:
        inputs = self.inputs(q, k, k, None)
        if inputs.kind not in SOFTMAX_KERNELS:
            raise UnsupportedError(f"{inputs.kind!r} features are of another kernel than that of softmax.")
        return inputs

    @property
    def redraw(self) -> Callable[[int], None]:
        return self.features.redraw

    @property
    def calibrate(self) -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None], None]:
        if self.features.random.norms == "fixed":
            return self._calibrate_lengths
        return partial(self.features.calibrate, scale=self._scale)

    @torch.no_grad()
    def _calibrate_lengths(self, q: Tensor, k: Tensor, v: Tensor | None, key_mask: Tensor | None) -> None:
        """Fit the features, then the length of the directions in each key head.

        The length has the largest correlation with exact attention on the sample, or without values on
        random ones. The error would choose lengths that shrink the output towards uniform attention.
        """
        self.features.calibrate(q, k, v, key_mask, scale=self._scale)
        if v is None:
            v = torch.randn(k.shape, generator=Generator().manual_seed(0), device="cpu").to(k)
        sample = DeviationSample.of(q, k, v, key_mask, scale=self._scale, causal=self._causal)
        factors = self.features.factors
        correlations = []
        for length in LENGTHS:
            self.features.factors = length * factors
            correlations.append(sample.correlation(self(q, k, v, key_mask)))
        best = factors.new_tensor(LENGTHS)[torch.stack(correlations).argmax(dim=0)]
        self.features.factors = best.unsqueeze(-1) * factors

    @property
    def calibrated(self) -> bool:
        return self.features.calibrated


def feature_count(kind: str, problem: AttentionProblem, options: object) -> int:
    """Number of features, the largest rank of the weights before a causal mask."""
    directions = 0
    if isinstance(options, RandomFeatureOptions):
        directions = options.num_features // MAPS[kind].per_direction
    return MAPS[kind].num_features(directions, problem.head_dim)


def linear_operations(
    kind: str,
    problem: AttentionProblem,
    options: object,
    tokens: int,
    value_dim: int,
) -> MatMuls:
    """Products for features, state and output and, if causal, for the pairs of tokens within a chunk."""
    features = feature_count(kind, problem, options)
    directions = features // MAPS[kind].per_direction if MAPS[kind].per_direction else 0
    projected, entries = tokens * directions * problem.head_dim, tokens * features
    steps = [
        # Directions are random, so only the tokens' side of these products has a gradient.
        MatMul(projected, gradients=1),
        MatMul(projected, gradients=1, shared=True),
        MatMul(entries * value_dim, shared=True),
        # The denominator is a product with ones, which have no gradient.
        MatMul(entries, gradients=1, shared=True),
        MatMul(entries * (value_dim + 1)),
    ]
    if problem.causal:
        algorithm = causal_exponential if MAPS[kind].exponential else scaled_chunks
        chunks, rest = divmod(tokens, algorithm.CHUNK)
        pairs = chunks * visible_pairs(algorithm.CHUNK, back=algorithm.CHUNK, ahead=0)
        pairs += visible_pairs(rest, back=rest, ahead=0)
        steps += [MatMul(pairs * features), MatMul(pairs * value_dim), MatMul(pairs, gradients=1)]
    return tuple(steps)
