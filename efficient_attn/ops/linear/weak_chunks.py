"""Chunks with a row whose features are small wherever the features of all its visible keys are large.

The products of such a row leave the range of floats. Its chunk is computed again by blocks of a few rows: the
rows of a block read the keys of earlier blocks, all visible to them, relative to these keys alone, and the
pairs of a block are computed one by one.

On the CPU all weak chunks are computed again. Other devices are not asked how many there are: a fixed number
is computed again, chunks with the most weak rows first. Other weak rows lose digits, or their chunk's part.

Gradients: with L_t the logarithm of a row's denominator, every power e^(a_tf + u_jf − L_t) of a visible pair
is at most 1. Rows and earlier keys are relative to the largest of these keys, m: e^(a_tf + m_f − L_t) ≤ 1 and
e^(u_jf − m_f) ≤ 1.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.linear.scaled_chunks import floor
from efficient_attn.ops.paths import tuned_for_cpu

# Logarithms of sums, at the scale of their chunk, below which products may have left the range of floats.
_WEAK = {torch.float32: -60.0, torch.float64: -600.0}
# Features of the chunks that are computed again, or the share of chunks, whichever is more.
_FEATURES, _SHARE = 2**22, 32
# Rows of a block.
_BLOCK = 8


class Sums(NamedTuple):
    """Sums over keys, e^scale · sums.

    Attributes:
        sums: Σ_j weight_tj [v_j, 1], [flat_heads chunks rows value_dim+1].
        scale: [flat_heads chunks rows|1 1]; −inf: no key.
    """

    sums: Tensor
    scale: Tensor


def weak(log_total: Tensor) -> Tensor:
    """Whether a row is weak, from the logarithm of its sum at the scale of its chunk; False for NaN."""
    return log_total < _WEAK[log_total.dtype]


def read_weak_chunks(here: Sums, log_total: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Sums:
    """Sums over the keys of a chunk, computed again for weak chunks.

    Args:
        log_total: Logarithm of each row's sum at the scale of its chunk, [flat_heads chunks rows 1].
        queries: Exponents [flat_heads chunks rows features].
        keys: Exponents [flat_heads chunks size features]; −inf: masked.
        values: Values and ones [flat_heads chunks size value_dim+1].
    """
    for chunks in weak_chunks(weak(log_total), queries.shape[-1]):
        again = _read(
            chunk_rows(queries, chunks, keys.shape[2]), *(x.flatten(0, 1)[chunks] for x in (keys, values))
        )
        here = Sums(*(put_chunks(x, chunks, y) for x, y in zip(here, again, strict=True)))
    return here


def weak_chunks(rows: Tensor, features: int) -> Iterator[Tensor]:
    """Indices of weak chunks among all chunks of all heads, some at a time, from the most weak rows on."""
    number = rows.flatten(2).sum(dim=-1).flatten()
    chunks = number.numel()
    capacity = min(max(_FEATURES // (rows.shape[2] * features), chunks // _SHARE, 1), chunks)
    if tuned_for_cpu(rows):
        yield from number.nonzero().flatten().split(capacity)
    else:
        yield number.topk(capacity).indices


def chunk_rows(x: Tensor, chunks: Tensor, size: int) -> Tensor:
    """Query-side rows [flat_heads chunks group·size dim] of some chunks, [some group size dim]."""
    return x.flatten(0, 1)[chunks].unflatten(1, (-1, size))


def put_chunks(whole: Tensor, chunks: Tensor, replaced: Tensor) -> Tensor:
    """[flat_heads chunks rows dim] with some of its chunks replaced."""
    replaced = replaced.reshape(len(chunks), *whole.shape[2:])
    return whole.flatten(0, 1).index_put((chunks,), replaced).view(whole.shape)


def _blocks(x: Tensor) -> Tensor:
    """Whole blocks of rows, [… blocks·rows dim] as [… blocks rows dim]."""
    return x.unflatten(-2, (-1, _BLOCK))


def _padded(x: Tensor, fill: float) -> Tensor:
    """Rows [… size dim] padded to whole blocks."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % _BLOCK), value=fill)


def _earlier(keys: Tensor) -> Tensor:
    """Exponents of the keys before each block, −inf elsewhere, [some 1 blocks size features]."""
    position = torch.arange(keys.shape[-2], device=keys.device)
    later = position >= position[::_BLOCK, None]
    return keys[:, None, None].masked_fill(later[..., None], -torch.inf)


def _read(queries: Tensor, keys: Tensor, values: Tensor) -> Sums:
    """Sums of [some group size features] over [some size features], and values [some size value_dim+1]."""
    size = queries.shape[-2]
    # Finite exponents of masked keys have finite gradients.
    queries, keys = _blocks(_padded(queries, 0.0)), floor(_padded(keys, -torch.inf))
    values = _padded(values, 0.0).unsqueeze(1)
    parts = (
        _read_earlier(queries, floor(_earlier(keys)), values.unsqueeze(2)),
        _read_pairs(queries, _blocks(keys.unsqueeze(1)), _blocks(values)),
    )
    scale = torch.maximum(*(part.scale for part in parts))
    total = sum(((part.scale - scale).exp() * part.sums for part in parts), torch.zeros_like(scale))
    return Sums(*(x.flatten(-3, -2)[..., :size, :] for x in (total, scale)))


def _read_earlier(queries: Tensor, keys: Tensor, values: Tensor) -> Sums:
    """Sums over the keys of earlier blocks, which every row of a block sees."""
    reference = keys.detach().amax(dim=-2, keepdim=True)
    exponents = queries + reference
    scale = exponents.detach().amax(dim=-1, keepdim=True)
    scores = (exponents - scale).exp() @ (keys - reference).exp().mT
    return Sums(scores @ values, scale)


def _read_pairs(queries: Tensor, keys: Tensor, values: Tensor) -> Sums:
    """Sums over the keys of the same block up to each row's own, from the exponents of every pair."""
    pairs = (queries.unsqueeze(-2) + keys.unsqueeze(-3)).logsumexp(dim=-1)
    later = torch.ones(pairs.shape[-2:], dtype=torch.bool, device=pairs.device).triu(1)
    pairs = pairs.masked_fill(later, -torch.inf)
    scale = pairs.detach().amax(dim=-1, keepdim=True)
    return Sums((pairs - scale).exp() @ values, scale)


def weak_chunk_gradients(
    queries: Tensor, keys: Tensor, values: Tensor, g: Tensor, logarithm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the exponents of queries and of keys, and of the values, from the pairs of some chunks.

    Args:
        queries: Exponents [some group size features].
        keys: Exponents [some size features].
        values: Values and ones [some size value_dim+1].
        g: [g, −δ], [some group size value_dim+1].
        logarithm: L, [some group size 1].
    """
    size = queries.shape[-2]
    exponents, g = _blocks(_padded(queries - logarithm, -torch.inf)), _blocks(_padded(g, 0.0))
    keys, values = _padded(keys, -torch.inf), _padded(values, 0.0).unsqueeze(1)
    by_pairs = _of_pairs(exponents, _blocks(keys.unsqueeze(1)), _blocks(values), g)
    by_earlier = _of_earlier(exponents, _earlier(keys), values.unsqueeze(2), g)
    by_query, *of_keys = (x.flatten(2, 3) for x in by_pairs)
    by_query = by_query + by_earlier[0].flatten(2, 3)
    by_key, by_value = (
        x.sum(dim=1) + y.sum(dim=(1, 2)) for x, y in zip(of_keys, by_earlier[1:], strict=True)
    )
    return by_query[..., :size, :], by_key[..., :size, :], by_value[..., :size, :]


def _of_pairs(exponents: Tensor, keys: Tensor, values: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients from the pairs of a block."""
    powers = (exponents.unsqueeze(-2) + keys.unsqueeze(-3)).exp()
    visible = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool, device=powers.device).tril().unsqueeze(-1)
    powers = torch.where(visible, powers, 0.0)
    grads = powers * (g @ values.mT).unsqueeze(-1)
    return grads.sum(dim=-2), grads.sum(dim=-3), powers.sum(dim=-1).mT @ g[..., :-1]


def _of_earlier(exponents: Tensor, keys: Tensor, values: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients from the rows of a block and the keys of earlier blocks."""
    reference = floor(keys.amax(dim=-2, keepdim=True))
    weights, features = (exponents + reference).exp(), (keys - reference).exp()
    grad_scores = g @ values.mT
    return (
        weights * (grad_scores @ features),
        features * (grad_scores.mT @ weights),
        (weights @ features.mT).mT @ g[..., :-1],
    )
