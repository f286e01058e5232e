"""Attention of a rank's tokens to all keys, gathered on every rank."""

from functools import partial

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.distributed.exchange import all_tokens, total
from efficient_attn.distributed.layout import Layout
from efficient_attn.ops.alignment import alike
from efficient_attn.ops.softmax.kv_cache import KVCache, mask_of, summarise_tokens


def attend_keys(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> Tensor:
    """Attention by a core of (q, k, v, key_mask). Causal queries are the last positions of the keys."""
    return _segments(backend, q, *all_keys(k, v, key_mask, layout), layout)


def prefill_keys(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> tuple[Tensor, KVCache]:
    """Causal attention as in `attend_keys`, and the cache of all keys on every rank."""
    cache = summarise_tokens(*all_keys(k, v, key_mask, layout))
    return _segments(backend, q, cache.k, cache.v, mask_of(cache), layout), cache


def attend_clusters(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> Tensor:
    """Attention to near keys and clusters.

    Every rank computes the same clusters as a single process, and the rows of its own queries. The core takes
    the positions of the queries, as consecutive ranges, and a sum over ranks for the moments of all queries.
    The first key is real unless all keys are masked.
    """
    k, v, key_mask = all_keys(k, v, key_mask, layout)
    attend = partial(backend.core, total=partial(total, layout=layout))
    positions = layout.positions(q.shape[2])
    if key_mask is None:
        return attend(q, k, v, None, positions)
    outs = []
    for rows, start in alike(key_mask):
        # Tokens before the first real one come last, as in one process.
        keys, values = (x[rows].roll(-start, dims=2) for x in (k, v))
        real = key_mask[rows].roll(-start, dims=1)
        outs.append(attend(q[rows], keys, values, real, _turned(positions, start, k.shape[2])))
    return torch.cat(outs)


def all_keys(
    k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> tuple[Tensor, Tensor, Tensor | None]:
    k, v = all_tokens(torch.cat([k, v], dim=-1), -2, layout).split([k.shape[-1], v.shape[-1]], dim=-1)
    return k, v, None if key_mask is None else all_tokens(key_mask, 1, layout)


def _segments(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> Tensor:
    if not backend.problem.causal:
        return backend.core(q, k, v, key_mask)
    rows = []
    for part, positions in zip(layout.parts(q.shape[-2]), layout.positions(q.shape[-2]), strict=True):
        past = slice(positions.stop)
        mask = None if key_mask is None else key_mask[:, past]
        rows.append(backend.core(q[..., part, :], k[..., past, :], v[..., past, :], mask))
    return torch.cat(rows, dim=-2)


def _turned(positions: list[range], start: int, tokens: int) -> list[range]:
    """Positions after the first `start` tokens of the sequence have moved to its end."""
    turned = []
    for part in positions:
        cut = min(max(start, part.start), part.stop)
        turned.append(range(part.start + tokens - start, cut + tokens - start))
        turned.append(range(cut - start, part.stop - start))
    return [part for part in turned if part]
