"""Ranks as threads of one process: `exchange` with collectives that wait at a barrier, for quick tests."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from efficient_attn.ops.sharded import exchange
from efficient_attn.ops.sharded.layout import Layout


class Meeting:
    """Exchange of values between the ranks of a group."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.shown = Barrier(ranks, timeout=60), [None] * ranks

    def swap(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks."""
        self.shown[rank] = value
        self.barrier.wait()
        found = list(self.shown)
        self.barrier.wait()
        return found


class Member(NamedTuple):
    """A rank of a group, and its name."""

    meeting: Meeting
    rank: int


def all_gather(rows: list[Tensor], x: Tensor, group: Member) -> None:
    for row, found in zip(rows, group.meeting.swap(group.rank, x.clone()), strict=True):
        row.copy_(found)


def all_reduce(x: Tensor, operation: ReduceOp, group: Member) -> None:
    every = torch.stack(group.meeting.swap(group.rank, x.clone()))
    x.copy_(every.amax(dim=0) if operation == ReduceOp.MAX else every.sum(dim=0))


def all_to_all_single(found: Tensor, x: Tensor, received: list[int], sent: list[int], group: Member) -> None:
    every = group.meeting.swap(group.rank, x.clone().split(sent))
    assert [len(pieces[group.rank]) for pieces in every] == received
    found.copy_(torch.cat([pieces[group.rank] for pieces in every]))


COLLECTIVES = SimpleNamespace(
    ReduceOp=ReduceOp, all_gather=all_gather, all_reduce=all_reduce, all_to_all_single=all_to_all_single
)


def cut(x: Tensor, placed: Layout, dim: int) -> Tensor:
    """The tokens of a rank."""
    parts = x.chunk(placed.num_segments, dim)
    return torch.cat([parts[segment] for segment in placed.own], dim)


def join(found: list[Tensor], kind: str, dim: int) -> Tensor:
    """The whole sequence, from the tokens of all ranks."""
    placed = Layout(None, kind, 0, len(found))
    segments = [part for x in found for part in x.chunk(len(placed.own), dim)]
    return torch.cat([segments[place] for place in placed.order], dim)


def drawn(tokens: int) -> list[Tensor]:
    """q, k, v and a gradient; q and k are short, so that no signed denominator is small."""
    shapes = ((4, 8, 0.3), (2, 8, 0.3), (2, 6, 1.0), (4, 6, 1.0))
    return [norm * torch.randn(2, heads, tokens, dim, dtype=torch.float64) for heads, dim, norm in shapes]


def on_ranks(
    monkeypatch: Any, ranks: int, kind: str, call: Callable[[Layout], Any], per_node: int = 1
) -> list[Any]:
    """Results of `call(layout)` on every rank."""
    monkeypatch.setattr(exchange, "dist", COLLECTIVES)
    monkeypatch.setattr(exchange, "_resolve_process_group", lambda member: member)
    meeting = Meeting(ranks)

    def one(rank: int) -> Any:
        try:
            return call(Layout(Member(meeting, rank), kind, rank, ranks, per_node))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(one, range(ranks)))
