"""Inputs of linear attention, from which features are computed chunk by chunk, and the sizes of chunks."""

import functools
import math
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, upcast_dtype, zero_masked
from efficient_attn.ops.grouped_queries import fold, unfold
from efficient_attn.ops.linear.features import MAPS, FeatureMap, Features
from efficient_attn.ops.paths import held, tuned_for_cpu

# Fewer tokens per chunk cost more calls than cache misses, and more save no call worth their memory.
_LEAST, _MOST = 112, 512
# Features per chunk over all heads, however large the cache: they and their gradients are memory of a call.
_FEATURES = 2**18
# Second-level cache of one core where the system does not state it.
_CACHE_BYTES = 2**20


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
        kind: Name of the feature map in `features.MAPS`.
        scale: Factor on q·k; queries and keys each take its square root.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    directions: Tensor | None
    log_weights: Tensor | None
    kind: str
    scale: float

    @property
    def map(self) -> FeatureMap:
        return MAPS[self.kind]

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def query_factor(self) -> float:
        """Factor on queries; keys take its absolute value, so that only queries carry the sign of `scale`."""
        return math.copysign(math.sqrt(abs(self.scale)), self.scale)

    @property
    def num_features(self) -> int:
        """Number of features."""
        rows = 0 if self.directions is None else self.directions.shape[-2]
        return self.map.num_features(rows, self.k.shape[-1])

    def query_rows(self, part: slice) -> Tensor:
        """Scaled queries of a chunk, [batch kv_heads group·part head_dim]."""
        return fold(upcast(self.q[..., part, :]), self.k.shape[1]) * self.query_factor

    def exponents(self) -> Tensor:
        """The w of each feature of an exponential map, [features head_dim], or one matrix per key head."""
        assert self.map.exponents is not None and self.directions is not None
        return self.map.exponents(upcast(self.directions).to(upcast_dtype(self.q.dtype)))

    def keys(self, part: slice) -> Tensor:
        """Keys of a chunk, zero where masked, [batch kv_heads part head_dim]."""
        return upcast(zero_masked(self.k[..., part, :], self.mask(part)))

    def key_rows(self, part: slice) -> Tensor:
        """Scaled keys of a chunk, zero where masked, [batch kv_heads part head_dim]."""
        return self.keys(part) * math.sqrt(abs(self.scale))

    def values(self, part: slice) -> Tensor:
        """Values of a chunk, zero where masked, [batch kv_heads part value_dim]."""
        return upcast(zero_masked(self.v[..., part, :], self.mask(part)))

    def flatten_heads(self, x: Tensor, part: slice) -> Tensor:
        """Query-side rows of a chunk, [batch heads tokens dim] as [batch·kv_heads group·part dim]."""
        return fold(upcast(x[..., part, :]), self.k.shape[1]).flatten(0, 1)

    def unflatten_heads(self, x: Tensor) -> Tensor:
        """Inverse of `flatten_heads`, [batch·kv_heads group·part dim] as [batch heads part dim]."""
        return unfold(x.unflatten(0, self.k.shape[:2]), self.q.shape[1])

    def grouped(self, x: Tensor) -> Tensor:
        """View of query-side rows as [batch kv_heads group tokens dim]."""
        return x.unflatten(1, (self.k.shape[1], self.group))

    def flat_keys(self, part: slice) -> Tensor:
        """Keys of a chunk, zero where masked, [batch·kv_heads part head_dim]."""
        return self.keys(part).flatten(0, 1)

    def flat_values(self, part: slice) -> Tensor:
        """Values of a chunk, zero where masked, [batch·kv_heads part value_dim]."""
        return self.values(part).flatten(0, 1)

    def expand_to_heads(self, x: Tensor) -> Tensor:
        """Rows of all heads, [rows dim], or of each key head, as [batch·kv_heads rows dim]."""
        batch, kv_heads = self.k.shape[:2]
        if x.ndim == 2:
            return x.expand(batch * kv_heads, -1, -1)
        return x.expand(batch, kv_heads, -1, -1).flatten(0, 1)

    def real(self, part: slice) -> Tensor | None:
        """True for a real key, bool [batch·kv_heads part 1]; None: all real."""
        if self.key_mask is None:
            return None
        return self.key_mask[:, None, part, None].expand(-1, self.k.shape[1], -1, -1).flatten(0, 1)

    def query_features(self, rows: Tensor) -> Features:
        """Features of query rows, without the scale common to a row, which cancels."""
        if self.map.exponents is not None:
            return Features(rows @ self.exponents().mT, None)
        features = self.map.features(rows, self._directions(rows))
        if self.map.has_values:
            return features._replace(log_scale=torch.zeros_like(features.log_scale))
        return features

    def key_features(self, rows: Tensor, part: slice) -> Features:
        """Features of key rows, with scale −inf for masked tokens."""
        features, mask = self.map.features(rows, self._directions(rows)), self.mask(part)
        if self.log_weights is not None:
            features = features._replace(log_scale=features.log_scale + self.log_weights.to(rows.dtype))
        if mask is None:
            return features
        hidden = ~mask[:, None, :, None]
        return features._replace(log_scale=features.log_scale.masked_fill(hidden, -torch.inf))

    def query_gradient(self, rows: Tensor, features: Features, grad: Features) -> Tensor:
        """Gradient with respect to the rows of queries, from the gradient of their features."""
        if self.map.exponents is not None:
            grad_out = grad.log_scale @ self.exponents()
        else:
            if self.map.has_values:
                grad = grad._replace(log_scale=torch.zeros_like(grad.log_scale))
            grad_out = self.map.pullback(rows, features, grad, self._directions(rows))
        return grad_out * self.query_factor

    def key_gradient(self, rows: Tensor, features: Features, grad: Features) -> Tensor:
        """Gradient with respect to the keys of a chunk, from the gradient of their features."""
        grad_out = self.map.pullback(rows, features, grad, self._directions(rows))
        return grad_out * math.sqrt(abs(self.scale))

    def _directions(self, rows: Tensor) -> Tensor | None:
        return None if self.directions is None else self.directions.to(rows.dtype)

    def mask(self, part: slice) -> Tensor | None:
        """Key mask of some positions."""
        return None if self.key_mask is None else self.key_mask[:, part]


def parts(length: int, size: int) -> list[slice]:
    """Consecutive parts of a sequence."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def chunks(inputs: LinearInputs, length: int, features: int = _FEATURES) -> list[slice]:
    """Parts whose features, at most so many, fill a cache on the CPU, and what is held on other devices."""
    if not tuned_for_cpu(inputs.q):
        return parts(length, held_tokens(inputs))
    fills = held_tokens(inputs, min(cache_bytes() // 4, features))
    return parts(length, min(max(fills, _LEAST), _MOST))


def held_tokens(inputs: LinearInputs, numbers: int | None = None) -> int:
    """Tokens with this number of features over all heads, by default as many as are held; at least 1."""
    features = max(inputs.q.shape[0] * inputs.q.shape[1] * inputs.num_features, 1)
    return held(features) if numbers is None else max(numbers // features, 1)


@functools.cache
def cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the second-level cache of a core as Linux states it, or a usual one."""
    try:
        sizes = [
            file.with_name("size").read_text() for file in folder.glob("*/level") if file.read_text() == "2\n"
        ]
    except OSError:
        return _CACHE_BYTES
    found = re.fullmatch(r"(\d+)K\s*", sizes[0]) if sizes else None
    return int(found[1]) * 1024 if found and int(found[1]) else _CACHE_BYTES
