"""The state of attention that reads keys themselves: the keys and values seen so far."""

from typing import NamedTuple

import torch
from torch import Tensor


class KVCache(NamedTuple):
    """Keys and values seen so far; states of consecutive tokens merge by joining.

    Attributes:
        k: [batch kv_heads seen head_dim].
        v: [batch kv_heads seen value_dim].
        key_mask: bool [batch seen], True for a real token.
    """

    k: Tensor
    v: Tensor
    key_mask: Tensor


def summarise_tokens(k: Tensor, v: Tensor, key_mask: Tensor | None) -> KVCache:
    """The state of some tokens."""
    if key_mask is None:
        key_mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    return KVCache(k, v, key_mask)


def merge_tokens(one: KVCache | None, other: KVCache) -> KVCache:
    """The state after the tokens of both, in this order, in memory of its own."""
    if one is None:
        return KVCache(*(_own(x) for x in other))
    return KVCache(
        torch.cat([one.k, other.k], dim=-2),
        torch.cat([one.v, other.v], dim=-2),
        torch.cat([one.key_mask, other.key_mask], dim=-1),
    )


def last_tokens(state: KVCache, tokens: int) -> KVCache:
    """The state of the most recent tokens only, in memory of its own."""
    start = max(state.k.shape[-2] - tokens, 0)
    k, v = state.k[..., start:, :], state.v[..., start:, :]
    return KVCache(_own(k), _own(v), _own(state.key_mask[:, start:]))


def _own(x: Tensor) -> Tensor:
    """A copy that no caller can write to, and that keeps no larger buffer alive."""
    return x.clone(memory_format=torch.contiguous_format)
