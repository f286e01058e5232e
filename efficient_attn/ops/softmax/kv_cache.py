"""KV cache, the streaming state of softmax attention."""

from typing import NamedTuple

import torch
from torch import Tensor


class KVCache(NamedTuple):
    """Keys and values of the past tokens; caches of consecutive tokens merge by concatenation.

    Attributes:
        k: [batch kv_heads tokens head_dim].
        v: [batch kv_heads tokens value_dim].
        key_mask: bool [batch tokens], True for a real token.
    """

    k: Tensor
    v: Tensor
    key_mask: Tensor


def summarise_tokens(k: Tensor, v: Tensor, key_mask: Tensor | None) -> KVCache:
    """The cache of some tokens."""
    if key_mask is None:
        key_mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    return KVCache(k, v, key_mask)


def merge_tokens(one: KVCache | None, other: KVCache) -> KVCache:
    """The cache after the tokens of both, in this order, in new memory."""
    if one is None:
        return KVCache(*(_own(x) for x in other))
    return KVCache(
        torch.cat([one.k, other.k], dim=-2),
        torch.cat([one.v, other.v], dim=-2),
        torch.cat([one.key_mask, other.key_mask], dim=-1),
    )


def last_tokens(state: KVCache, tokens: int) -> KVCache:
    """The cache of the most recent tokens, in new memory."""
    start = max(state.k.shape[-2] - tokens, 0)
    k, v = state.k[..., start:, :], state.v[..., start:, :]
    return KVCache(_own(k), _own(v), _own(state.key_mask[:, start:]))


def _own(x: Tensor) -> Tensor:
    """A copy, which no caller can write to and which keeps no larger buffer alive."""
    return x.clone(memory_format=torch.contiguous_format)
