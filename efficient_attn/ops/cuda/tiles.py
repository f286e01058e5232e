"""Tiles of the kernels: a default, and two alternatives for machines on which it fails its check."""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Sizes of the blocks that a program computes.

    Attributes:
        tokens: Tokens per chunk of the forward pass.
        features: Features per block of a chunk.
        grad_tokens: Tokens per chunk of the backward pass.
        query_features: Features per block of the gradients of queries.
        key_features: Features per block of the gradients of keys and values.
        key_stages: Blocks of features of these gradients that are loaded ahead.
        walk_features: Features per block of the walks over the states.
    """

    tokens: int
    features: int
    warps: int
    grad_tokens: int
    query_features: int
    key_features: int
    key_stages: int
    grad_warps: int
    walk_features: int
    walk_warps: int


# The fastest of a few on an H200. Warps of walks and blocks of keys are chosen so that no kernel spills.
_HOPPER = Tile(128, 64, 8, 64, 64, 16, 2, 4, 128, 8)
# Untested on GPUs: chosen by shared memory, 99 kB on consumer cards, and by registers.
_WIDE = Tile(128, 32, 8, 64, 32, 32, 2, 4, 64, 8)
_NARROW = Tile(64, 16, 4, 64, 16, 16, 1, 4, 32, 4)
SMALL = Tile(32, 16, 4, 32, 16, 16, 1, 4, 32, 4)
_FIRST = {(9, 0): _HOPPER, (10, 0): _WIDE}


def tiles(capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> tuple[Tile, ...]:
    """Tiles for heads of this many entries at most, the first choice first."""
    if dtype == torch.float32 or head_dim > 64:
        # Four warps do not hold the rows of wide heads in float32.
        wide = dtype == torch.float32 and head_dim > 64
        small = SMALL._replace(grad_warps=8, walk_warps=8) if wide else SMALL
        return small, small._replace(warps=8, grad_warps=8), small._replace(warps=2, grad_warps=2)
    first = _FIRST.get(capability, _NARROW)
    return first, *[tile for tile in (_NARROW, SMALL, _WIDE) if tile != first][:2]
