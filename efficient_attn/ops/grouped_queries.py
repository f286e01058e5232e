"""Grouped-query attention: several query heads that share one key head."""

import torch
from torch import Tensor

from efficient_attn.ops.paths import dynamic


def fold(x: Tensor, kv_heads: int) -> Tensor:
    """[batch heads tokens dim] as [batch kv_heads group·tokens dim]: group by group."""
    if x.shape[1] == kv_heads:
        return x
    groups = x.unflatten(1, (kv_heads, x.shape[1] // kv_heads))
    # The exporter cannot compare strides of a dynamic width.
    return torch.cat(groups.unbind(2), dim=2) if dynamic(x.shape[-1]) else groups.flatten(2, 3)


def unfold(x: Tensor, heads: int) -> Tensor:
    """[batch kv_heads group·tokens dim] as [batch heads tokens dim], the inverse of `fold`."""
    group = heads // x.shape[1]
    if group == 1:
        return x
    return x.unflatten(2, (group, x.shape[2] // group)).flatten(1, 2)
