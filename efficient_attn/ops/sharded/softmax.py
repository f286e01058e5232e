"""Softmax attention of the tokens of a rank to keys of other ranks: to all keys, or to neighbouring keys."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.sharded.exchange import all_tokens, moved
from efficient_attn.ops.sharded.layout import Layout
from efficient_attn.ops.softmax.kv_cache import KVCache, last_tokens, mask_of, summarise_tokens
from efficient_attn.ops.window.global_keys import AgedKeys, first_keys, tokens_at

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def all_keys_attention(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout, *, causal: bool
) -> Tensor:
    """Attention to the keys of all ranks; bytes and memory grow with the length of the whole sequence.

    Args:
        attend: Function of (q, k, v, key_mask); causal queries are the last positions of the keys.
    """
    k, v, key_mask = all_keys(k, v, key_mask, layout)
    return attention_of_segments(attend, q, k, v, key_mask, layout, causal=causal)


def extend_all_keys(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> tuple[Tensor, KVCache]:
    """Causal attention to the keys of all ranks, and the cache of them all on every rank."""
    cache = summarise_tokens(*all_keys(k, v, key_mask, layout))
    out = attention_of_segments(attend, q, cache.k, cache.v, mask_of(cache), layout, causal=True)
    return out, cache


def last_keys(k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout, *, tokens: int) -> KVCache:
    """The cache of the last `tokens` keys of all ranks, on every rank; earlier keys are not sent."""
    parts = layout.parts(k.shape[-2])
    # The ends of the segments include the end of the sequence, and no rank exchanges an empty tensor.
    ends = [slice(max(part.start, part.stop - max(tokens, 1)), part.stop) for part in parts]
    k, v = (torch.cat([x[..., end, :] for end in ends], dim=-2) for x in (k, v))
    mask = None if key_mask is None else torch.cat([key_mask[:, end] for end in ends], dim=1)
    return last_tokens(summarise_tokens(*all_keys(k, v, mask, layout)), tokens)


def all_keys(
    k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and key mask of all ranks."""
    k, v = all_tokens(torch.cat([k, v], dim=-1), -2, layout).split([k.shape[-1], v.shape[-1]], dim=-1)
    return k, v, None if key_mask is None else all_tokens(key_mask.byte(), 1, layout).bool()


def attention_of_segments(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout, *, causal: bool
) -> Tensor:
    """Attention of the queries of this rank to all keys, with the arguments of `all_keys_attention`."""
    if not causal:
        return attend(q, k, v, key_mask)
    places = zip(layout.parts(q.shape[-2]), layout.positions(q.shape[-2]), strict=True)
    rows = [
        attend(
            q[..., part, :],
            k[..., : found.stop, :],
            v[..., : found.stop, :],
            None if key_mask is None else key_mask[:, : found.stop],
        )
        for part, found in places
    ]
    return torch.cat(rows, dim=-2)


def near_keys_attention(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, AgedKeys | None], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    layout: Layout,
    *,
    back: int,
    ahead: int,
    first: AgedKeys | None = None,
) -> Tensor:
    """Attention to the keys i−back … i+ahead and global keys; only keys that other ranks need are sent.

    Args:
        attend: Function of (q, k, v, key_mask, first); the queries are the last positions of the keys.
        first: Global keys of all ranks, aged from the end of the sequence.
    """
    end = q.shape[-2] * layout.ranks
    both = with_neighbours(torch.cat([k, v], dim=-1), back, ahead, layout)
    masks: list[Tensor | None] = [None] * len(both)
    if key_mask is not None:
        real = with_neighbours(key_mask[:, None, :, None].to(k.dtype), back, ahead, layout)
        masks = [x[:, 0, :, 0] > 0 for x in real]
    rows = []
    for part, found, keys, mask in zip(
        layout.parts(q.shape[-2]), layout.positions(q.shape[-2]), both, masks, strict=True
    ):
        after = keys.shape[-2] - len(found) - min(back, found.start)
        # Empty queries at the positions of later keys make the queries the last positions.
        queries = F.pad(q[..., part, :], (0, 0, 0, after))
        near_first = None
        if first is not None:
            near_first = first._replace(age=first.age - (end - found.stop - after))
            # An empty piece keeps the exchange in the graph of a rank whose windows have all global keys.
            keys = torch.cat([keys, torch.cat([first.k, first.v], dim=-1)[:, :, :0]], dim=2)
        near_k, near_v = keys.split([k.shape[-1], v.shape[-1]], dim=-1)
        rows.append(attend(queries, near_k, near_v, mask, near_first)[..., : len(found), :])
    return torch.cat(rows, dim=-2)


def first_keys_of_all(
    k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout, *, count: int
) -> AgedKeys:
    """The first `count` real keys of all ranks, aged from the end of the sequence."""
    tokens = k.shape[-2]
    real = k.new_ones(len(k), tokens, dtype=torch.bool) if key_mask is None else key_mask
    parts = []
    for part, own in zip(layout.parts(tokens), layout.positions(tokens), strict=True):
        keys = first_keys(k[..., part, :], v[..., part, :], real[:, part], count)
        # The segments of other ranks follow; an absent key stays absent.
        parts.append(keys._replace(age=keys.age + tokens * layout.ranks - own.stop))
    both = all_tokens(torch.cat([torch.cat([x.k, x.v], dim=-1) for x in parts], dim=2), -2, layout)
    age = all_tokens(torch.cat([x.age for x in parts], dim=1), 1, layout)
    age, place = age.topk(min(count, age.shape[1]), dim=1)
    keys, values = tokens_at(both, place).split([k.shape[-1], v.shape[-1]], dim=-1)
    return AgedKeys(keys, values, age)


def with_neighbours(x: Tensor, back: int, ahead: int, layout: Layout) -> list[Tensor]:
    """Each own segment of x [batch heads tokens dim] with `back` tokens before it and `ahead` after it.

    Positions outside the sequence are left out.
    """
    tokens, ranks = x.shape[-2], range(layout.ranks)
    parts, positions = layout.parts(tokens), layout.positions(tokens)
    wanted = [_runs(layout, layout.rank, rank, tokens, back, ahead) for rank in ranks]
    asked = [_runs(layout, rank, layout.rank, tokens, back, ahead) for rank in ranks]
    rows = x.movedim(-2, 0)
    local = [_local(run, parts, positions) for runs in asked for run in runs]
    found = moved(
        torch.cat([rows[:0], *(rows[part] for part in local)]),
        [sum(len(run.positions) for run in runs) for runs in asked],
        [sum(len(run.positions) for run in runs) for runs in wanted],
        layout,
    )
    received = [run for runs in wanted for run in runs]
    pieces = list(zip(received, found.split([len(run.positions) for run in received]), strict=True))
    pieces.sort(key=lambda piece: piece[0].positions.start)
    whole = []
    for number, (part, own) in enumerate(zip(parts, positions, strict=True)):
        near = [(run.positions, piece) for run, piece in pieces if run.segment == number]
        before = [piece for run, piece in near if run.stop <= own.start]
        after = [piece for run, piece in near if run.start >= own.stop]
        # An empty piece keeps the exchange in the graph of a rank that receives nothing.
        whole.append(torch.cat([found[:0], *before, rows[part], *after]).movedim(0, -2))
    return whole


class Run(NamedTuple):
    """Consecutive positions that one rank needs of another.

    Attributes:
        segment: Index of the segment that needs them, among the segments of its rank.
        positions: Positions in the sequence.
    """

    segment: int
    positions: range


def _runs(layout: Layout, reader: int, owner: int, tokens: int, back: int, ahead: int) -> list[Run]:
    """Tokens of `owner` that `reader` needs, in an order that both know."""
    end = tokens * layout.ranks
    found = []
    for segment, own in enumerate(layout._replace(rank=reader).positions(tokens)):
        before = range(max(own.start - back, 0), own.start)
        after = range(own.stop, min(own.stop + ahead, end))
        for held in layout._replace(rank=owner).positions(tokens):
            for want in (before, after):
                run = range(max(want.start, held.start), min(want.stop, held.stop))
                if run:
                    found.append(Run(segment, run))
    return found


def _local(run: Run, parts: list[slice], positions: list[range]) -> slice:
    """Place of the run in the tokens of the rank that holds it."""
    part, held = next(one for one in zip(parts, positions, strict=True) if run.positions.start in one[1])
    shift = part.start - held.start
    return slice(run.positions.start + shift, run.positions.stop + shift)
