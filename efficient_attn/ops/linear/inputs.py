"""The tokens of a linear attention, handed out a chunk at a time as features."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, upcast_dtype, zero_masked
from efficient_attn.ops.grouped_queries import fold, unfold
from efficient_attn.ops.linear.features import MAPS, FeatureMap, Features


class LinearInputs(NamedTuple):
    """Queries, keys and values, and the feature map that they go through.

    Nothing of the size tokens · features ever exists: features are made for one chunk, in float32 or
    better, and made again by the backward pass.

    Attributes:
        q: [batch heads q_tokens head_dim].
        k: [batch kv_heads k_tokens head_dim].
        v: [batch kv_heads k_tokens value_dim].
        key_mask: bool [batch k_tokens], True for a real token; None: all are.
        directions: Rows of the random projection, [directions head_dim], or of one for each head
            of keys, [kv_heads directions head_dim]; None for a map without.
        log_weights: Logarithm of a weight of each feature, [kv_heads 1 features]; None: all weigh 1.
        kind: Name of the feature map in `features.MAPS`.
        scale: Factor on q·k, shared between both sides as its root.
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
        """Heads of queries to one head of keys."""
        return self.q.shape[1] // self.k.shape[1]

    def query_rows(self, part: slice) -> Tensor:
        """Scaled queries of some tokens, [batch kv_heads group·part head_dim]."""
        sign = math.copysign(1.0, self.scale)
        return fold(upcast(self.q[..., part, :]), self.k.shape[1]) * (sign * math.sqrt(abs(self.scale)))

    def exponents(self) -> Tensor:
        """Of an exponential map the w of each feature, [features head_dim] or one for each head of keys."""
        assert self.map.exponents is not None and self.directions is not None
        return self.map.exponents(upcast(self.directions).to(upcast_dtype(self.q.dtype)))

    def keys(self, part: slice) -> Tensor:
        """Keys of some tokens, zeros where they are masked, [batch kv_heads part head_dim]."""
        return upcast(zero_masked(self.k[..., part, :], self._mask(part)))

    def key_rows(self, part: slice) -> Tensor:
        """Scaled keys of some tokens, zeros where they are masked, [batch kv_heads part head_dim]."""
        return self.keys(part) * math.sqrt(abs(self.scale))

    def values(self, part: slice) -> Tensor:
        """Values of some tokens, zeros where they are masked, [batch kv_heads part value_dim]."""
        return upcast(zero_masked(self.v[..., part, :], self._mask(part)))

    def flatten_heads(self, x: Tensor, part: slice) -> Tensor:
        """What belongs to some queries, [batch heads tokens dim] as [batch·kv_heads group·part dim]."""
        return fold(upcast(x[..., part, :]), self.k.shape[1]).flatten(0, 1)

    def unflatten_heads(self, x: Tensor) -> Tensor:
        """The inverse of `lists`, [batch·kv_heads group·part dim] as [batch heads part dim]."""
        return unfold(x.unflatten(0, self.k.shape[:2]), self.q.shape[1])

    def grouped(self, x: Tensor) -> Tensor:
        """What belongs to all queries, viewed as [batch kv_heads group tokens dim]."""
        return x.unflatten(1, (self.k.shape[1], self.group))

    def flat_keys(self, part: slice) -> Tensor:
        """Keys of some tokens, zeros where they are masked, [batch·kv_heads part head_dim]."""
        return self.keys(part).flatten(0, 1)

    def flat_values(self, part: slice) -> Tensor:
        """Values of some tokens, zeros where they are masked, [batch·kv_heads part value_dim]."""
        return self.values(part).flatten(0, 1)

    def expand_to_heads(self, x: Tensor) -> Tensor:
        """What belongs to all heads, [rows dim], or to each head of keys, as [batch·kv_heads rows dim]."""
        batch, kv_heads = self.k.shape[:2]
        if x.ndim == 2:
            return x.expand(batch * kv_heads, -1, -1)
        return x.expand(batch, kv_heads, -1, -1).flatten(0, 1)

    def real(self, part: slice) -> Tensor | None:
        """Which keys are tokens, bool [batch·kv_heads part 1]; None: all are."""
        if self.key_mask is None:
            return None
        return self.key_mask[:, None, part, None].expand(-1, self.k.shape[1], -1, -1).flatten(0, 1)

    def query_features(self, rows: Tensor) -> Features:
        """Features of query rows; what all features of a row have in common cancels, and is left out."""
        if self.map.exponents is not None:
            return Features(rows @ self.exponents().mT, None)
        features = self.map.features(rows, self._directions(rows))
        if self.map.has_values:
            return features._replace(log_scale=torch.zeros_like(features.log_scale))
        return features

    def key_features(self, rows: Tensor, part: slice) -> Features:
        """Features of key rows, of scale −inf where the token is masked."""
        features, mask = self.map.features(rows, self._directions(rows)), self._mask(part)
        if self.log_weights is not None:
            features = features._replace(log_scale=features.log_scale + self.log_weights.to(rows.dtype))
        if mask is None:
            return features
        hidden = ~mask[:, None, :, None]
        return features._replace(log_scale=features.log_scale.masked_fill(hidden, -torch.inf))

    def query_gradient(self, rows: Tensor, features: Features, grad: Features) -> Tensor:
        """Derivative by some tokens of q, from the derivative by their features."""
        if self.map.exponents is not None:
            grad_out = grad.log_scale @ self.exponents()
        else:
            if self.map.has_values:
                grad = grad._replace(log_scale=torch.zeros_like(grad.log_scale))
            grad_out = self.map.pullback(rows, features, grad, self._directions(rows))
        sign = math.copysign(1.0, self.scale)
        return unfold(grad_out, self.q.shape[1]) * (sign * math.sqrt(abs(self.scale)))

    def key_gradient(self, rows: Tensor, features: Features, grad: Features) -> Tensor:
        """Derivative by some tokens of k, from the derivative by their features."""
        grad_out = self.map.pullback(rows, features, grad, self._directions(rows))
        return grad_out * math.sqrt(abs(self.scale))

    def _directions(self, rows: Tensor) -> Tensor | None:
        return None if self.directions is None else self.directions.to(rows.dtype)

    def _mask(self, part: slice) -> Tensor | None:
        return None if self.key_mask is None else self.key_mask[:, part]
