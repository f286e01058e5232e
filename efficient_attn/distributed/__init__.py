"""Sequences that are distributed over the processes of a device mesh (context parallelism).

Inside `context_parallel` every process holds the tokens of its own segments, and backends compute the rows
of these tokens of attention over the whole sequence. No tensor is resized and no function of torch replaced.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from efficient_attn.distributed.calls import in_force
from efficient_attn.distributed.exchange import all_tokens
from efficient_attn.distributed.layout import layout_of, local_tokens
from efficient_attn.errors import ShapeError

__all__ = ["context_parallel", "shard", "unshard"]


def context_parallel(mesh: DeviceMesh, *, layout: str = "contiguous") -> AbstractContextManager[None]:
    """Context in which backends attend to the tokens of all processes of a mesh.

    All processes make the same calls in the same order, forward and backward. Gradients belong to the sum of
    the losses of all processes; gradients of parameters are partial sums, one per process. The context
    holds for all threads, and has to include the backward pass where other checkpoints than
    `checkpoint=True` of this package's stacks recompute activations.

    Args:
        mesh: Mesh of one dimension, as `mesh["cp"]`.
        layout: "contiguous", or "head-tail", which balances causal exact attention: process i of P has
            segments i and 2P − 1 − i of 2P.

    Raises:
        ShapeError: If the mesh has several dimensions.
        UnknownNameError: If there is no such layout.
    """
    return in_force(layout_of(mesh, layout))


def shard(x: Tensor, mesh: DeviceMesh, dim: int, layout: str = "contiguous") -> Tensor:
    """Copy this process's tokens out of a whole sequence.

    Args:
        dim: Axis of the tokens: 2 for q, k and v, 1 for a key mask, token ids and embeddings.

    Raises:
        ShapeError: If the tokens are not divided by the segments.
    """
    segments = layout_of(mesh, layout)
    tokens, number = x.shape[dim], segments.num_segments
    if tokens % number:
        longer = -(-tokens // number) * number
        raise ShapeError(
            f"x has {tokens} tokens along axis {dim}, and layout {layout!r} has {number} segments of equal "
            f"length: pad it to {longer} and mask the padding with a key_mask."
        )
    return local_tokens(x, dim, segments)


@torch.no_grad()
def unshard(x: Tensor, mesh: DeviceMesh, dim: int, layout: str = "contiguous") -> Tensor:
    """Gather the whole sequence on every process, in order, without a gradient.

    Compute a loss from the tokens of each process instead: it needs no whole sequence.
    """
    return all_tokens(x, dim, layout_of(mesh, layout))
