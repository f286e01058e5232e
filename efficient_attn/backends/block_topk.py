"""Softmax over the blocks of keys that earlier queries of the sequence point to, and over near ones."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.operation_counts import MatMul, MatMuls, softmax_matmuls
from efficient_attn.ops.blocks import (
    Blocks,
    Pattern,
    Sums,
    block_attention,
    block_sums,
    blocks_read,
    keys_read,
)
from efficient_attn.ops.dtypes import upcast
from efficient_attn.ops.paths import step_capacity, tuned_for_cpu
from efficient_attn.ops.softmax.kv_cache import KVCache, append_tokens, mask_of
from efficient_attn.options import option
from efficient_attn.problem import AttentionProblem, positive_count
from efficient_attn.registry import Capabilities, register

# Blocks of queries that choose at a time on the CPU.
_QUERIES = 32


@dataclass(frozen=True, kw_only=True)
class BlockTopKOptions:
    block: int = option(64, "Number of tokens in a block, of queries and of keys.")
    blocks: int = option(8, "Number of chosen blocks; causal: besides its own, the one before and the first.")

    def __post_init__(self) -> None:
        positive_count("block", self.block)
        positive_count("blocks", self.blocks)


class BlockCache(NamedTuple):
    """KV cache, and sums over the tokens of each block, from the first real token on.

    Attributes:
        past: Sums of each block before the last.
        last: Sums of the last block.
        read: Numbers of the blocks that the last block reads, [batch heads 1 most]; none after a mask.
    """

    cache: KVCache
    past: Sums
    last: Sums
    read: Tensor


def operations(problem: AttentionProblem, options: BlockTopKOptions, tokens: int, value_dim: int) -> MatMuls:
    """Products of mean queries with mean keys, and of every query with the keys of its blocks."""
    size, total, pairs = options.block, -(-tokens // options.block), 0
    for number in range(total):
        rows = min(size, tokens - number * size)
        if problem.causal:
            pairs += rows * min(options.blocks + 2, number) * size + rows * (rows + 1) // 2
        else:
            pairs += rows * min((options.blocks + 1) * size, tokens)
    choice = MatMul(total * total * problem.head_dim, gradients=0)
    return (choice, *softmax_matmuls(pairs, problem.head_dim, value_dim))


@register(
    "block-topk",
    summary="Softmax over the key blocks with the largest scores of a mean query, and nearby blocks.",
    formula="softmax over the keys of N(b): causal, the blocks b, b − 1, the first one and the largest "
    "q̄_(b−1)·k̄_c; otherwise block b and the largest q̄_b·k̄_c",
    paper="https://arxiv.org/abs/2406.10774",
    options=BlockTopKOptions,
    size_option="block",
    capabilities=Capabilities(
        causal=True, cross=False, second_derivatives=True, needs_all_queries=True, time_growth=2
    ),
    operations=operations,
    compared=False,
)
class BlockTopK(nn.Module):
    def __init__(self, problem: AttentionProblem, options: BlockTopKOptions) -> None:
        super().__init__()
        self._scale, self._blocks, self._block = problem.factor, options.blocks, options.block
        self.pattern = Pattern(options.block, 0, self._choose, problem.causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        sums = self._sums(q, k, key_mask, k.shape[2])
        return block_attention(q, k, v, self.pattern, scale=self._scale, key_mask=key_mask, sums=sums)

    def keys_read(self, q: Tensor, k: Tensor, key_mask: Tensor | None, rows: Tensor) -> Tensor:
        return keys_read(q, k, key_mask, rows, self.pattern, self._sums(q, k, key_mask, k.shape[2]))

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: BlockCache | None, key_mask: Tensor | None
    ) -> tuple[Tensor, BlockCache]:
        cache = append_tokens(None if state is None else state.cache, k, v, key_mask)
        mask, tokens, new = mask_of(cache), cache.k.shape[2], q.shape[2]
        queries, sums = range((tokens - new) // self._block, -(-tokens // self._block)), None
        inside = mask is None and new > 0 and (tokens - new) % self._block > 0 and len(queries) == 1
        if state is not None and inside:
            # Earlier blocks alone decide which blocks a block reads.
            added, read = self._sums(q, k, None, new), state.read
            past, last = state.past, Sums(state.last.q + added.q, state.last.k + added.k)
        else:
            earlier = None
            if state is not None:
                earlier = Sums(*(torch.cat(x, dim=2) for x in zip(state.past, state.last, strict=True)))
            sums = self._sums(q, k, mask, tokens, earlier)
            past, last = (Sums(*(x[:, :, y].clone() for x in sums)) for y in (slice(-1), slice(-1, None)))
            read = torch.zeros(*q.shape[:2], 1, 0, dtype=torch.long, device=q.device)
            if mask is None and queries:
                read = blocks_read(queries, None, cache.k, self.pattern, sums)
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        if out.numel():
            call = partial(block_attention, scale=self._scale, key_mask=mask, sums=sums)
            out = call(q, cache.k, cache.v, self.pattern, read=read if mask is None else None)
        return out, BlockCache(cache, past, last, read if inside else read[:, :, -1:].clone())

    @torch.no_grad()
    def _sums(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, tokens: int, earlier: Sums | None = None
    ) -> Sums:
        k, (sum_q, sum_k) = F.pad(upcast(k), (0, 1), value=1.0), earlier or (None, None)
        return Sums(
            block_sums(q, tokens, key_mask, self._block, sum_q),
            block_sums(k, tokens, key_mask, self._block, sum_k),
        )

    def _choose(self, blocks: Blocks) -> Tensor:
        row, none, sums = blocks.queries[:, None], blocks.total, blocks.sums
        assert sums is not None
        number = torch.arange(none, device=row.device)
        if self.pattern.causal:
            # Queries before the block choose, so that none of its outputs depends on a later query.
            query = sums.q[:, :, (blocks.queries - 1).clamp_min(0)]
            possible = (number > 0) & (number < row - 1)
            # Many heads give the first tokens most weight, which the mean of their block does not show.
            always = torch.cat([torch.where(row > 0, 0, none), torch.where(row > 1, row - 1, none)], dim=1)
        else:
            query, always = sums.q[:, :, blocks.queries], row[:, :0]
            possible = (number != row) & (number < blocks.real[..., None])
        mean = sums.k[..., :-1] / sums.k[..., -1:].clamp_min(1.0)
        mean = mean.repeat_interleave(query.shape[1] // mean.shape[1], dim=1).mT
        chosen = []
        # Some blocks of queries at a time: all scores would grow with the square of the tokens.
        step = _QUERIES if tuned_for_cpu(query) else step_capacity(query.shape[0] * query.shape[1] * none)
        for part, allowed in zip(query.split(step, dim=2), possible.split(step, dim=-2), strict=True):
            scores = (self._scale * part @ mean).masked_fill(~allowed, -torch.inf)
            best = scores.topk(min(self._blocks, none), dim=3)
            chosen.append(best.indices.masked_fill(best.values == -torch.inf, none))
        read = torch.cat(chosen, dim=2)
        return torch.cat([always.expand(*read.shape[:3], -1), read], dim=3)
