"""Grouped-query attention: several query heads that share one key head."""

from torch import Tensor


def fold(x: Tensor, kv_heads: int) -> Tensor:
    """[batch heads tokens dim] as [batch kv_heads group·tokens dim]: group by group."""
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads)).flatten(2, 3)


def unfold(x: Tensor, heads: int) -> Tensor:
    """[batch kv_heads group·tokens dim] as [batch heads tokens dim], the inverse of `fold`."""
    group = heads // x.shape[1]
    return x.unflatten(2, (group, x.shape[2] // group)).flatten(1, 2)
