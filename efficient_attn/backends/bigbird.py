"""Softmax over a window, the first and a few random blocks of keys. Longformer without random blocks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.errors import OptionError
from efficient_attn.operation_counts import MatMuls, softmax_matmuls
from efficient_attn.ops.blocks import Blocks, Pattern, block_attention, blocks_read, keys_read
from efficient_attn.ops.dtypes import without_inference_mode
from efficient_attn.ops.softmax.biased import eager
from efficient_attn.ops.softmax.kv_cache import KVCache, append_tokens, mask_of
from efficient_attn.options import option, whole_number
from efficient_attn.problem import AttentionProblem, positive_count
from efficient_attn.registry import Capabilities, register

# x → x⁵ permutes the numbers below this prime p, since 5 does not divide p − 1.
_PRIME = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class BigBirdOptions:
    block: int = option(64, "Number of tokens in a block.")
    window: int = option(3, "Number of near blocks, its own included: odd and centred; causal: the last.")
    global_blocks: int = option(1, "Number of first blocks that all queries read; not causal, they read all.")
    random_blocks: int = option(3, "Number of random blocks of each block of queries; causal: of its past.")
    seed: int = option(0, "Seed of the random blocks; the same seed gives the same blocks on every device.")

    def __post_init__(self) -> None:
        positive_count("block", self.block)
        positive_count("window", self.window)
        whole_number("global_blocks", self.global_blocks)
        whole_number("random_blocks", self.random_blocks)
        whole_number("seed", self.seed)

    @property
    def most(self) -> int:
        return self.window + self.global_blocks + self.random_blocks


def operations(problem: AttentionProblem, options: BigBirdOptions, tokens: int, value_dim: int) -> MatMuls:
    """Products of every query with the keys of its blocks. Random blocks count as full."""
    size, total, pairs = options.block, -(-tokens // options.block), 0
    for number in range(total):
        rows = min(size, tokens - number * size)
        if problem.causal:
            pairs += rows * (min(options.most - 1, number) * size) + rows * (rows + 1) // 2
        elif number < options.global_blocks:
            pairs += rows * tokens
        else:
            pairs += rows * min(options.most * size, tokens)
    return softmax_matmuls(pairs, problem.head_dim, value_dim)


@register(
    "bigbird",
    summary="Softmax over a window, the first and a few random blocks of keys.",
    formula="softmax over the keys of N(b): blocks around block b, the first blocks and random ones; "
    "without causality the queries of the first blocks read all keys",
    paper="https://arxiv.org/abs/2007.14062",
    options=BigBirdOptions,
    size_option="block",
    capabilities=Capabilities(causal=True, cross=False, second_derivatives=True),
    operations=operations,
    compared=False,
)
class BigBird(nn.Module):
    def __init__(self, problem: AttentionProblem, options: BigBirdOptions) -> None:
        super().__init__()
        if not problem.causal and options.window % 2 == 0:
            raise OptionError(
                f"window={options.window} has no middle; a window that is not causal is odd: "
                f"{options.window - 1} or {options.window + 1}."
            )
        self._scale, self._options, self._seed = problem.factor, options, options.seed
        readers = 0 if problem.causal else options.global_blocks
        self.pattern = Pattern(options.block, readers, self._choose, problem.causal)
        # Place of the last block of a state, and the blocks that it reads.
        self._stored: tuple[Any, Any] = (None, None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return block_attention(q, k, v, self.pattern, scale=self._scale, key_mask=key_mask)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KVCache | None, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        cache = append_tokens(state, k, v, key_mask)
        new, tokens, block = q.shape[2], cache.k.shape[2], self._options.block
        if new * v.shape[3] == 0:
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), cache
        mask, read, last = mask_of(cache), None, (tokens - 1) // block
        if mask is None and (tokens - new) // block == last:
            read = self._last_read(last, cache.k)
        out = block_attention(q, cache.k, cache.v, self.pattern, scale=self._scale, key_mask=mask, read=read)
        return out, cache

    def _last_read(self, last: int, k: Tensor) -> Tensor:
        """Numbers of the blocks that the last block reads, stored while it grows."""
        at, read = self._stored
        if at != (last, k.device) or not eager(k):
            with without_inference_mode():
                read = blocks_read(range(last, last + 1), None, k, self.pattern, None)
        if type(k) is Tensor and eager(k):
            self._stored = (last, k.device), read
        return read

    def keys_read(self, q: Tensor, k: Tensor, key_mask: Tensor | None, rows: Tensor) -> Tensor:
        return keys_read(q, k, key_mask, rows, self.pattern)

    def redraw(self, seed: int) -> None:
        whole_number("seed", seed)
        self._seed, self._stored = seed, (None, None)

    def _choose(self, blocks: Blocks) -> Tensor:
        (row, real, none), causal = blocks[:3], self.pattern.causal
        first, side = self._options.global_blocks, self._options.window // 2
        back, ahead = (self._options.window - 1, 0) if causal else (side, side)
        sides = [torch.arange(*ends, device=row.device) for ends in ((-back, 0), (1, ahead + 1))]
        near = row[:, None] + torch.cat(sides)
        near = near.masked_fill(near < first, none)
        begin = torch.arange(first, device=row.device).expand(len(row), -1)
        begin = begin.masked_fill(begin >= row[:, None], none)

        # Floyd's draw of some of the blocks outside: `before` ones, and the others after the window.
        before = (row - back - first).clamp_min(0)
        number = before if causal else before + (real - row - ahead - 1).clamp_min(0)
        # No index to a compiler, which would multiply in 32 bits on a GPU.
        of_block = _mixed((_mixed(self._seed % _PRIME) + row) | 0)
        position = torch.arange(self._options.random_blocks, device=row.device)
        last = number.expand(len(real), 1, len(row))[..., None] - len(position) + position
        drawn = _mixed(of_block[:, None] + position) % (last + 1).clamp_min(1)
        for later in range(1, len(position)):
            seen = (drawn[..., later, None] == drawn[..., :later]).any(dim=-1)
            drawn[..., later] = torch.where(seen, last[..., later], drawn[..., later])
        before, after = before[:, None], (row + ahead + 1)[:, None]
        place = torch.where(drawn < before, first + drawn, after + drawn - before)
        read = (near, begin, torch.where(last < 0, none, place))
        return torch.cat([x.expand(len(real), 1, -1, -1) for x in read], dim=3)


def _mixed(x: Any) -> Any:
    """Numbers below `_PRIME` that look random, different for different x below it."""
    for constant in (0x2545F491, 0x3C6EF372):
        x = (x + constant) % _PRIME
        square = x * x % _PRIME
        x = x * (square * square % _PRIME) % _PRIME
    return x
