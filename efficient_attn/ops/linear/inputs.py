"""Inputs of linear attention, from which features are computed chunk by chunk, and the sizes of chunks."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, upcast_dtype, zero_masked
from efficient_attn.ops.grouped_queries import fold, unfold
from efficient_attn.ops.linear.features import MAPS, FeatureMap, Features
from efficient_attn.ops.linear.state import LOWEST
from efficient_attn.ops.paths import parts, step_capacity, tuned_for_cpu

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
# Fewer tokens per chunk cost more in calls than they save in cache misses. More only cost memory.
SHORTEST_CHUNK, LONGEST_CHUNK = 112, 512
# Logarithms of sums of plain features, in absolute value: within these bounds no term of weight was lost.
RANGE = {torch.float32: 60.0, torch.float64: 600.0}
# Features per chunk over all heads, which fill a cache of 1 MiB. Their gradients take as much again.
_FEATURES = 2**18


# The fields of `LinearInputs`, as arguments of operators.
FIELDS = (
    "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? directions, Tensor? log_weights, "
    "Tensor? transforms, str kind, float scale"
)


class LinearInputs(NamedTuple):
    """Queries, keys and values, and their feature map.

    No tensor of tokens · features numbers ever exists: features are computed for one chunk, in float32 or
    better, and recomputed by the backward pass.

    Attributes:
        q: [batch heads q_tokens head_dim].
        k: [batch kv_heads k_tokens head_dim].
        v: [batch kv_heads k_tokens value_dim].
        key_mask: bool [batch k_tokens], True for a real token; None: all real.
        directions: Rows of the random projection, [directions head_dim], or of one projection per key head,
            [kv_heads directions head_dim]; None for a map without directions.
        log_weights: Logarithmic weight of each feature, [kv_heads 1 features]; None: all weights are 1.
        transforms: Affine maps of queries and of keys before the feature map, constants without gradients,
            [2 kv_heads head_dim+1 head_dim], the offset last; None: identity.
        kind: Name of the feature map in `features.MAPS`.
        scale: Factor on q·k; queries and keys each take its square root.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    directions: Tensor | None
    log_weights: Tensor | None
    transforms: Tensor | None
    kind: str
    scale: float

    @property
    def map(self) -> FeatureMap:
        return MAPS[self.kind]

    def plain(self) -> "LinearInputs | None":
        """The inputs with features as values of scale 1, whose sums `in_range` judges, or None."""
        kind = self.map.plain
        return self._replace(kind=kind) if kind and tuned_for_cpu(self.q) else None

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def query_factor(self) -> float:
        """Factor on queries. Keys take its absolute value, so that only queries carry the sign of `scale`."""
        return math.copysign(math.sqrt(abs(self.scale)), self.scale)

    @property
    def num_features(self) -> int:
        rows = 0 if self.directions is None else self.directions.shape[-2]
        return self.map.num_features(rows, self.k.shape[-1])

    def query_rows(self, part: slice) -> Tensor:
        """Scaled queries of a chunk, [batch kv_heads group·part head_dim]."""
        return self.folded_queries(part) * self.query_factor

    def folded_queries(self, part: slice) -> Tensor:
        """Transformed queries of a chunk, [batch kv_heads group·part head_dim]."""
        return self.transformed(fold(upcast(rows_of(self.q, part)), self.k.shape[1]), 0)

    def real_keys(self, part: slice) -> Tensor:
        """Transformed keys of a chunk, zero before the transform where masked."""
        return self.transformed(self.real_rows(self.k, part), 1)

    def transformed(self, rows: Tensor, side: int) -> Tensor:
        """Rows [batch kv_heads rows head_dim] after the map of queries (0) or of keys (1)."""
        if self.transforms is None:
            return rows
        matrix = self.transforms[side].to(rows.dtype)
        return (rows @ matrix[:, :-1]).add_(matrix[:, -1:])

    def pulled_back(self, grad: Tensor, side: int) -> Tensor:
        """Gradient of rows, [batch kv_heads …] or [flat_heads …], from the gradient after their map."""
        if self.transforms is None:
            return grad
        matrix = self.transforms[side, :, :-1].mT.to(grad.dtype)
        return grad @ (matrix if grad.ndim == 4 else self.expand_to_heads(matrix))

    def exponents(self) -> Tensor:
        """Direction of each feature of an exponential map, [features head_dim], for all or each key head."""
        assert self.map.exponential and self.directions is not None
        w = self.directions.to(upcast_dtype(self.q.dtype))
        return w if self.map.per_direction == 1 else torch.cat([w, -w], dim=-2)

    def real_rows(self, x: Tensor, part: slice) -> Tensor:
        """Keys or values of a chunk, zero where masked, [batch kv_heads part dim]."""
        rows = upcast(rows_of(x, part))
        return rows if self.key_mask is None else zero_masked(rows, self.mask(part))

    def flat_keys_and_values(self, part: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of a chunk, zero where masked, [batch·kv_heads part dim]."""
        return self.real_keys(part).flatten(0, 1), self.real_rows(self.v, part).flatten(0, 1)

    def flat_queries(self, part: slice) -> Tensor:
        """Transformed queries of a chunk, [batch·kv_heads group·part head_dim]."""
        return self.folded_queries(part).flatten(0, 1)

    def key_rows(self, part: slice) -> Tensor:
        """Scaled keys of a chunk, zero where masked, [batch kv_heads part head_dim]."""
        return self.real_keys(part) * math.sqrt(abs(self.scale))

    def flatten_heads(self, x: Tensor, part: slice) -> Tensor:
        """Query-side rows of a chunk, [batch heads tokens dim] as [batch·kv_heads group·part dim]."""
        return fold(upcast(rows_of(x, part)), self.k.shape[1]).flatten(0, 1)

    def unflatten_heads(self, x: Tensor) -> Tensor:
        """Inverse of `flatten_heads`, [batch·kv_heads group·part dim] as [batch heads part dim]."""
        return unfold(x.unflatten(0, self.k.shape[:2]), self.q.shape[1])

    def grouped(self, x: Tensor) -> Tensor:
        """View of query-side rows as [batch kv_heads group tokens dim]."""
        return x.unflatten(1, (self.k.shape[1], self.group))

    def expand_to_heads(self, x: Tensor) -> Tensor:
        """Rows of all heads, [rows dim], or of each key head, as [batch·kv_heads rows dim]."""
        batch, kv_heads = self.k.shape[:2]
        if x.ndim == 2:
            return x.expand(batch * kv_heads, -1, -1)
        return x.expand(batch, kv_heads, -1, -1).flatten(0, 1)

    def real(self, part: slice) -> Tensor | None:
        """True for a real key, bool [batch·kv_heads part 1], or None if all are real."""
        if self.key_mask is None:
            return None
        return self.key_mask[:, None, part, None].expand(-1, self.k.shape[1], -1, -1).flatten(0, 1)

    def query_features(self, rows: Tensor) -> Features:
        """Features of query rows, without the scale common to a row, which cancels."""
        if self.map.exponential:
            return Features(rows @ self.exponents().mT, None)
        features = self.map.features(rows, self.directions_for(rows))
        if self.map.signed:
            return features._replace(log_scale=torch.zeros_like(features.log_scale))
        return features

    def key_features(self, rows: Tensor, part: slice) -> Features:
        """Features of key rows, with scale −inf, or without scales the value 0, for masked tokens."""
        features, mask = self.map.features(rows, self.directions_for(rows)), self.mask(part)
        if self.log_weights is not None:
            features = features._replace(log_scale=features.log_scale + self.log_weights.to(rows.dtype))
        if mask is None:
            return features
        hidden = ~mask[:, None, :, None]
        if self.map.unscaled and features.values is not None:
            return features._replace(values=features.values.masked_fill(hidden, 0.0))
        return features._replace(log_scale=features.log_scale.masked_fill(hidden, -torch.inf))

    def query_gradient(self, rows: Tensor, features: Features, grad: Features) -> Tensor:
        """Gradient with respect to the rows of queries, from the gradient of their features."""
        if self.map.exponential:
            grad_out = grad.log_scale @ self.exponents()
        else:
            if self.map.has_values:
                grad = grad._replace(log_scale=torch.zeros_like(grad.log_scale))
            grad_out = self.map.pullback(rows, features, grad, self.directions_for(rows))
        return self.pulled_back(grad_out, 0) * self.query_factor

    def key_gradient(self, rows: Tensor, features: Features, grad: Features) -> Tensor:
        """Gradient with respect to the keys of a chunk, from the gradient of their features."""
        grad_out = self.map.pullback(rows, features, grad, self.directions_for(rows))
        return self.pulled_back(grad_out, 1) * math.sqrt(abs(self.scale))

    def directions_for(self, rows: Tensor) -> Tensor | None:
        return None if self.directions is None else self.directions.to(rows.dtype)

    def mask(self, part: slice) -> Tensor | None:
        return None if self.key_mask is None else self.key_mask[:, part]


def rows_of(x: Tensor, part: slice) -> Tensor:
    """Tokens of a chunk. A slice of all tokens would be a call for nothing."""
    return x if part in (slice(None), slice(0, x.shape[-2])) else x[..., part, :]


def chunks(inputs: LinearInputs, length: int, features: int = _FEATURES) -> list[slice]:
    """Parts with this number of features on the CPU, and with the capacity of a step on other devices."""
    if not tuned_for_cpu(inputs.q):
        return parts(length, held_tokens(inputs))
    return parts(length, min(max(held_tokens(inputs, features), SHORTEST_CHUNK), LONGEST_CHUNK))


def held_tokens(inputs: LinearInputs, numbers: int | None = None) -> int:
    """Tokens with `numbers` features over all heads, at least 1. Default: the capacity of one step."""
    features = max(inputs.q.shape[0] * inputs.q.shape[1] * inputs.num_features, 1)
    return step_capacity(features) if numbers is None else max(numbers // features, 1)


def in_range(logarithm: Tensor, blind: Tensor | None) -> bool:
    """Whether all row sums of plain features, but of `blind` rows, are far from the limits of floats."""
    # A comparison with NaN is false.
    near = logarithm.abs() < RANGE[logarithm.dtype]
    return bool((near if blind is None else near | blind).all())


class Outputs(NamedTuple):
    """Results of a forward pass: the output and, for the backward pass, the normaliser of each row.

    Attributes:
        out: [batch heads q_tokens value_dim], in the dtype of q.
        log_normaliser: Logarithm of |Σ_j φ(q)·φ(k_j)|, [batch heads q_tokens 1]; +inf: no key.
        negative: Whether that sum is negative, bool [batch heads q_tokens 1].
    """

    out: Tensor
    log_normaliser: Tensor
    negative: Tensor

    def put(self, part: slice, rows: "Outputs") -> None:
        """Write the rows of a chunk, grouped by key head."""
        for whole, part_rows in zip(self, rows, strict=True):
            whole[..., part, :] = unfold(part_rows, whole.shape[1])

    def normaliser(self, part: slice, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Log normalisers and signs (1 or −1) of the rows, grouped by key head."""
        logarithm, negative = (fold(x[..., part, :], kv_heads) for x in self[1:])
        return logarithm, torch.where(negative, -1.0, 1.0).to(logarithm)


def new_outputs(q: Tensor, v: Tensor) -> Outputs:
    shape = q.shape[:-1]
    logarithm = upcast(q.new_empty(0)).new_empty(*shape, 1)
    return Outputs(q.new_empty(*shape, v.shape[-1]), logarithm, torch.empty_like(logarithm, dtype=torch.bool))


@dataclass
class Scratch:
    """Named scratch buffers. A call with a name returns the same memory while it is large enough."""

    buffers: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised tensor of this shape, with the dtype and device of `like`."""
        buffer, size = self.buffers.get(name), math.prod(shape)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[name] = like.new_empty(size)
        return buffer[:size].view(shape)


def power(exponents: Tensor) -> Tensor:
    """2^exponents in place, with results below `LOWEST` flushed to zero."""
    lowest = LOWEST[exponents.dtype] * LOG2_E
    return F.threshold(exponents, lowest, -torch.inf, inplace=True).exp2_()


class ExpKernel:
    """Exponential features as powers of two, and the pullback of gradients through their exponents.

    PyTorch computes powers of two three times as fast as powers of e: with w' = w / ln 2,
    φ_f(x) = 2^(x·w'_f + b'). Batch and key heads form one dimension, `flat_heads`; exponents are written into
    scratch buffers.

    Args:
        shared_buffer: Whether one buffer serves the exponents of queries and of keys, never needed together.
    """

    def __init__(self, inputs: LinearInputs, *, shared_buffer: bool = False) -> None:
        self.inputs, self.scratch = inputs, Scratch()
        self._names = ("either", "either") if shared_buffer else ("queries", "keys")
        w = inputs.exponents() * (math.sqrt(abs(inputs.scale)) * LOG2_E)
        self._keys, self.features = inputs.expand_to_heads(w).mT, w.shape[-2]
        self._queries = self._keys if inputs.scale > 0 else -self._keys
        self._constant = -math.log2(self.features) / 2
        self._weights = None
        if inputs.log_weights is not None:
            self._weights = inputs.expand_to_heads(inputs.log_weights.to(w.dtype) * LOG2_E)

    def query_exponents(self, rows: Tensor, offset: Tensor | None = None) -> Tensor:
        """Exponents of query rows, plus an offset [flat_heads rows 1], [flat_heads rows features]."""
        out = self.scratch(self._names[0], rows, (*rows.shape[:-1], self.features))
        if offset is None:
            return torch.bmm(rows, self._queries, out=out)
        return torch.baddbmm(offset, rows, self._queries, out=out)

    def real_key_exponents(self, keys: Tensor, positions: slice) -> Tensor:
        """Exponents of keys, −inf for masked keys, [flat_heads positions features]."""
        below = torch.linalg.vector_norm(keys, dim=-1, keepdim=True).square_()
        below.mul_(-abs(self.inputs.scale) / 2 * LOG2_E).add_(self._constant)
        out = self.scratch(self._names[1], keys, (*keys.shape[:-1], self.features))
        exponents = torch.baddbmm(below, keys, self._keys, out=out)
        if self._weights is not None:
            exponents.add_(self._weights)
        real = self.inputs.real(positions)
        return exponents if real is None else exponents.masked_fill_(~real, -torch.inf)

    def query_gradient(self, grad_exponents: Tensor) -> Tensor:
        """Gradient with respect to query rows, from the gradient of the natural exponents."""
        return self.inputs.pulled_back(torch.bmm(grad_exponents, self._queries.mT).mul_(LN_2), 0)

    def key_gradient(self, keys: Tensor, grad_exponents: Tensor) -> Tensor:
        """Gradient with respect to keys, from the gradient of the natural exponents."""
        longer = grad_exponents.sum(dim=-1, keepdim=True).mul_(-abs(self.inputs.scale))
        grad = torch.bmm(grad_exponents, self._keys.mT).mul_(LN_2).addcmul_(keys, longer)
        return self.inputs.pulled_back(grad, 1)

    def buffer(self, name: str, rows: Tensor) -> Tensor:
        """Scratch buffer of one number per row and feature."""
        return self.scratch(name, rows, (*rows.shape[:-1], self.features))
