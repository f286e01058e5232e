"""Window attention of whole blocks by batched products, on scratch memory that stays in cache.

A block of queries reads a slice of the keys. The slices of consecutive blocks overlap and are views of the
keys, so that one product serves many blocks of a head without a copy.

The gradient of a key sums over all blocks of queries that read it. Weights are therefore stored with
every block one block further to the right than its predecessor:

    queries 0   ▒▒▒▒▒         The weights of a block of keys are a column of this layout, a strided view, and
    queries 1     ▒▒▒▒▒       one product with the queries gives its gradient. No slices are added up, and
    queries 2       ▒▒▒▒▒     no weight is computed twice: a step keeps its last blocks for the next step.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast

# Queries that share one slice of window + 31 keys.
BLOCK = 32
# PyTorch computes powers of two three times as fast as powers of e.
LOG2_E = 1 / math.log(2)
# Scores per step: fewer would add call overhead, more would add memory.
_SCORES = 3 * 2**18
# Numbers in the scratch memory, which coexists with all gradients: 3.5 MiB in float32.
_NUMBERS = 7 * 2**17


class Band(NamedTuple):
    """Consecutive blocks of queries whose key slices lie inside the sequence.

    Attributes:
        first: Index of the first query.
        blocks: Number of blocks.
        last_key: Index of the last key that the first query reads.
        span: Keys that a query reads before its last one.
    """

    first: int
    blocks: int
    last_key: int
    span: int

    @property
    def kept(self) -> int:
        """Number of earlier blocks that read keys of a block."""
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
        """The keys at which the slices of these blocks begin, one key per query."""
        start = self.last_key - self.reach + block * BLOCK
        return slice(start, start + blocks * BLOCK)

    def read(self, block: int, blocks: int) -> slice:
        """All keys that these blocks read."""
        keys = self.keys(block, blocks)
        return slice(keys.start, keys.stop + self.reach)


class EdgeMask(NamedTuple):
    """Score bias at both ends of a slice, where the window of a row excludes keys.

    Attributes:
        width: Columns at each end that some rows of a block do not see.
        hidden: Bias of both ends, 0 or −inf, [BLOCK 2 width]; if they meet, of the slice, [BLOCK 1 width].
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
        """View of both ends of scores [blocks BLOCK width], to which `hidden` is added."""
        block, row, column = scores.stride()
        last = scores.shape[-1] - self.width
        shape = (len(scores), *self.hidden.shape)
        return scores.as_strided(shape, (block, row, last, column), scores.storage_offset())


def mask_keys(scores: Tensor, real: Tensor) -> None:
    """Set the scores [blocks BLOCK width] of masked keys to −inf; `real` is bool [keys read]."""
    hidden = scores.new_zeros(len(real), 1).masked_fill_(~real.unsqueeze(-1), -torch.inf)
    scores.add_(slices(hidden, len(scores), scores.shape[-1]).mT)


class Forward(NamedTuple):
    """Inputs and outputs of the forward pass, [batch heads tokens …], or of one head, [tokens …].

    Attributes:
        mask: True for a real key, bool [batch tokens] or [tokens].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    out: Tensor
    log_sum: Tensor

    def head(self, entry: int, head: int) -> "Forward":
        """One query head, with the keys and values that it reads."""
        kv_head = head * self.k.shape[1] // self.q.shape[1]
        k, v = (x[entry, kv_head] for x in (self.k, self.v))
        mask = None if self.mask is None else self.mask[entry]
        return Forward(self.q[entry, head], k, v, mask, self.out[entry, head], self.log_sum[entry, head])


def attend_blocks(call: Forward, band: Band, scale: float) -> None:
    """Write the band's outputs, softmax(scale · q kᵀ) v over each query's window, and their log-sum-exps."""
    # The same size for a shorter sequence, so that memory is affine in its length.
    group = max(1, _SCORES // (BLOCK * band.width))
    scratch = call.log_sum.new_empty(group, BLOCK, band.width)
    edges = EdgeMask.of(band, scratch)
    for entry in range(call.q.shape[0]):
        for number in range(call.q.shape[1]):
            head = call.head(entry, number)
            for block in range(0, band.blocks, group):
                _attend(head, band, block, scratch[: band.blocks - block], edges, scale)


def _attend(head: Forward, band: Band, block: int, scores: Tensor, edges: EdgeMask, scale: float) -> None:
    """Attention of the blocks from `block` on, as many as `scores` [blocks BLOCK width] has room for."""
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
        # A finite maximum gives a fully-masked row the weights 2^(−inf) = 0.
        top.clamp_(min=torch.finfo(top.dtype).min)
    # Sums are at least 1, except in a fully-masked row.
    sums = scores.sub_(top).exp2_().sum(dim=-1, keepdim=True).clamp_(min=1.0)
    outs = in_blocks(out[rows])
    if outs.dtype == scores.dtype:
        torch.bmm(scores, values, out=outs)
        outs.div_(sums)
    else:
        outs.copy_(torch.bmm(scores, values).div_(sums))
    in_blocks(log_sum[rows]).copy_(sums.log2_().add_(top).div_(LOG2_E).squeeze(-1))


def contiguous_rows(x: Tensor, tokens: slice) -> Tensor:
    """The tokens of one head in float32 or better, as contiguous rows: a view where possible."""
    some = upcast(x[tokens])
    return some if some.stride(1) == 1 and some.stride(0) >= some.shape[1] else some.contiguous()


def in_blocks(some: Tensor) -> Tensor:
    """[tokens …] as [blocks BLOCK …], a view."""
    return some.unflatten(0, (-1, BLOCK))


def slices(some: Tensor, blocks: int, width: int) -> Tensor:
    """Overlapping slices of tokens [tokens dim] that the blocks read, a view [blocks width dim]."""
    token, dim = some.stride(0), some.shape[1]
    return some.as_strided((blocks, width, dim), (BLOCK * token, token, 1), some.storage_offset())


class Backward(NamedTuple):
    """Inputs and outputs of the backward pass, [batch heads tokens …], or of one head, [tokens …]."""

    forward: Forward
    grad_out: Tensor
    grad_q: Tensor
    grad_k: Tensor
    grad_v: Tensor

    def head(self, entry: int, head: int) -> "Backward":
        """One query head, with the keys and values that it reads."""
        kv_head = head * self.grad_k.shape[1] // self.grad_q.shape[1]
        grad_k, grad_v = (x[entry, kv_head] for x in (self.grad_k, self.grad_v))
        forward = self.forward.head(entry, head)
        return Backward(forward, self.grad_out[entry, head], self.grad_q[entry, head], grad_k, grad_v)


class _Step(NamedTuple):
    """Memory of one step: views of one scratch buffer, which serves all heads.

    Attributes:
        block: First block of queries, and first block of keys whose gradients are then complete.
        scores: [new BLOCK width] for the `new` blocks of queries of the step.
        edges: Both ends of the scores, where rows exclude keys.
        weights: Weights of the new blocks, row by row; `grad_scores`: gradients of their scores.
        grad_out: Output gradients [new BLOCK dim]; `queries`: the queries.
        key_columns: Columns of weights and of score gradients [blocks BLOCK width], each with its factor, the
            output gradients or the queries [blocks width dim].
        empty: Rows beyond the last block of queries.
        first: Rows that the previous step kept; `last`: rows kept for the next step.
    """

    block: int
    scores: Tensor
    edges: Tensor
    weights: Tensor
    grad_scores: Tensor
    grad_out: Tensor
    queries: Tensor
    key_columns: list[tuple[Tensor, Tensor]]
    empty: list[Tensor]
    first: list[Tensor]
    last: list[Tensor]


def _steps(band: Band, edges: EdgeMask, dim: int, like: Tensor) -> list[_Step]:
    """All steps of a head; blocks without weights after its queries complete the last keys' gradients."""
    width, kept, total = band.width, band.kept, band.blocks + band.kept
    group = (_NUMBERS // BLOCK - 2 * kept * (width + dim)) // (3 * (width + dim))
    group = min(total, max(group, kept, 1))
    scores = like.new_empty(group, BLOCK, width)
    operands = like.new_empty(2, kept + group, BLOCK, dim)
    weights = like.new_empty(2, (kept + group) * BLOCK * (width + 1))
    pair, block = weights.stride(0), BLOCK * (width + 1)
    rows = weights.as_strided((2, kept + group, BLOCK, width), (pair, block, width, 1))
    columns = weights.as_strided((2, group, BLOCK, width), (pair, block, 1, width), band.reach)
    steps = []
    for first in range(0, total, group):
        blocks = min(group, total - first)
        new = max(0, min(blocks, band.blocks - first))
        new_weights, new_grad_scores = rows[:, kept : kept + new]
        new_grad_out, new_queries = operands[:, kept : kept + new]
        steps.append(
            _Step(
                first,
                scores[:new],
                edges.of_scores(scores[:new]),
                new_weights,
                new_grad_scores,
                new_grad_out,
                new_queries,
                [
                    (column[:blocks], slices(token.flatten(0, 1), blocks, width))
                    for column, token in zip(columns, operands, strict=True)
                ],
                [x[:, kept + new : kept + blocks] for x in (rows, operands)],
                [x[:, :kept] for x in (rows, operands)],
                [x[:, blocks : blocks + kept] for x in (rows, operands)],
            )
        )
    return steps


def differentiate_blocks(call: Backward, band: Band, scale: float) -> None:
    """Write the query gradients of the band, and add to the key and value gradients."""
    edges = EdgeMask.of(band, call.grad_q)
    steps = _steps(band, edges, call.grad_q.shape[-1], like=call.grad_q)
    for entry in range(call.grad_q.shape[0]):
        for number in range(call.grad_q.shape[1]):
            _differentiate(call.head(entry, number), band, edges, steps, scale)


def _differentiate(head: Backward, band: Band, edges: EdgeMask, steps: list[_Step], scale: float) -> None:
    (q, k, v, mask, out, log_sum), grad_out, grad_q, grad_k, grad_v = head
    queries = band.queries(0, band.blocks)
    q, grad_out, out, log_sum, grad_q = (in_blocks(x[queries]) for x in (q, grad_out, out, log_sum, grad_q))
    keys = band.keys(0, band.blocks + band.kept)
    grad_v, grad_k = (in_blocks(x[keys]) for x in (grad_v, grad_k))
    for x in steps[0].first:
        x.zero_()
    for step in steps:
        rows = slice(step.block, step.block + len(step.scores))
        if len(step.scores):
            read = band.read(step.block, len(step.scores))
            some_k, some_v = (slices(contiguous_rows(x, read), len(step.scores), band.width) for x in (k, v))
            step.grad_out.copy_(grad_out[rows])
            step.queries.copy_(q[rows])
            step.scores.baddbmm_(step.queries, some_k.mT, beta=0, alpha=scale * LOG2_E)
            step.edges.add_(edges.hidden)
            if mask is not None:
                mask_keys(step.scores, mask[read])
            step.scores.sub_(log_sum[rows].unsqueeze(-1), alpha=LOG2_E)
            torch.exp2(step.scores, out=step.weights)
            torch.bmm(step.grad_out, some_v.mT, out=step.scores)
            # Weights sum to one: subtract δ = g·out, the gradient's component along the output.
            step.scores.sub_((step.grad_out * out[rows]).sum(dim=-1, keepdim=True))
            torch.mul(step.scores, step.weights, out=step.grad_scores)
            grad_q[rows].baddbmm_(step.grad_scores, some_k, beta=0, alpha=scale)
        for x in step.empty:
            x.zero_()
        for grad, factor, (columns, operands) in zip(
            (grad_v, grad_k), (1.0, scale), step.key_columns, strict=True
        ):
            grad[step.block : step.block + len(columns)].baddbmm_(columns, operands, alpha=factor)
        if step is not steps[-1]:
            for x, y in zip(step.first, step.last, strict=True):
                x.copy_(y)
