"""Attention of the tokens of a rank to a window of keys, on this rank and on neighbours."""

from typing import NamedTuple

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
    """Attention to a window and global keys. Only keys that other ranks need are sent.

    The core has `attend(q, k, v, key_mask, first)`; the queries are the last positions of the keys, and
    `first` are the global keys of all ranks, aged from the end of the sequence.
    """
    first = _first_keys_of_all(backend, k, v, key_mask, layout)
    back, ahead = backend.options.sides(causal=backend.problem.causal)
    end, widths = q.shape[-2] * layout.ranks, [k.shape[-1], v.shape[-1]]
    segments = with_neighbours(torch.cat([k, v], dim=-1), back, ahead, layout)
    masks: list[Tensor | None] = [None] * len(segments)
    if key_mask is not None:
        real = with_neighbours(key_mask[:, None, :, None].to(k.dtype), back, ahead, layout)
        masks = [x[:, 0, :, 0] > 0 for x in real]
    rows = []
    for part, positions, keys, mask in zip(
        layout.parts(q.shape[-2]), layout.positions(q.shape[-2]), segments, masks, strict=True
    ):
        after = keys.shape[-2] - len(positions) - min(back, positions.start)
        # Empty queries at the positions of later keys make the queries the last positions.
        queries = F.pad(q[..., part, :], (0, 0, 0, after))
        near_first = None
        if first is not None:
            near_first = first._replace(age=first.age - (end - positions.stop - after))
            # An empty piece keeps the exchange in the graph of a rank whose windows have all global keys.
            keys = torch.cat([keys, torch.cat([first.k, first.v], dim=-1)[:, :, :0]], dim=2)
        out = backend.core.attend(queries, *keys.split(widths, dim=-1), mask, near_first)
        rows.append(out[..., : len(positions), :])
    return torch.cat(rows, dim=-2)


def prefill_neighbours(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> tuple[Tensor, KVCache | WindowState]:
    """Causal attention as in `attend_neighbours`, and the state after the tokens of all ranks."""
    out = attend_neighbours(backend, q, k, v, key_mask, layout)
    back, _ = backend.options.sides(causal=True)
    parts, tokens = layout.parts(k.shape[-2]), layout.ranks * k.shape[2]
    # The ends of the segments include the end of the sequence, and no rank exchanges an empty tensor.
    ends = [slice(max(part.start, part.stop - max(back, 1)), part.stop) for part in parts]
    last_k, last_v = (torch.cat([x[..., end, :] for end in ends], dim=-2) for x in (k, v))
    mask = None if key_mask is None else torch.cat([key_mask[:, end] for end in ends], dim=1)
    cache = last_tokens(summarise_tokens(*all_keys(last_k, last_v, mask, layout)), back)
    first = _first_keys_of_all(backend, k, v, key_mask, layout)
    return out, cache if first is None else state_of(cache, first, tokens=tokens)


def _first_keys_of_all(
    backend: Backend, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> AgedKeys | None:
    """The global keys of all ranks, aged from the end of the sequence, or None without global tokens."""
    count, tokens = backend.options.global_tokens, k.shape[-2]
    if not count:
        return None
    real = k.new_ones(len(k), tokens, dtype=torch.bool) if key_mask is None else key_mask
    parts = []
    for part, positions in zip(layout.parts(tokens), layout.positions(tokens), strict=True):
        keys = first_keys(k[..., part, :], v[..., part, :], real[:, part], count)
        # The segments of other ranks follow; an absent key stays absent.
        parts.append(keys._replace(age=keys.age + tokens * layout.ranks - positions.stop))
    rows = all_tokens(torch.cat([torch.cat([x.k, x.v], dim=-1) for x in parts], dim=2), -2, layout)
    age = all_tokens(torch.cat([x.age for x in parts], dim=1), 1, layout)
    age, place = age.topk(min(count, age.shape[1]), dim=1)
    keys, values = tokens_at(rows, place).split([k.shape[-1], v.shape[-1]], dim=-1)
    return AgedKeys(keys, values, age)


def with_neighbours(x: Tensor, back: int, ahead: int, layout: Layout) -> list[Tensor]:
    """Each local segment of x [batch heads tokens dim] with `back` tokens before it and `ahead` after it.

    Positions outside the sequence are left out.
    """
    tokens, ranks = x.shape[-2], range(layout.ranks)
    parts, positions = layout.parts(tokens), layout.positions(tokens)
    needed = [_runs(layout, layout.rank, rank, tokens, back, ahead) for rank in ranks]
    sent = [_runs(layout, rank, layout.rank, tokens, back, ahead) for rank in ranks]
    rows = x.movedim(-2, 0)
    received = moved(
        torch.cat([rows[:0], *(rows[run.place] for runs in sent for run in runs)]),
        [sum(len(run.positions) for run in runs) for runs in sent],
        [sum(len(run.positions) for run in runs) for runs in needed],
        layout,
    )
    runs = [run for runs in needed for run in runs]
    pieces = list(zip(runs, received.split([len(run.positions) for run in runs]), strict=True))
    pieces.sort(key=lambda piece: piece[0].positions.start)
    whole = []
    for number, (part, segment) in enumerate(zip(parts, positions, strict=True)):
        near = [(run.positions, piece) for run, piece in pieces if run.segment == number]
        before = [piece for run, piece in near if run.stop <= segment.start]
        after = [piece for run, piece in near if run.start >= segment.stop]
        # An empty piece keeps the exchange in the graph of a rank that receives nothing.
        whole.append(torch.cat([received[:0], *before, rows[part], *after]).movedim(0, -2))
    return whole


class _Run(NamedTuple):
    """Consecutive positions that one rank needs from another.

    Attributes:
        segment: Index of the segment that needs them, among the segments of its rank.
        positions: Positions in the sequence.
        place: Place in the tokens of the rank that holds them.
    """

    segment: int
    positions: range
    place: slice


def _runs(layout: Layout, reader: int, owner: int, tokens: int, back: int, ahead: int) -> list[_Run]:
    """Tokens of `owner` that `reader` needs, in the same order on both ranks."""
    end = tokens * layout.ranks
    runs = []
    for segment, near in enumerate(layout._replace(rank=reader).positions(tokens)):
        before = range(max(near.start - back, 0), near.start)
        after = range(near.stop, min(near.stop + ahead, end))
        owned_positions = layout._replace(rank=owner).positions(tokens)
        for part, owned in zip(layout.parts(tokens), owned_positions, strict=True):
            for side in (before, after):
                run = range(max(side.start, owned.start), min(side.stop, owned.stop))
                shift = part.start - owned.start
                if run:
                    runs.append(_Run(segment, run, slice(run.start + shift, run.stop + shift)))
    return runs
