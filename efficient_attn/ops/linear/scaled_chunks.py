"""Segments of a sequence in chunks, whose features and states have scales of their own.

Tensors in chunks are [flat_heads chunks rows …]. A chunk of queries holds the rows of the first head of a
group, then of the second. Scales are whole numbers, so that their sums and differences have no rounding, even
far from 0.

With S_j the sums of chunk j relative to e^(r_j), feature by feature, the state after chunk n is

    R_n = max_{j≤n} r_j,   P_n = Σ_{j≤n} e^(r_j − R_n) S_j:

on the CPU chunk after chunk, elsewhere a scan: for each feature one lower-triangular matrix of factors times
the sums of all chunks.
"""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import upcast
from efficient_attn.ops.linear.features import Features
from efficient_attn.ops.linear.inputs import LinearInputs, held_tokens, rows_of
from efficient_attn.ops.linear.state import LinearState, with_ones
from efficient_attn.ops.paths import parts, tuned_for_cpu

# Stands for −inf where a scale is subtracted: no exponent of a finite input is as low.
_LOWEST = -1e30
# Smaller scales mean that there is no key.
UNSEEN = -1e29
# Half the logarithm of the largest sum of products of a query's and a key's weights: sums use the whole range
# of floats, within which the supports of a query's and a key's features may differ.
_LARGEST = {torch.float32: 40.0, torch.float64: 300.0}
# Tokens per chunk, within which scores are computed directly: on the CPU, and on other devices.
CHUNK, LARGE_CHUNK = 64, 128
# Chunks have a multiple of this number of tokens, as products on a GPU prefer.
MULTIPLE = 16
# Features of the queries of a segment that stay in a CPU's cache, and chunks of a segment there at most.
CACHED, _FEW = 2**17, 8
# Chunks of a segment at most on other devices, since one product scans them with a factor for each pair.
_MANY = 160
_ALL = slice(None)


class ScaledKeys(NamedTuple):
    """Keys as weights · exp(log_scale + reference).

    Attributes:
        weights: Exponentials, or the values of other features, [… size features].
        log_scale: Scale of each key, [… size 1]; −inf for a masked key.
        reference: Largest exponent of the chunk's keys, feature by feature, [… 1 features]; −inf: no key;
            None: features that have values.
    """

    weights: Tensor
    log_scale: Tensor
    reference: Tensor | None


class ScaledQueries(NamedTuple):
    """Queries as weights · exp(log_scale − reference of the keys).

    Attributes:
        weights: [… rows features].
        log_scale: [… rows 1]; None: 0.
    """

    weights: Tensor
    log_scale: Tensor | None


def floor(scale: Tensor) -> Tensor:
    """The scale with a finite number in place of −inf, so that it can be subtracted."""
    return scale.clamp_min(_LOWEST)


def scaled_keys(features: Features) -> ScaledKeys:
    """Keys at the largest exponents of their chunk, each at a scale of its own."""
    if features.values is not None:
        return ScaledKeys(features.values, features.log_scale, None)
    reference = features.log_scale.detach().amax(dim=-2, keepdim=True)
    exponents = features.log_scale - floor(reference)
    return ScaledKeys(*_scaled(exponents), reference)


def scaled_queries(features: Features, keys: ScaledKeys) -> ScaledQueries:
    """Queries of the same chunks as the keys."""
    if keys.reference is None:
        assert features.values is not None
        return ScaledQueries(features.values, None)
    exponents = features.log_scale + floor(keys.reference)
    return ScaledQueries(*_scaled(exponents))


def _scaled(exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Weights exp(exponents − scale) and each row's scale, chosen so that sums use the whole float range."""
    largest = _LARGEST[exponents.dtype] - math.ceil(math.log(exponents.shape[-1]) / 2)
    top = exponents.detach().amax(dim=-1, keepdim=True).round()
    # The factor e^largest has no rounding of a large exponent; weights without it leave the range of floats.
    roots = torch.add(floor(top) / -2, exponents, alpha=0.5).exp()
    return torch.addcmul(roots.new_zeros(()), roots, roots, value=math.exp(largest)), top - largest


def in_digits(sums: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Positive sums near 1 and their scale, so that their logarithm has no rounding of a large exponent."""
    largest = _LARGEST[sums.dtype]
    shift = sums.detach().log().round().clamp(-largest, largest)
    return sums / shift.exp(), scale + shift


def states(keys: ScaledKeys, values: Tensor, *, unscaled: bool) -> LinearState:
    """The state of each chunk's keys and of their values with ones, [… size value_dim+1]."""
    if unscaled:
        return LinearState(keys.weights.mT @ values, keys.log_scale[..., :1, :])
    if keys.reference is not None:
        return LinearState(keys.weights.mT @ (values * keys.log_scale.exp()), keys.reference)
    largest = keys.log_scale.detach().amax(dim=-2, keepdim=True)
    return LinearState(keys.weights.mT @ (values * (keys.log_scale - floor(largest)).exp()), largest)


def visible_scale(keys: ScaledKeys, rows: int) -> Tensor:
    """Running maximum of the key scales within a chunk, [… rows 1]."""
    scale = keys.log_scale.detach().cummax(dim=-2).values
    if keys.reference is not None:
        scale = scale + _LARGEST[scale.dtype]
    group = rows // scale.shape[-2]
    return scale.repeat(1, 1, group, 1) if group > 1 else scale


def running_states(
    states: LinearState, first: LinearState, *, reverse: bool = False, unscaled: bool = False
) -> tuple[LinearState, LinearState]:
    """States before each chunk, [flat_heads chunks …], and the state after all, [batch kv_heads …].

    Args:
        first: State before the first chunk, [batch kv_heads …].
        reverse: Whether the first state follows the last chunk, and states follow each chunk.
    """
    heads = first.sums.shape[:2]
    first = LinearState(*(x.flatten(0, 1).unsqueeze(1) for x in first))
    if tuned_for_cpu(first.sums):
        chunks = [LinearState(*pair) for pair in zip(*(x.split(1, dim=1) for x in states), strict=True)]
        join = _added if unscaled else _joined
        *running, last = accumulate(reversed(chunks) if reverse else chunks, join, initial=first)
        ordered = zip(*(reversed(running) if reverse else running), strict=True)
        before = LinearState(*(x[0] if len(x) == 1 else torch.cat(x, dim=1) for x in ordered))
    else:
        turned = LinearState(*(x.flip(1) for x in states)) if reverse else states
        scanned = _scan(LinearState(*(torch.cat(pair, dim=1) for pair in zip(first, turned, strict=True))))
        before, last = map(LinearState._make, zip(*(x.tensor_split([-1], 1) for x in scanned), strict=True))
        before = LinearState(*(x.flip(1) for x in before)) if reverse else before
    return before, LinearState(*(x.squeeze(1).unflatten(0, heads) for x in last))


def _added(left: LinearState, right: LinearState) -> LinearState:
    return LinearState(left.sums + right.sums, right.log_scale)


def _joined(left: LinearState, right: LinearState) -> LinearState:
    reference = torch.maximum(left.log_scale.detach(), right.log_scale.detach())
    factors = [(state.log_scale - floor(reference)).exp().mT for state in (left, right)]
    return LinearState(torch.addcmul(factors[0] * left.sums, factors[1], right.sums), reference)


def _scan(states: LinearState) -> LinearState:
    """The state up to each chunk, in one product."""
    reference = states.log_scale.detach().cummax(dim=1).values
    # [flat_heads features|1 chunks …]: with one scale for all features their sums are one row.
    scales, upto = (x.squeeze(2).mT for x in (states.log_scale, reference))
    factors = (scales.unsqueeze(-2) - floor(upto).unsqueeze(-1)).exp().tril()
    rows = states.sums.unflatten(2, (scales.shape[1], -1)).transpose(1, 2)
    sums = factors @ rows.flatten(3)
    return LinearState(sums.unflatten(3, rows.shape[3:]).transpose(1, 2).flatten(2, 3), reference)


def segments(inputs: LinearInputs) -> list[slice]:
    """Consecutive segments of the queries, in whole chunks."""
    numbers, most = (CACHED, _FEW) if tuned_for_cpu(inputs.q) else (None, _MANY)
    size = _chunk(inputs)
    return parts(inputs.q.shape[-2], max(min(held_tokens(inputs, numbers) // size, most), 1) * size)


def _chunk(inputs: LinearInputs) -> int:
    return CHUNK if tuned_for_cpu(inputs.q) else LARGE_CHUNK


class Segment(NamedTuple):
    """Some queries and the keys at their positions, padded to whole chunks.

    Attributes:
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
        size = -(-tokens // (chunks * MULTIPLE)) * MULTIPLE if chunks > 1 else tokens
        positions = slice(part.start + before, part.stop + before)
        mask, missing = inputs.mask(positions), chunks * size - tokens
        if missing:
            mask = inputs.q.new_ones(len(inputs.q), tokens, dtype=torch.bool) if mask is None else mask
            mask = F.pad(mask, (0, missing))
        q = _padded(rows_of(inputs.q, part), missing)
        k, v = (_padded(rows_of(x, positions), missing) for x in (inputs.k, inputs.v))
        return cls(inputs._replace(q=q, k=k, v=v, key_mask=mask), part, positions, size)

    def query_rows(self) -> Tensor:
        """Scaled queries, chunk by chunk, [batch kv_heads chunks·rows head_dim]."""
        rows = self.inputs.transformed(self._by_chunks(upcast(self.inputs.q)), 0)
        return rows * self.inputs.query_factor

    def query_features(self, rows: Tensor) -> Features:
        return _each(self.inputs.query_features(rows), _flat, self.size * self.inputs.group)

    def key_features(self, rows: Tensor) -> Features:
        """Features of key rows, in chunks, with scale −inf for masked keys."""
        return _each(self.inputs.key_features(rows, _ALL), _flat, self.size)

    def query_gradient(self, rows: Tensor, features: Features, grad: Features) -> Tensor:
        """Gradient with respect to the queries [batch heads tokens head_dim], from their features'."""
        whole = (_each(x, _whole, self.inputs.k.shape[1]) for x in (features, grad))
        return self._tokens(self.inputs.query_gradient(rows, *whole))

    def key_gradient(self, rows: Tensor, features: Features, grad: Features) -> Tensor:
        """Gradient with respect to the keys [batch kv_heads tokens head_dim], from their features'."""
        whole = (_each(x, _whole, self.inputs.k.shape[1]) for x in (features, grad))
        return rows_of(self.inputs.key_gradient(rows, *whole), slice(0, self._length))

    def values(self) -> Tensor:
        """Values with a column of ones, in chunks."""
        return _flat(with_ones(self.inputs.real_rows(self.inputs.v, _ALL)), self.size)

    def value_gradient(self, grad: Tensor) -> Tensor:
        """Gradient with respect to the values, [batch kv_heads tokens value_dim], from that in chunks."""
        return rows_of(_whole(grad, self.inputs.k.shape[1]), slice(0, self._length))

    def rows(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Rows of this segment in chunks, out of [batch heads q_tokens dim]."""
        padded = _padded(upcast(rows_of(x, self.part)), self.inputs.q.shape[-2] - self._length, fill)
        return _flat(self._by_chunks(padded), self.size * self.inputs.group)

    def tokens(self, rows: Tensor) -> Tensor:
        """Rows in chunks as [batch heads tokens dim], the inverse of `rows`."""
        return self._tokens(_whole(rows, self.inputs.k.shape[1]))

    @property
    def _length(self) -> int:
        return self.part.stop - self.part.start

    def _tokens(self, rows: Tensor) -> Tensor:
        if self.inputs.group > 1:
            chunks = rows.unflatten(2, (-1, self.inputs.group, self.size))
            rows = chunks.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return rows_of(rows, slice(0, self._length))

    def _by_chunks(self, x: Tensor) -> Tensor:
        """[batch heads tokens dim] as [batch kv_heads chunks·group·size dim]."""
        groups = (self.inputs.k.shape[1], self.inputs.group)
        if self.inputs.group == 1:
            return x
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
