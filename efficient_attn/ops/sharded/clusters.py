"""Attention of the queries of a rank to near keys and clusters of the keys of all ranks.

Every rank receives all keys and values, so that all ranks have the clusters of one process, and computes the
rows of its own queries alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from efficient_attn.ops.clusters.slices import alike
from efficient_attn.ops.sharded.layout import Layout


def own_rows(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    layout: Layout,
    *,
    causal: bool,
) -> Tensor:
    """Outputs of the queries of this rank, [batch heads q_tokens value_dim].

    Args:
        k: Keys of all ranks; v and key_mask alike.
        attend: Function of (q, k, v, key_mask, positions), of which the last are the positions of consecutive
            queries; the first key is real where any is.
    """
    positions, tokens = layout.positions(q.shape[2]), k.shape[2]
    if key_mask is None:
        return attend(q, k, v, None, positions)
    place = torch.cat([torch.arange(one.start, one.stop, device=q.device) for one in positions])
    outs = []
    for rows, start in alike(key_mask):
        # Tokens before the first real one come last, as in one process.
        some_k, some_v = (x[rows].roll(-start, dims=2) for x in (k, v))
        real = key_mask[rows].roll(-start, dims=1)
        out = attend(q[rows], some_k, some_v, real, _turned(positions, start, tokens))
        outs.append(out.masked_fill((place < start)[:, None], 0.0) if causal else out)
    return torch.cat(outs)


def _turned(positions: list[range], start: int, tokens: int) -> list[range]:
    """Positions after the first `start` of all tokens were moved to the end."""
    found = []
    for one in positions:
        cut = min(max(start, one.start), one.stop)
        found += [
            range(one.start + tokens - start, cut + tokens - start),
            range(cut - start, one.stop - start),
        ]
    return [one for one in found if one]
