"""Tiles of window attention: blocks inside the sequence, and the remainders at its ends."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, upcast_dtype
from efficient_attn.ops.window.blocks import BLOCK, Band

# Queries per tile near the ends of the sequence, where slices are truncated and differ.
_EDGE = 128
# Scores of a head up to which a sequence hardly longer than its window is one tile.
_SMALL = 2**18


class Tile(NamedTuple):
    """Blocks of queries and the slices of keys that they read.

    Attributes:
        start: Index of the first query.
        rows: Queries per block.
        blocks: Number of blocks; consecutive blocks are `rows` queries and `rows` keys apart.
        first_key: Index of the first key of the first slice.
        keys: Keys per slice.
    """

    start: int
    rows: int
    blocks: int
    first_key: int
    keys: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.blocks

    def queries(self, x: Tensor) -> Tensor:
        """View of the tile's queries, [heads tokens …] as [heads blocks rows …]."""
        return x[:, self.start : self.stop].unflatten(1, (self.blocks, self.rows))

    def slices(self, x: Tensor, heads: int) -> Tensor:
        """Overlapping slices of keys or values, [heads|1 tokens dim] as [heads blocks keys dim]."""
        contiguous_rows = x[:, self.first_key : self.first_key + (self.blocks - 1) * self.rows + self.keys]
        contiguous_rows = upcast(contiguous_rows) if contiguous_rows.is_floating_point() else contiguous_rows
        head, token, dim = contiguous_rows.stride()
        return contiguous_rows.as_strided(
            (heads, self.blocks, self.keys, x.shape[-1]),
            (head if x.shape[0] == heads else 0, self.rows * token, token, dim),
            contiguous_rows.storage_offset(),
        )

    def add(self, whole: Tensor, parts: Tensor) -> None:
        """Add slices [heads blocks keys dim] to their positions in [heads|1 tokens dim]."""
        if whole.shape[0] != parts.shape[0]:
            parts = parts.sum(dim=0, keepdim=True)
        for column in range(0, self.keys, self.rows):
            part = parts[:, :, column : column + self.rows]
            start = self.first_key + column
            target = whole[:, start : start + (self.blocks - 1) * self.rows + part.shape[2]]
            if self.blocks == 1:
                target += part[:, 0]
            else:
                target.unflatten(1, (self.blocks, self.rows)).add_(part)


def whole_blocks(queries: int, keys: int, back: int, ahead: int) -> Band:
    """Band of the blocks whose slices lie inside the sequence; possibly empty."""
    before = keys - queries
    reach = -(-(back + ahead) // BLOCK) * BLOCK
    begin = max(0, -(-(reach - ahead - before) // BLOCK))
    end = max(begin, (queries - ahead) // BLOCK)
    return Band(begin * BLOCK, end - begin, before + begin * BLOCK + ahead, back + ahead)


def tiles(queries: int, keys: int, back: int, ahead: int, inside: Band, group: int | None) -> Iterator[Tile]:
    """Tiles of all queries: both ends of the sequence, and `group` inner blocks per tile unless None."""
    before = keys - queries
    if group is not None and keys < 2 * (back + ahead) and queries * keys <= _SMALL:
        yield Tile(0, queries, 1, 0, keys)
        return
    begin, end = inside.first, inside.first + inside.blocks * BLOCK
    for first, last in [(0, begin), (end, queries)] if inside.blocks else [(0, queries)]:
        for start in range(first, last, _EDGE):
            stop = min(start + _EDGE, last)
            low, high = max(before + start - back, 0), min(before + stop + ahead, keys)
            yield Tile(start, stop - start, 1, low, high - low)
    if group is not None:
        for block in range(0, inside.blocks, group):
            blocks, read = min(group, inside.blocks - block), inside.read(block, 1)
            yield Tile(inside.queries(block, 1).start, BLOCK, blocks, read.start, inside.width)


def window_bias(tile: Tile, before: int, back: int, ahead: int, like: Tensor) -> Tensor | None:
    """Score bias that masks keys outside the window, 0 or −inf, [rows keys]; None: all keys are inside."""
    lag = before + tile.start - tile.first_key
    if lag <= back - tile.rows + 1 and lag + ahead >= tile.keys - 1:
        return None
    hidden = like.new_full((tile.rows, tile.keys), -torch.inf, dtype=upcast_dtype(like.dtype))
    return hidden.triu(lag + ahead + 1) + hidden.tril(lag - back - 1)
