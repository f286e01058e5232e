"""Full linear attention with trigonometric features, forward and backward, chunk by chunk and in place.

With F = [cos(w·x), sin(w·x)] for m directions w and s_j = exp(|k_j|²/2), relative to the largest, the
output is F(q_t)·Σ_j s_j F(k_j) v_j over the same sum without v: a query's own scale cancels.

With t = tan(x/2), cos x = 2/(1 + t²) − 1 and sin x = 2t/(1 + t²): one transcendental function instead of
two, and both are right to a few roundings of 1, however large t is.
"""

import math

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import wide, wide_dtype
from efficient_attn.ops.linear.backward import Outputs, new_outputs, output_gradients
from efficient_attn.ops.linear.inputs import Tokens
from efficient_attn.ops.linear.state import LinearState, exponential, finite, sees, with_ones
from efficient_attn.ops.scratch import Rooms

# Tokens at once: their features stay in cache, and on the way back their derivatives too.
_CHUNK, _CHUNK_BACK = 144, 112
# Tokens at once of which nothing but a scale is wanted.
_PIECE = 512


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


def trigonometric_attention(tokens: Tokens) -> tuple[Outputs, LinearState]:
    """The output of every query, and the state of all keys."""
    waves = Waves(tokens)
    state = _state(waves)
    sums, outputs = state.sums.flatten(0, 1), new_outputs(tokens.q, tokens.v)
    for part in _chunks(tokens.q, _CHUNK):
        rows = tokens.lists(tokens.q, part)
        found = torch.bmm(waves.of_queries(rows, rows.new_ones(())), sums)
        # The logarithms' place holds the denominators until all of them are there.
        out, ones = (tokens.grouped(x)[..., part, :] for x in outputs[:2])
        found = found.unflatten(0, tokens.k.shape[:2]).unflatten(2, (tokens.group, -1))
        torch.div(found[..., :-1], ones.copy_(found[..., -1:]), out=out)
    torch.lt(outputs.log_normaliser, 0, out=outputs.negative)
    logarithm = tokens.grouped(outputs.log_normaliser).abs_().log_().add_(state.log_scale.unsqueeze(2))
    if tokens.key_mask is not None:
        blind = ~sees(state).unsqueeze(2)
        tokens.grouped(outputs.out).masked_fill_(blind, 0.0)
        logarithm.masked_fill_(blind, torch.inf)
    return outputs, state


def _state(waves: Waves) -> LinearState:
    """The state of all keys."""
    tokens = waves.tokens
    scales = torch.cat([waves.log_scales(part) for part in _chunks(tokens.k, _PIECE)], dim=-2)
    reference = scales.amax(dim=-2, keepdim=True)
    weights = exponential(scales.sub_(finite(reference)))
    sums = weights.new_zeros(len(weights), 2 * waves.directions, tokens.v.shape[-1])
    ones = sums.new_zeros(*sums.shape[:-1], 1)
    for part in _chunks(tokens.k, _CHUNK):
        features = waves.of_keys(tokens.key_lists(part), weights[:, part])
        sums.baddbmm_(features.mT, tokens.value_lists(part))
        ones.add_(features.sum(dim=-2).unsqueeze(-1))
    both = torch.cat([sums, ones], dim=-1).div_(waves.directions)
    return LinearState(*(x.unflatten(0, tokens.k.shape[:2]) for x in (both, reference)))


def trigonometric_gradients(
    tokens: Tokens, gradient: Tensor, outputs: Outputs, state: LinearState
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives by q, k and v; `state` is that of all keys."""
    waves, kv_heads = Waves(tokens), tokens.k.shape[1]
    sums, reference = state.sums.flatten(0, 1), finite(state.log_scale)
    by_q, by_k, by_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tokens[:3])
    query_sums = torch.zeros_like(sums)
    for part in _chunks(tokens.q, _CHUNK_BACK):
        logarithm, sign = outputs.normaliser(part, kv_heads)
        factor = exponential(reference - logarithm).mul_(sign).flatten(0, 1)
        g = output_gradients(gradient, outputs.out, part, kv_heads).flatten(0, 1)
        features = waves.of_queries(tokens.lists(tokens.q, part), factor)
        by = torch.bmm(g, sums.mT, out=waves.room_like(features))
        by_q[..., part, :] = tokens.unlist(waves.by_queries(features, by))
        query_sums.baddbmm_(features.mT, g)
    query_sums.div_(waves.directions)
    for part in _chunks(tokens.k, _CHUNK_BACK):
        keys, factor = (
            tokens.key_lists(part),
            exponential(waves.log_scales(part).sub_(reference.flatten(0, 1))),
        )
        features = waves.of_keys(keys, factor)
        by_v[..., part, :] = torch.bmm(features, query_sums[..., :-1]).view_as(by_v[..., part, :])
        by = torch.bmm(with_ones(tokens.value_lists(part)), query_sums.mT, out=waves.room_like(features))
        by_keys = waves.by_keys(features, by)
        by_scale = features.mul_(by).sum(dim=-1, keepdim=True).mul_(abs(tokens.scale))
        by_keys.addcmul_(keys, by_scale)
        by_k[..., part, :] = by_keys.view_as(by_k[..., part, :])
    return by_q, by_k, by_v


def _chunks(x: Tensor, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, x.shape[-2], size)]
