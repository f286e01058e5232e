"""Gradients from the pairs of weak chunks, by the halves and blocks of the forward pass.

With L_t the logarithm of a row's denominator, every power e^(a_tf + u_jf − L_t) of a visible pair is at most
1. Keys and rows of two halves are relative to the largest keys, m: e^(a_tf + m_f − L_t), e^(u_jf − m_f) ≤ 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.linear.segments.scaled import floor
from efficient_attn.ops.linear.segments.weak_chunks import (
    blocks,
    half_blocks,
    halves,
    spread,
    to_power_of_two,
)


class PairGradients(NamedTuple):
    """Gradients from the pairs of a query and a key of one chunk.

    Attributes:
        queries: Of the exponents of queries, [… group size features].
        keys: Of the exponents of keys, [… group|1 size features].
        values: Of the values, [… group|1 size value_dim].
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


def weak_chunk_gradients(
    queries: Tensor, keys: Tensor, values: Tensor, g: Tensor, logarithm: Tensor
) -> PairGradients:
    """Gradients of some chunks.

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
    total = _of_blocks(*(blocks(x) for x in (exponents, keys, values, g)))
    for half in halves(exponents.shape[-2]):
        rows = (half_blocks(x, half, 1) for x in (exponents, g))
        read = (half_blocks(x, half, 0) for x in (keys, values))
        found = _of_earlier(*rows, *read)
        spread_out = zip(found, (1, 0, 0), strict=True)
        total = PairGradients(*(one + spread(x, at) for one, (x, at) in zip(total, spread_out, strict=True)))
    return PairGradients(
        total.queries[..., :size, :], *(x[..., :size, :].sum(dim=1) for x in (total.keys, total.values))
    )


def _of_blocks(exponents: Tensor, keys: Tensor, values: Tensor, g: Tensor) -> PairGradients:
    """Gradients from the pairs of the smallest blocks."""
    tokens = exponents.shape[-2]
    powers = (exponents.unsqueeze(-2) + keys.unsqueeze(-3)).exp()
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=powers.device).tril().unsqueeze(-1)
    powers = torch.where(visible, powers, 0.0)
    grads = powers * (g @ values.mT).unsqueeze(-1)
    found = grads.sum(dim=-2), grads.sum(dim=-3), powers.sum(dim=-1).mT @ g[..., :-1]
    return PairGradients(*(x.flatten(-3, -2) for x in found))


def _of_earlier(exponents: Tensor, g: Tensor, keys: Tensor, values: Tensor) -> PairGradients:
    """Gradients from rows and keys that every row sees."""
    reference = floor(keys.amax(dim=-2, keepdim=True))
    weights, features = (exponents + reference).exp(), (keys - reference).exp()
    grad_scores = g @ values.mT
    return PairGradients(
        weights * (grad_scores @ features),
        features * (grad_scores.mT @ weights),
        (weights @ features.mT).mT @ g[..., :-1],
    )
