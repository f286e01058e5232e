"""Backward pass of window attention of whole blocks, on scratch memory that stays in cache.

The gradient of a key sums over all blocks of queries that read it. Weights are therefore stored with
every block one block further to the right than its predecessor:

    queries 0   ▒▒▒▒▒         The weights of a block of keys are a column of this layout, a strided view, and
    queries 1     ▒▒▒▒▒       one product with the queries gives its gradient. No slices are added up, and
    queries 2       ▒▒▒▒▒     no weight is computed twice: a step keeps its last blocks for the next step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.window.blocks import (
    BLOCK,
    LOG2_E,
    Band,
    EdgeMask,
    Forward,
    contiguous_rows,
    in_blocks,
    mask_keys,
    slices,
)

# Numbers in the scratch memory, which coexists with all gradients: 3.5 MiB in float32.
_NUMBERS = 7 * 2**17


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
