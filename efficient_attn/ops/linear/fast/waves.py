"""Trigonometric features, chunk by chunk and in place.

With t = tan(x/2), cos x = 2/(1 + t²) − 1 and sin x = 2t/(1 + t²): one transcendental function instead of
two, and both are right to a few roundings of 1, however large t is.
"""

import math

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import wide, wide_dtype
from efficient_attn.ops.linear.inputs import Tokens
from efficient_attn.ops.scratch import Rooms


class Waves:
    """Makes cosines and sines of queries and keys, and takes derivatives by them back.

    Batch and heads of keys are one dimension here, `lists`. Of the factor 1/√m of each of the 2m features
    nothing is said: it belongs to the sums over keys, as 1/m.
    """

    def __init__(self, tokens: Tokens) -> None:
        assert tokens.directions is not None and tokens.log_weights is None
        self.tokens, self._rooms = tokens, Rooms()
        w = wide(tokens.directions).to(wide_dtype(tokens.q.dtype)) * math.sqrt(abs(tokens.scale))
        # Halves of the directions, for tan(x/2).
        self._keys = tokens.for_lists(w / 2)
        self._queries = self._keys if tokens.scale > 0 else -self._keys
        self.directions = w.shape[-2]

    def log_scales(self, positions: slice) -> Tensor:
        """|k|²/2 of some keys, scaled, −inf where a key is masked, [lists positions 1]."""
        keys, real = self.tokens.key_lists(positions), self.tokens.real(positions)
        scales = (
            torch.linalg.vector_norm(keys, dim=-1, keepdim=True).square_().mul_(abs(self.tokens.scale) / 2)
        )
        return scales if real is None else scales.masked_fill_(~real, -torch.inf)

    def of_queries(self, rows: Tensor, factor: Tensor) -> Tensor:
        """factor · [cos(w·q), sin(w·q)] of query rows, [lists rows 2m], for a factor [lists|1 rows|1 1]."""
        return self._features(rows, self._queries, factor)

    def of_keys(self, keys: Tensor, factor: Tensor) -> Tensor:
        """factor · [cos(w·k), sin(w·k)] of keys, [lists positions 2m]."""
        return self._features(keys, self._keys, factor)

    def by_queries(self, features: Tensor, by_features: Tensor) -> Tensor:
        """Derivative by query rows, from that by their features before the factor."""
        return torch.bmm(self._by_angles(features, by_features), self._queries).mul_(2)

    def by_keys(self, features: Tensor, by_features: Tensor) -> Tensor:
        """Derivative by keys at a fixed scale, from that by their features before the factor."""
        return torch.bmm(self._by_angles(features, by_features), self._keys).mul_(2)

    def room_like(self, features: Tensor) -> Tensor:
        """Room for derivatives by features, which making features writes over."""
        return self._rooms("derivatives", features, tuple(features.shape))

    def _features(self, rows: Tensor, directions: Tensor, factor: Tensor) -> Tensor:
        shape = (*rows.shape[:-1], self.directions)
        t = torch.bmm(rows, directions.mT, out=self._rooms("angles", rows, shape)).tan_()
        features = self._rooms("features", rows, (*shape[:-1], 2 * shape[-1]))
        cos, sin = features.chunk(2, dim=-1)
        plus = torch.addcmul(t.new_ones(()), t, t, out=self._rooms("derivatives", rows, shape))
        torch.div(2 * factor, plus, out=plus)
        torch.sub(plus, factor, out=cos)
        torch.mul(plus, t, out=sin)
        return features

    def _by_angles(self, features: Tensor, by_features: Tensor) -> Tensor:
        cos, sin = features.chunk(2, dim=-1)
        by_cos, by_sin = by_features.chunk(2, dim=-1)
        by = torch.mul(cos, by_sin, out=self._rooms("angles", cos, tuple(cos.shape)))
        return by.addcmul_(sin, by_cos, value=-1)
