"""Sequences for ranks that are threads of one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor


def drawn(tokens: int) -> list[Tensor]:
    """q, k, v and a gradient; q and k are short, so that no signed denominator is small."""
    shapes = ((4, 8, 0.3), (2, 8, 0.3), (2, 6, 1.0), (4, 6, 1.0))
    return [norm * torch.randn(2, heads, tokens, dim, dtype=torch.float64) for heads, dim, norm in shapes]


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
