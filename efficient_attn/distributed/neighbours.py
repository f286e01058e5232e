"""Attention of the tokens of a rank to a window of keys, on this rank and on neighbours."""

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.distributed.exchange import all_tokens, moved
from efficient_attn.distributed.keys import all_keys
from efficient_attn.distributed.layout import Layout
from efficient_attn.ops.softmax.kv_cache import KVCache, last_tokens, summarise_tokens
from efficient_attn.ops.window.global_keys import AgedKeys, first_keys, tokens_at
from efficient_attn.ops.window.streaming import WindowState, state_of


def attend_neighbours(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> Tensor:
    """Attention to a window and global keys; only keys that other ranks need are sent.

    The core has `attend(q, k, v, key_mask, first)`; the queries are the last positions of the keys, and
    `first` are the global keys of all ranks, aged from the end of the sequence.
    """
    first = _first_keys_of_all(backend, k, v, key_mask, layout)
    back, ahead = backend.options.sides(causal=backend.problem.causal)
    positions, widths = layout.positions(q.shape[-2]), [k.shape[-1], v.shape[-1]]
    keys, mask = with_neighbours(torch.cat([k, v], dim=-1), back, ahead, layout), None
    if key_mask is not None:
        real = with_neighbours(key_mask[:, None, :, None].to(k.dtype), back, ahead, layout)
        mask = real[:, 0, :, 0] > 0
    after = keys.shape[-2] - len(positions) - min(back, positions.start)
    # Empty queries at the positions of later keys make the queries the last positions.
    queries = F.pad(q, (0, 0, 0, after))
    if first is not None:
        # An empty piece keeps the exchange in the graph of a rank whose windows have all global keys.
        keys = torch.cat([keys, torch.cat([first.k, first.v], dim=-1)[:, :, :0]], dim=2)
        later = len(positions) * layout.ranks - positions.stop - after
        first = first._replace(age=first.age - later)
    out = backend.core.attend(queries, *keys.split(widths, dim=-1), mask, first)
    return out[..., : len(positions), :]


def prefill_neighbours(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> tuple[Tensor, KVCache | WindowState]:
    """Causal attention as in `attend_neighbours`, and the state after the tokens of all ranks."""
    out = attend_neighbours(backend, q, k, v, key_mask, layout)
    back, _ = backend.options.sides(causal=True)
    cache = _last_keys(k, v, key_mask, layout, tokens=back)
    first = _first_keys_of_all(backend, k, v, key_mask, layout)
    return out, cache if first is None else state_of(cache, first, tokens=layout.ranks * k.shape[2])


def _last_keys(k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout, *, tokens: int) -> KVCache:
    """The cache of the last `tokens` keys of all ranks, on every rank; earlier keys are not sent."""
    # No rank exchanges an empty tensor.
    end = slice(max(k.shape[-2] - max(tokens, 1), 0), None)
    mask = None if key_mask is None else key_mask[:, end]
    return last_tokens(summarise_tokens(*all_keys(k[..., end, :], v[..., end, :], mask, layout)), tokens)


def _first_keys_of_all(
    backend: Backend, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> AgedKeys | None:
    """The global keys of all ranks, aged from the end of the sequence; None without global tokens."""
    count, tokens = backend.options.global_tokens, k.shape[-2]
    if not count:
        return None
    real = k.new_ones(len(k), tokens, dtype=torch.bool) if key_mask is None else key_mask
    keys = first_keys(k, v, real, count)
    # The tokens of later ranks follow; an absent key stays absent.
    age = keys.age + tokens * layout.ranks - layout.positions(tokens).stop
    rows = all_tokens(torch.cat([keys.k, keys.v], dim=-1), -2, layout)
    age = all_tokens(age, 1, layout)
    age, place = age.topk(min(count, age.shape[1]), dim=1)
    first_k, first_v = tokens_at(rows, place).split([k.shape[-1], v.shape[-1]], dim=-1)
    return AgedKeys(first_k, first_v, age)


def with_neighbours(x: Tensor, back: int, ahead: int, layout: Layout) -> Tensor:
    """The tokens of x [batch heads tokens dim], with `back` tokens before them and `ahead` after them.

    Positions outside the sequence are left out.
    """
    parts = [layout._replace(rank=rank).positions(x.shape[-2]) for rank in range(layout.ranks)]
    local = parts[layout.rank]
    sent = [_needed(reader, local, back, ahead) for reader in parts]
    received = [len(_needed(local, holder, back, ahead)) for holder in parts]
    rows = x.movedim(-2, 0)
    near = moved(
        torch.cat([rows[run.start - local.start : run.stop - local.start] for run in sent]),
        [len(run) for run in sent],
        received,
        layout,
    )
    before = sum(received[: layout.rank])
    return torch.cat([near[:before], rows, near[before:]]).movedim(0, -2)


def _needed(reader: range, holder: range, back: int, ahead: int) -> range:
    """Positions of one rank that the window of another reaches."""
    if reader == holder:
        return range(holder.start, holder.start)
    start = max(reader.start - back, holder.start)
    return range(start, max(min(reader.stop + ahead, holder.stop), start))
