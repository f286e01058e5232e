"""Differentiable exchanges between ranks, the only place with collectives.

Gradients belong to the sum of the losses of all ranks. Every rank runs the same exchanges in the same order,
forward and backward, whether or not it needs their result.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import _resolve_process_group

from efficient_attn.distributed.layout import Layout
from efficient_attn.ops.dtypes import upcast


def largest(x: Tensor, layout: Layout) -> Tensor:
    """Elementwise maximum over ranks, without a gradient."""
    return _reduced(x.detach(), dist.ReduceOp.MAX, layout)


def total(x: Tensor, layout: Layout) -> Tensor:
    """Elementwise sum over ranks."""
    return _Total.apply(x, layout)


def gathered(x: Tensor, layout: Layout) -> Tensor:
    """Tensors of all ranks, [ranks …]."""
    return _Gathered.apply(x, layout)


def all_tokens(x: Tensor, dim: int, layout: Layout) -> Tensor:
    """Tokens of all ranks along `dim`, in the order of the sequence."""
    if x.dtype is torch.bool:
        return all_tokens(x.byte(), dim, layout).bool()
    rows = gathered(x, layout).unbind()
    segments = [segment for tokens in rows for segment in tokens.chunk(len(layout.local), dim)]
    return torch.cat([segments[place] for place in layout.order], dim)


def moved(x: Tensor, sent: list[int], received: list[int], layout: Layout) -> Tensor:
    """Exchange rows of x: send `sent[i]` consecutive rows to rank i, receive `received[i]` from it."""
    return _Moved.apply(x, sent, received, layout)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return _reduced(x, dist.ReduceOp.SUM, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduced(grad, dist.ReduceOp.SUM, ctx.layout), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        x = x.contiguous()
        rows = [torch.empty_like(x) for _ in range(layout.ranks)]
        dist.all_gather(rows, x, group=_resolve_process_group(layout.group))
        return torch.stack(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ones = [1] * ctx.layout.ranks
        # Every rank adds the gradients of its tensor, in at least float32.
        return upcast(_all_to_all(grad, ones, ones, ctx.layout)).sum(dim=0).to(grad.dtype), None


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], layout: Layout) -> Tensor:
        ctx.rest = received, sent, layout
        return _all_to_all(x, sent, received, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, *ctx.rest), None, None, None


def _reduced(x: Tensor, operation: Any, layout: Layout) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, operation, group=_resolve_process_group(layout.group))
    return x


def _all_to_all(x: Tensor, sent: list[int], received: list[int], layout: Layout) -> Tensor:
    rows = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(rows, x.contiguous(), received, sent, group=_resolve_process_group(layout.group))
    return rows
