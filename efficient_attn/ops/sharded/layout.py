"""Layouts of a sequence over the ranks of a process group, and the layout in force."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

KINDS = ("contiguous", "head-tail")
# A gather brings every state to every rank; from more ranks a scan receives fewer.
MOST_GATHERED = 16


class Layout(NamedTuple):
    """Segments of equal length, numbered along the sequence, and the rank that holds each.

    A contiguous layout has one segment per rank; a head-tail layout has two, i and 2·ranks − 1 − i for rank
    i, so that all ranks have equally many causal pairs.

    Attributes:
        group: Name of the process group.
        kind: "contiguous" or "head-tail".
        rank: Rank of this process in the group.
        ranks: Number of ranks.
        per_node: Number of consecutive ranks on each node; 1 if unknown or unequal.
    """

    group: Any
    kind: str
    rank: int
    ranks: int
    per_node: int = 1

    @property
    def near(self) -> range:
        """Ranks that gather their states: the group, a node of it, or this one; scans pass states beyond."""
        gathered = next(n for n in (self.ranks, self.per_node, 1) if n <= MOST_GATHERED)
        first = self.rank // gathered * gathered
        return range(first, first + gathered)

    @property
    def num_segments(self) -> int:
        """Number of segments of the whole sequence."""
        return self.ranks * len(self.segments(0))

    def segments(self, rank: int) -> list[int]:
        """Segments of a rank, in the order in which it holds them."""
        return [rank] if self.kind == "contiguous" else [rank, 2 * self.ranks - 1 - rank]

    @property
    def own(self) -> list[int]:
        """Segments of this rank."""
        return self.segments(self.rank)

    @property
    def order(self) -> list[int]:
        """Place of each segment of the sequence in the segments of all ranks, rank by rank."""
        held = [segment for rank in range(self.ranks) for segment in self.segments(rank)]
        return sorted(range(len(held)), key=held.__getitem__)

    def parts(self, tokens: int) -> list[slice]:
        """Places of the own segments in the `tokens` of this rank."""
        step = tokens // len(self.own)
        return [slice(i * step, (i + 1) * step) for i in range(len(self.own))]

    def positions(self, tokens: int) -> list[range]:
        """Positions of the own segments in the sequence, for `tokens` of this rank."""
        step = tokens // len(self.own)
        return [range(segment * step, (segment + 1) * step) for segment in self.own]


def ranks_per_node(members: list[int], local_ranks: int) -> int:
    """Number of consecutive members of a group on each node; 1 if nodes have unequal numbers.

    Args:
        members: Global ranks of the group.
        local_ranks: Number of consecutive global ranks on each node, as torchrun numbers them.
    """
    found = {len(list(group)) for _, group in groupby(members, key=lambda rank: rank // local_ranks)}
    return found.pop() if len(found) == 1 else 1


def own_tokens(x: Tensor, dim: int, layout: Layout) -> Tensor:
    """A copy of the tokens of this rank along `dim`, out of a whole sequence of equal segments."""
    parts = x.chunk(layout.num_segments, dim) if x.shape[dim] else [x] * layout.num_segments
    return torch.cat([parts[segment] for segment in layout.own], dim).contiguous()


# A variable of the process, not of a thread: autograd recomputes checkpoints in threads of its own.
_IN_FORCE: list[Layout] = []


def layout_in_force() -> Layout | None:
    """The layout of the innermost `context_parallel`; None outside."""
    return _IN_FORCE[-1] if _IN_FORCE else None


@contextmanager
def in_force(layout: Layout) -> Iterator[Layout]:
    """Context in which tensors hold the tokens of this rank alone."""
    _IN_FORCE.append(layout)
    try:
        yield layout
    finally:
        _IN_FORCE.pop()


def whole_tokens(tokens: int) -> int:
    """Tokens of all ranks, where a layout is in force and this rank has `tokens`."""
    layout = layout_in_force()
    return tokens if layout is None else tokens * layout.ranks


def at_positions(apply: Callable[[Tensor, int], Tensor], x: Tensor, start: int) -> Tensor:
    """`apply(x, start)`, segment by segment from its own position where a layout is in force.

    Args:
        apply: Function of [… tokens dim] and the position of the first token.
    """
    layout = layout_in_force()
    if layout is None:
        return apply(x, start)
    tokens = x.shape[-2]
    places = zip(layout.parts(tokens), layout.positions(tokens), strict=True)
    return torch.cat([apply(x[..., part, :], start + found.start) for part, found in places], dim=-2)
