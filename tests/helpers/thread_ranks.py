"""Sequences for ranks that are threads of one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.conformance.ranks import on_threads
from efficient_attn.distributed.calls import exchange_of
from efficient_attn.distributed.layout import Layout, local_tokens


def join(parts: list[Tensor], kind: str, dim: int) -> Tensor:
    """The whole sequence, from the tokens of all ranks."""
    layout = Layout(None, kind, 0, len(parts))
    segments = [segment for x in parts for segment in x.chunk(len(layout.local), dim)]
    return torch.cat([segments[place] for place in layout.order], dim)


def drawn(tokens: int) -> list[Tensor]:
    """q, k, v and a gradient; q and k are short, so that no signed denominator is small."""
    shapes = ((4, 8, 0.3), (2, 8, 0.3), (2, 6, 1.0), (4, 6, 1.0))
    return [norm * torch.randn(2, heads, tokens, dim, dtype=torch.float64) for heads, dim, norm in shapes]


def assert_ranks_are_the_whole(
    backend: Backend, tensors: list[Tensor], mask: Tensor | None, *, ranks: int, kind: str
) -> None:
    """Rows and gradients of all ranks, put together, are the rows and gradients of one process."""
    *qkv, g = tensors
    learned, whole = list(backend.parameters()), [x.clone().requires_grad_() for x in qkv]
    out = backend(*whole, key_mask=mask)
    expected = [out.detach(), *torch.autograd.grad(out, [*whole, *learned], g)]

    def call(layout: Layout) -> list[Tensor]:
        inputs = [local_tokens(x, 2, layout).requires_grad_() for x in qkv]
        real = None if mask is None else local_tokens(mask, 1, layout)
        out = exchange_of(backend).attend(backend, *inputs, real, layout)
        grads = torch.autograd.grad(out, [*inputs, *learned], local_tokens(g, 2, layout))
        return [out.detach(), *grads]

    parts = list(zip(*on_threads(ranks, kind, call), strict=True))
    joined = [*(join(x, kind, 2) for x in parts[:4]), *(sum(x) for x in parts[4:])]
    for x, y in zip(joined, expected, strict=True):
        # Sums of at most 66 terms, each with a few roundings of 1.1e-16.
        assert (x - y).norm() <= 1e-13 * y.norm()


@contextmanager
def bytes_sent(note: Callable[[int], None]) -> Iterator[None]:
    """`note` takes the bytes that a rank sends in each exchange; an all-reduce counts as a ring."""
    gather, reduce, exchange = dist.all_gather, dist.all_reduce, dist.all_to_all_single

    def all_gather(rows, x, group):
        note(x.nbytes * (len(rows) - 1))
        return gather(rows, x, group=group)

    def all_reduce(x, operation, group):
        note(x.nbytes * 2 * (group.size() - 1) // group.size())
        return reduce(x, operation, group=group)

    def all_to_all_single(rows, x, received, sent, group):
        note((sum(sent) - sent[group.rank()]) * x[:1].nbytes)
        return exchange(rows, x, received, sent, group=group)

    counted = {"all_gather": all_gather, "all_reduce": all_reduce, "all_to_all_single": all_to_all_single}
    with patch.multiple(dist, **counted):
        yield
