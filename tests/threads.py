"""Sequences for ranks that are threads of one process."""

import torch
from torch import Tensor

from efficient_attn.ops.sharded.layout import Layout


def join(found: list[Tensor], kind: str, dim: int) -> Tensor:
    """The whole sequence, from the tokens of all ranks."""
    placed = Layout(None, kind, 0, len(found))
    segments = [part for x in found for part in x.chunk(len(placed.own), dim)]
    return torch.cat([segments[place] for place in placed.order], dim)


def drawn(tokens: int) -> list[Tensor]:
    """q, k, v and a gradient; q and k are short, so that no signed denominator is small."""
    shapes = ((4, 8, 0.3), (2, 8, 0.3), (2, 6, 1.0), (4, 6, 1.0))
    return [norm * torch.randn(2, heads, tokens, dim, dtype=torch.float64) for heads, dim, norm in shapes]
