"""Sequences that are distributed over the processes of a device mesh (context parallelism).

Inside `context_parallel` every process holds the tokens of its own segments, and backends compute the rows
of these tokens of attention over the whole sequence. No tensor is resized and no function of torch replaced.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from efficient_attn.errors import ShapeError
from efficient_attn.ops.sharded.exchange import all_tokens
from efficient_attn.ops.sharded.layout import KINDS, Layout, in_force, own_tokens, ranks_per_node
from efficient_attn.options import one_of

__all__ = ["ContextParallel", "context_parallel", "shard", "unshard"]


@contextmanager
def context_parallel(mesh: DeviceMesh, *, layout: str = "contiguous") -> Iterator[None]:
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
    with in_force(_layout(mesh, layout)):
        yield


class ContextParallel(ParallelStyle):
    """Style of `parallelize_module` that puts every forward pass of a module inside `context_parallel`.

    Args:
        layout: As for `context_parallel`.
    """

    def __init__(self, layout: str = "contiguous") -> None:
        one_of("layout", layout, KINDS)
        self._kind = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout, entered = _layout(device_mesh, self._kind), list[AbstractContextManager[Any]]()

        def enter(*_: Any) -> None:
            entered.append(in_force(layout))
            entered[-1].__enter__()

        def leave(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        # The layout is left after an exception too.
        module.register_forward_hook(leave, always_call=True)
        return module


def shard(x: Tensor, mesh: DeviceMesh, dim: int, layout: str = "contiguous") -> Tensor:
    """A copy of the tokens of this process, out of a whole sequence that every process has.

    Args:
        dim: Axis of the tokens: 2 for q, k and v, 1 for a key mask, token ids and embeddings.

    Raises:
        ShapeError: If the tokens are not divided by the segments.
    """
    placed = _layout(mesh, layout)
    tokens, segments = x.shape[dim], placed.num_segments
    if tokens % segments:
        longer = -(-tokens // segments) * segments
        raise ShapeError(
            f"x has {tokens} tokens along axis {dim}, and layout {layout!r} has {segments} segments of equal "
            f"length: pad it to {longer} and mask the padding with a key_mask."
        )
    return own_tokens(x, dim, placed)


@torch.no_grad()
def unshard(x: Tensor, mesh: DeviceMesh, dim: int, layout: str = "contiguous") -> Tensor:
    """The whole sequence on every process, in order, from the tokens of each; it carries no gradient.

    A loss is computed from the tokens of each process instead, and needs no whole sequence.
    """
    placed = _layout(mesh, layout)
    if x.dtype is torch.bool:
        return all_tokens(x.byte(), dim, placed).bool()
    return all_tokens(x, dim, placed)


def _layout(mesh: DeviceMesh, kind: str) -> Layout:
    one_of("layout", kind, KINDS)
    if mesh.ndim != 1:
        raise ShapeError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; the tokens are distributed over one: "
            'give mesh["cp"] for a dimension called cp.'
        )
    per_node = ranks_per_node(mesh.mesh.tolist(), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return Layout(mesh.get_group().group_name, kind, mesh.get_local_rank(), mesh.size(), per_node)
