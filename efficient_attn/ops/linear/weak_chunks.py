"""Chunks with weak rows, computed again by halves.

A row is weak if its features are small wherever the features of all its visible keys are large: their
products leave the range of floats. The rows of the later half of its chunk read the keys of the earlier half,
all visible to them, relative to these keys alone. Each half is halved in turn, and the pairs of the smallest
blocks are computed one by one.

On the CPU all weak chunks are computed again. Other devices are not asked how many there are: a fixed number
is computed again, chunks with the most weak rows first. Other weak rows lose digits, or their chunk's part.

The backward pass has the same halves and blocks. With L_t the logarithm of a row's denominator, every power
e^(a_tf + u_jf − L_t) of a visible pair is at most 1. Keys and rows of two halves are relative to the largest
keys, m: e^(a_tf + m_f − L_t), e^(u_jf − m_f) ≤ 1.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.linear.scaled_chunks import UNSEEN, floor
from efficient_attn.ops.paths import tuned_for_cpu

# Logarithms of sums, at the scale of their chunk, below which products may have left the range of floats.
_WEAK = {torch.float32: -60.0, torch.float64: -600.0}
# Features of the chunks that are computed again, or the share of chunks, whichever is more.
FEATURES, _SHARE = 2**22, 32
# Tokens of the smallest blocks.
BLOCK = 8


class ScaledSums(NamedTuple):
    """Sums over keys, e^scale · sums.

    Attributes:
        sums: Σ_j weight_tj [v_j, 1], [flat_heads chunks rows value_dim+1].
        scale: [flat_heads chunks rows|1 1]; −inf: no key.
    """

    sums: Tensor
    scale: Tensor


def weak(log_total: Tensor) -> Tensor:
    """Whether a row is weak, from the logarithm of its sum at the scale of its chunk. NaN gives False."""
    return log_total < _WEAK[log_total.dtype]


def read_weak_chunks(
    here: ScaledSums, log_total: Tensor, queries: Tensor, keys: Tensor, values: Tensor
) -> ScaledSums:
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
        here = ScaledSums(*(put_chunks(x, chunks, y) for x, y in zip(here, again, strict=True)))
    return here


def weak_chunks(rows: Tensor, features: int) -> Iterator[Tensor]:
    """Batches of indices of weak chunks, among all chunks of all heads."""
    number = rows.flatten(2).sum(dim=-1).flatten()
    chunks = number.numel()
    capacity = min(max(FEATURES // (rows.shape[2] * features), chunks // _SHARE, 1), chunks)
    if tuned_for_cpu(rows):
        yield from filter(len, number.nonzero().flatten().split(capacity))
    else:
        yield number.topk(capacity).indices


def chunk_rows(x: Tensor, chunks: Tensor, size: int) -> Tensor:
    """Query-side rows [flat_heads chunks group·size dim] of some chunks, [some group size dim]."""
    return x.flatten(0, 1)[chunks].unflatten(1, (-1, size))


def put_chunks(whole: Tensor, chunks: Tensor, replaced: Tensor) -> Tensor:
    """Replace these chunks of `whole` [flat_heads chunks rows dim]."""
    replaced = replaced.reshape(len(chunks), *whole.shape[2:])
    return whole.flatten(0, 1).index_put((chunks,), replaced).view(whole.shape)


def to_power_of_two(x: Tensor, fill: float) -> Tensor:
    """Rows [… size dim] padded to a power of two."""
    size = x.shape[-2]
    return F.pad(x, (0, 0, 0, (1 << (size - 1).bit_length()) - size), value=fill)


def blocks(x: Tensor) -> Tensor:
    """[… size dim] as the smallest blocks [… blocks tokens dim]."""
    return x.unflatten(-2, (-1, min(BLOCK, x.shape[-2])))


def halves(size: int) -> Iterator[int]:
    """Sizes of the halves into which a chunk is divided, down to the smallest blocks."""
    half = BLOCK
    while 2 * half <= size:
        yield half
        half *= 2


def half_blocks(x: Tensor, half: int, number: int) -> Tensor:
    """The first (0) or second (1) halves of blocks, [… size dim] as [… blocks half dim]."""
    return x.unflatten(-2, (-1, 2, half))[..., number, :, :]


def spread(x: Tensor, number: int, fill: float = 0.0) -> Tensor:
    """Inverse of `half_blocks`, with a fill in the other halves."""
    return F.pad(x.unsqueeze(-3), (0, 0, 0, 0, number, 1 - number), value=fill).flatten(-4, -2)


def _read(queries: Tensor, keys: Tensor, values: Tensor) -> ScaledSums:
    """Sums of [some group size features] over [some size features], and values [some size value_dim+1]."""
    size = queries.shape[-2]
    # Finite exponents of masked keys have finite gradients.
    queries, keys = to_power_of_two(queries, 0.0), floor(to_power_of_two(keys, -torch.inf)).unsqueeze(1)
    values = to_power_of_two(values, 0.0).unsqueeze(1)
    parts = [_read_blocks(blocks(queries), blocks(keys), blocks(values))]
    for half in halves(queries.shape[-2]):
        part = _read_earlier(
            half_blocks(queries, half, 1), half_blocks(keys, half, 0), half_blocks(values, half, 0)
        )
        parts.append(ScaledSums(spread(part.sums, 1), spread(part.scale, 1, UNSEEN)))
    sums, scales = (torch.stack(x) for x in zip(*parts, strict=True))
    scale = scales.amax(dim=0)
    total = ((scales - scale).exp() * sums).sum(dim=0)
    return ScaledSums(total[..., :size, :], scale[..., :size, :])


def _read_blocks(queries: Tensor, keys: Tensor, values: Tensor) -> ScaledSums:
    """Sums over the keys of the same block up to each row's own, from the exponents of every pair."""
    pairs = (queries.unsqueeze(-2) + keys.unsqueeze(-3)).logsumexp(dim=-1)
    later = torch.ones(pairs.shape[-2:], dtype=torch.bool, device=pairs.device).triu(1)
    pairs = pairs.masked_fill(later, -torch.inf)
    scale = pairs.detach().amax(dim=-1, keepdim=True)
    sums = (pairs - scale).exp() @ values
    return ScaledSums(sums.flatten(-3, -2), scale.flatten(-3, -2))


def _read_earlier(queries: Tensor, keys: Tensor, values: Tensor) -> ScaledSums:
    """Sums over keys that every row sees."""
    reference = keys.detach().amax(dim=-2, keepdim=True)
    exponents = queries + reference
    scale = exponents.detach().amax(dim=-1, keepdim=True)
    scores = (exponents - scale).exp() @ (keys - reference).exp().mT
    return ScaledSums(scores @ values, scale)


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
    exponents, g = to_power_of_two(queries - logarithm, -torch.inf), to_power_of_two(g, 0.0)
    keys = to_power_of_two(keys, -torch.inf).unsqueeze(1)
    values = to_power_of_two(values, 0.0).unsqueeze(1)
    total = list(_of_blocks(*(blocks(x) for x in (exponents, keys, values, g))))
    for half in halves(exponents.shape[-2]):
        rows = (half_blocks(x, half, 1) for x in (exponents, g))
        read = (half_blocks(x, half, 0) for x in (keys, values))
        earlier = zip(_of_earlier(*rows, *read), (1, 0, 0), strict=True)
        total = [x + spread(y, side) for x, (y, side) in zip(total, earlier, strict=True)]
    by_query, by_key, by_value = (x[..., :size, :] for x in total)
    return by_query, by_key.sum(dim=1), by_value.sum(dim=1)


def _of_blocks(exponents: Tensor, keys: Tensor, values: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Gradients from the pairs of the smallest blocks."""
    tokens = exponents.shape[-2]
    powers = (exponents.unsqueeze(-2) + keys.unsqueeze(-3)).exp()
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=powers.device).tril().unsqueeze(-1)
    powers = torch.where(visible, powers, 0.0)
    grads = powers * (g @ values.mT).unsqueeze(-1)
    gradients = grads.sum(dim=-2), grads.sum(dim=-3), powers.sum(dim=-1).mT @ g[..., :-1]
    return tuple(x.flatten(-3, -2) for x in gradients)


def _of_earlier(exponents: Tensor, g: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Gradients from rows and keys that every row sees."""
    reference = floor(keys.amax(dim=-2, keepdim=True))
    weights, features = (exponents + reference).exp(), (keys - reference).exp()
    grad_scores = g @ values.mT
    return (
        weights * (grad_scores @ features),
        features * (grad_scores.mT @ weights),
        (weights @ features.mT).mT @ g[..., :-1],
    )
