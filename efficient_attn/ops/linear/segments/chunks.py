"""Segments of a sequence and their chunks: sizes, padding and layout.

The axes of a tensor in chunks are [flat_heads chunks rows …]; a chunk of queries holds the rows of the
first head of a group, then of the second.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import upcast
from efficient_attn.ops.linear.features import Features
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.parts import held_tokens, parts
from efficient_attn.ops.linear.state import with_ones
from efficient_attn.ops.paths import tuned_for_cpu

# Tokens per chunk, within which scores are computed directly: on the CPU, and on other devices.
CHUNK, _LARGE_CHUNK = 64, 128
# Chunks have a multiple of this number of tokens, as products on a GPU prefer.
_MULTIPLE = 16
# Features of the queries of a segment that stay in a CPU's cache, and chunks of a segment there at most.
_CACHED, _FEW = 2**17, 8
_ALL = slice(None)


def segments(inputs: LinearInputs, length: int | None = None) -> list[slice]:
    """Consecutive segments of the queries, or of a length, in whole chunks."""
    length = inputs.q.shape[-2] if length is None else length
    if tuned_for_cpu(inputs.q):
        return parts(length, max(min(held_tokens(inputs, _CACHED) // CHUNK, _FEW), 1) * CHUNK)
    return parts(length, max(held_tokens(inputs) // _LARGE_CHUNK, 1) * _LARGE_CHUNK)


def _chunk(inputs: LinearInputs) -> int:
    return CHUNK if tuned_for_cpu(inputs.q) else _LARGE_CHUNK


class Segment(NamedTuple):
    """Some queries and the keys at their positions, padded to whole chunks.

    Attributes:
        inputs: The padded inputs.
        part: Positions of the queries among all queries.
        positions: Positions of the keys among all keys.
        size: Tokens per chunk.
    """

    inputs: LinearInputs
    part: slice
    positions: slice
    size: int

    @classmethod
    def of(cls, inputs: LinearInputs, part: slice) -> "Segment":
        before, tokens = inputs.k.shape[-2] - inputs.q.shape[-2], part.stop - part.start
        chunks = -(-tokens // _chunk(inputs))
        size = -(-tokens // (chunks * _MULTIPLE)) * _MULTIPLE if chunks > 1 else tokens
        positions = slice(part.start + before, part.stop + before)
        mask, missing = inputs.mask(positions), chunks * size - tokens
        if missing:
            mask = inputs.q.new_ones(len(inputs.q), tokens, dtype=torch.bool) if mask is None else mask
            mask = F.pad(mask, (0, missing))
        q = _padded(inputs.q[..., part, :], missing)
        k, v = (_padded(x[..., positions, :], missing) for x in (inputs.k, inputs.v))
        return cls(inputs._replace(q=q, k=k, v=v, key_mask=mask), part, positions, size)

    def query_rows(self) -> Tensor:
        """Scaled queries, chunk by chunk, [batch kv_heads chunks·rows head_dim]."""
        return self._by_chunks(upcast(self.inputs.q)) * self.inputs.query_factor

    def key_rows(self) -> Tensor:
        """Scaled keys, [batch kv_heads chunks·size head_dim]."""
        return self.inputs.key_rows(_ALL)

    def query_features(self, rows: Tensor) -> Features:
        """Features of query rows, in chunks."""
        return _each(self.inputs.query_features(rows), _flat, self.size * self.inputs.group)

    def key_features(self, rows: Tensor) -> Features:
        """Features of key rows, in chunks; scale −inf for masked keys."""
        return _each(self.inputs.key_features(rows, _ALL), _flat, self.size)

    def query_gradient(self, rows: Tensor, features: Features, grad: Features) -> Tensor:
        """Gradient with respect to the queries [batch heads tokens head_dim], from their features'."""
        whole = (_each(x, _whole, self.inputs.k.shape[1]) for x in (features, grad))
        return self._tokens(self.inputs.query_gradient(rows, *whole))

    def key_gradient(self, rows: Tensor, features: Features, grad: Features) -> Tensor:
        """Gradient with respect to the keys [batch kv_heads tokens head_dim], from their features'."""
        whole = (_each(x, _whole, self.inputs.k.shape[1]) for x in (features, grad))
        return self.inputs.key_gradient(rows, *whole)[..., : self._length, :]

    def values(self) -> Tensor:
        """Values with a column of ones, in chunks."""
        return _flat(with_ones(self.inputs.values(_ALL)), self.size)

    def value_gradient(self, grad: Tensor) -> Tensor:
        """Gradient with respect to the values, [batch kv_heads tokens value_dim], from that in chunks."""
        return _whole(grad, self.inputs.k.shape[1])[..., : self._length, :]

    def rows(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Rows of this segment in chunks, out of [batch heads q_tokens dim]."""
        padded = _padded(upcast(x[..., self.part, :]), self.inputs.q.shape[-2] - self._length, fill)
        return _flat(self._by_chunks(padded), self.size * self.inputs.group)

    def tokens(self, rows: Tensor) -> Tensor:
        """Rows in chunks as [batch heads tokens dim], the inverse of `rows`."""
        return self._tokens(_whole(rows, self.inputs.k.shape[1]))

    @property
    def _length(self) -> int:
        return self.part.stop - self.part.start

    def _tokens(self, rows: Tensor) -> Tensor:
        chunks = rows.unflatten(2, (-1, self.inputs.group, self.size))
        return chunks.transpose(2, 3).flatten(3, 4).flatten(1, 2)[..., : self._length, :]

    def _by_chunks(self, x: Tensor) -> Tensor:
        """[batch heads tokens dim] as [batch kv_heads chunks·group·size dim]."""
        groups = (self.inputs.k.shape[1], self.inputs.group)
        chunks = x.unflatten(1, groups).unflatten(3, (x.shape[2] // self.size, self.size))
        return chunks.transpose(2, 3).flatten(2, 4)


def _flat(x: Tensor, rows: int) -> Tensor:
    """[batch kv_heads chunks·rows dim] as [flat_heads chunks rows dim]."""
    return x.flatten(0, 1).unflatten(1, (x.shape[2] // rows, rows))


def _whole(x: Tensor, kv_heads: int) -> Tensor:
    """Inverse of `_flat`."""
    return x.flatten(1, 2).unflatten(0, (-1, kv_heads))


def _each(features: Features, change: Callable[[Tensor, int], Tensor], number: int) -> Features:
    scale, values = features
    return Features(change(scale, number), None if values is None else change(values, number))


def _padded(x: Tensor, missing: int, fill: float = 0.0) -> Tensor:
    return F.pad(x, (0, 0, 0, missing), value=fill) if missing else x
