"""Layouts of a sequence over the ranks of a process group."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from efficient_attn.errors import ShapeError
from efficient_attn.options import one_of

KINDS = ("contiguous", "head-tail")


class Layout(NamedTuple):
    """Segments of equal length, numbered along the sequence, and the rank that holds each.

    A contiguous layout has one segment per rank; a head-tail layout has two, i and 2·ranks − 1 − i for rank
    i, so that all ranks have equally many causal pairs.
    """

    group: Any
    kind: str
    rank: int
    ranks: int

    @property
    def num_segments(self) -> int:
        return self.ranks * len(self.segments(0))

    def segments(self, rank: int) -> list[int]:
        """Segments of a rank, in the order in which it holds them."""
        return [rank] if self.kind == "contiguous" else [rank, 2 * self.ranks - 1 - rank]

    @property
    def local(self) -> list[int]:
        return self.segments(self.rank)

    @property
    def order(self) -> list[int]:
        """Place of each segment of the sequence in the segments of all ranks, rank by rank."""
        segments = [segment for rank in range(self.ranks) for segment in self.segments(rank)]
        return sorted(range(len(segments)), key=segments.__getitem__)

    def parts(self, tokens: int) -> list[slice]:
        """Places of the local segments in the `tokens` of this rank."""
        step = tokens // len(self.local)
        return [slice(i * step, (i + 1) * step) for i in range(len(self.local))]

    def positions(self, tokens: int) -> list[range]:
        """Positions of the local segments in the sequence, for `tokens` of this rank."""
        step = tokens // len(self.local)
        return [range(segment * step, (segment + 1) * step) for segment in self.local]


def layout_of(mesh: DeviceMesh, kind: str) -> Layout:
    one_of("layout", kind, KINDS)
    if mesh.ndim != 1:
        raise ShapeError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; the tokens are distributed over one: "
            'give mesh["cp"] for a dimension called cp.'
        )
    return Layout(mesh.get_group().group_name, kind, mesh.get_local_rank(), mesh.size())


def local_tokens(x: Tensor, dim: int, layout: Layout) -> Tensor:
    """A copy of the tokens of this rank along `dim`, out of a whole sequence of equal segments."""
    parts = x.chunk(layout.num_segments, dim) if x.shape[dim] else [x] * layout.num_segments
    return torch.cat([parts[segment] for segment in layout.local], dim).contiguous()
