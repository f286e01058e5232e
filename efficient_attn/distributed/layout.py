"""Parts of a sequence on the ranks of a process group."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from efficient_attn.errors import ShapeError


class Layout(NamedTuple):
    """Consecutive parts of a sequence, of equal length, one per rank.

    Attributes:
        group: Name of the process group.
        rank: Rank of this process in the group.
        ranks: Number of ranks.
    """

    group: Any
    rank: int
    ranks: int

    def positions(self, tokens: int) -> range:
        """Positions of the `tokens` of this rank in the sequence."""
        return range(self.rank * tokens, (self.rank + 1) * tokens)


def layout_of(mesh: DeviceMesh) -> Layout:
    """The layout over the ranks of a mesh.

    Raises:
        ShapeError: If the mesh has several dimensions.
    """
    if mesh.ndim != 1:
        raise ShapeError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; the tokens are distributed over one: "
            'give mesh["cp"] for a dimension called cp.'
        )
    return Layout(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())


def local_tokens(x: Tensor, dim: int, layout: Layout) -> Tensor:
    """A copy of the tokens of this rank along `dim`, out of a whole sequence."""
    positions = layout.positions(x.shape[dim] // layout.ranks)
    return x.narrow(dim, positions.start, len(positions)).clone(memory_format=torch.contiguous_format)
