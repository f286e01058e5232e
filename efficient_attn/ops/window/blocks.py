"""Blocks of a window by plain products, on a scratch that stays in cache.

A block of queries reads a slice of the keys. The slices of consecutive blocks overlap; they are read as views
of the keys, so that one product serves many blocks of a head and nothing is copied.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast

# Queries that share one slice of keys: it has window + 31 keys, where a query needs window.
BLOCK = 32
# Weights are powers of two, which torch computes three times as fast as powers of e.
LOG2_E = 1 / math.log(2)
# Scores worked on at once: with fewer the calls would show, with more memory.
_SCORES = 3 * 2**18


class Band(NamedTuple):
    """Consecutive blocks of queries, whose slices of keys lie inside the sequence.

    Attributes:
        first: The first query.
        blocks: How many blocks.
        last_key: The last key that the first query reads.
        span: A query reads the keys from its last one minus `span`.
    """

    first: int
    blocks: int
    last_key: int
    span: int

    @property
    def kept(self) -> int:
        """Blocks before one that read some of its keys."""
        return -(-self.span // BLOCK)

    @property
    def reach(self) -> int:
        """`span` in whole blocks."""
        return self.kept * BLOCK

    @property
    def width(self) -> int:
        """Keys in a slice."""
        return self.reach + BLOCK

    def queries(self, block: int, blocks: int) -> slice:
        """The queries of these blocks."""
        start = self.first + block * BLOCK
        return slice(start, start + blocks * BLOCK)

    def keys(self, block: int, blocks: int) -> slice:
        """As many keys, with which the slices of these blocks begin."""
        start = self.last_key - self.reach + block * BLOCK
        return slice(start, start + blocks * BLOCK)

    def read(self, block: int, blocks: int) -> slice:
        """All keys that these blocks read."""
        keys = self.keys(block, blocks)
        return slice(keys.start, keys.stop + self.reach)


class EdgeMask(NamedTuple):
    """What hides keys at both ends of a slice from some of a block's rows.

    Attributes:
        width: Columns at either end of which not every row sees all.
        hidden: Both ends, 0 or −inf, [BLOCK 2 width]; the whole slice, [BLOCK 1 width], where they meet.
    """

    width: int
    hidden: Tensor

    @classmethod
    def of(cls, band: Band, like: Tensor) -> "EdgeMask":
        slack = band.reach - band.span
        outside = like.new_full((BLOCK, band.width), -torch.inf)
        hidden, width = outside.tril(slack - 1) + outside.triu(band.reach + 1), BLOCK + slack
        if 2 * width >= band.width:
            return cls(band.width, hidden.unsqueeze(1))
        return cls(width, torch.stack([hidden[:, :width], hidden[:, -width:]], dim=1))

    def of_scores(self, scores: Tensor) -> Tensor:
        """The ends of scores [blocks BLOCK width], a view that `hidden` is added to."""
        block, row, column = scores.stride()
        last = scores.shape[-1] - self.width
        shape = (len(scores), *self.hidden.shape)
        return scores.as_strided(shape, (block, row, last, column), scores.storage_offset())


def mask_keys(scores: Tensor, real: Tensor) -> None:
    """Set scores [blocks BLOCK width] of keys that are not real, bool [keys read], to −inf."""
    hidden = scores.new_zeros(len(real), 1).masked_fill_(~real.unsqueeze(-1), -torch.inf)
    scores.add_(slices(hidden, len(scores), scores.shape[-1]).mT)


class Forward(NamedTuple):
    """What the way there reads and writes, [batch heads tokens …], or of one head, [tokens …].

    Attributes:
        mask: Which keys are real, bool [batch tokens] or [tokens].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    out: Tensor
    log_sum: Tensor

    def head(self, entry: int, head: int) -> "Forward":
        """One head of queries, and the keys and values that it reads."""
        kv_head = head * self.k.shape[1] // self.q.shape[1]
        k, v = (x[entry, kv_head] for x in (self.k, self.v))
        mask = None if self.mask is None else self.mask[entry]
        return Forward(self.q[entry, head], k, v, mask, self.out[entry, head], self.log_sum[entry, head])


def attend_blocks(call: Forward, band: Band, scale: float) -> None:
    """Write the band's outputs, softmax(scale · q kᵀ) v over each query's window, and their log-sum-exps."""
    # As much for a shorter sequence, so that memory is affine in its length.
    group = max(1, _SCORES // (BLOCK * band.width))
    scratch = call.log_sum.new_empty(group, BLOCK, band.width)
    edges = EdgeMask.of(band, scratch)
    for entry in range(call.q.shape[0]):
        for number in range(call.q.shape[1]):
            head = call.head(entry, number)
            for block in range(0, band.blocks, group):
                _attend(head, band, block, scratch[: band.blocks - block], edges, scale)


def _attend(head: Forward, band: Band, block: int, scores: Tensor, edges: EdgeMask, scale: float) -> None:
    """Blocks from `block` on, as many as there is room for scores [blocks BLOCK width]."""
    q, k, v, mask, out, log_sum = head
    blocks, _, width = scores.shape
    rows, read = band.queries(block, blocks), band.read(block, blocks)
    keys, values = (slices(contiguous_rows(x, read), blocks, width) for x in (k, v))
    scores.baddbmm_(in_blocks(contiguous_rows(q, rows)), keys.mT, beta=0, alpha=scale * LOG2_E)
    edges.of_scores(scores).add_(edges.hidden)
    if mask is not None:
        mask_keys(scores, mask[read])
    top = scores.amax(dim=-1, keepdim=True)
    if mask is not None:
        # A row without a visible key: beside any finite number its weights are 2^(−inf) = 0.
        top.clamp_(min=torch.finfo(top.dtype).min)
    # At least 1, but in such a row.
    sums = scores.sub_(top).exp2_().sum(dim=-1, keepdim=True).clamp_(min=1.0)
    outs = in_blocks(out[rows])
    if outs.dtype == scores.dtype:
        torch.bmm(scores, values, out=outs)
        outs.div_(sums)
    else:
        outs.copy_(torch.bmm(scores, values).div_(sums))
    in_blocks(log_sum[rows]).copy_(sums.log2_().add_(top).div_(LOG2_E).squeeze(-1))


def contiguous_rows(x: Tensor, tokens: slice) -> Tensor:
    """These tokens of one head in float32 or better, as rows in one piece: a view where they are."""
    some = upcast(x[tokens])
    return some if some.stride(1) == 1 and some.stride(0) >= some.shape[1] else some.contiguous()


def in_blocks(some: Tensor) -> Tensor:
    """[tokens …] as [blocks BLOCK …], a view."""
    return some.unflatten(0, (-1, BLOCK))


def slices(some: Tensor, blocks: int, width: int) -> Tensor:
    """The slices that blocks read, of tokens [tokens dim] as [blocks width dim], overlapping: a view."""
    token, dim = some.stride(0), some.shape[1]
    return some.as_strided((blocks, width, dim), (BLOCK * token, token, 1), some.storage_offset())
