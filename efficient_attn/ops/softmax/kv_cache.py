"""KV cache, the streaming state of softmax attention, in buffers with spare capacity.

A decoding step appends its keys and values in place, without a copy of the past. A storage
records how much of it is filled. Only a state that ends there owns the spare capacity; any other state is
copied, so that a state can be extended twice. Without a record (after pickling, indexing or a move to another
device) the next step copies.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import zero_masked
from efficient_attn.ops.operators import transformed

# Attribute of a storage, a `_Filled`.
_RECORD = "_efficient_attn_filled"
# Largest ratio of a buffer to the tokens that a window keeps of it.
_SPARE = 2
# A full buffer of n tokens is copied to one with room for n / 8 more: 9/8 of the memory, and 8 copied tokens
# per step, which reads n. Short buffers get room for 64 tokens, or for as many again as they hold.
_SHARE, _ROOM = 8, 64


class KVCache(NamedTuple):
    """Keys and values of the past tokens, views of buffers with spare capacity.

    A buffer of n tokens has capacity for at most max(n / 8, 64) more, and for at most n more.

    Attributes:
        k: [batch kv_heads tokens head_dim], zero where masked.
        v: [batch kv_heads tokens value_dim], zero where masked.
        key_mask: bool [batch tokens], True for a real token. One expanded byte until a call has a mask.
    """

    k: Tensor
    v: Tensor
    key_mask: Tensor


class _Filled(NamedTuple):
    """Shape and strides of a buffer [… capacity dim], and how many tokens were written to it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tokens: int


def mask_of(state: KVCache) -> Tensor | None:
    """`key_mask`, or None if no call had one. The answer needs no synchronisation with the device."""
    # The mask of a caller is copied, and a copy has a stride.
    return None if state.key_mask.stride() == (0, 0) else state.key_mask


def summarise_tokens(k: Tensor, v: Tensor, key_mask: Tensor | None) -> KVCache:
    if key_mask is None:
        true = torch.ones((), dtype=torch.bool, device=k.device)
        return KVCache(k, v, true.as_strided((k.shape[0], k.shape[2]), (0, 0)))
    return KVCache(zero_masked(k, key_mask), zero_masked(v, key_mask), key_mask)


def append_tokens(state: KVCache | None, k: Tensor, v: Tensor, key_mask: Tensor | None) -> KVCache:
    """The cache after the tokens of a state and new tokens, in memory of its own."""
    if state is None:
        new = summarise_tokens(k, v, key_mask)
        return KVCache(_copy(new.k), _copy(new.v), new.key_mask if key_mask is None else _copy(key_mask))
    if key_mask is None and mask_of(state) is None:
        mask = state.key_mask.as_strided((k.shape[0], state.k.shape[2] + k.shape[2]), (0, 0))
        return KVCache(append(state.k, k), append(state.v, v), mask)
    new = summarise_tokens(k, v, key_mask)
    mask = append(state.key_mask.unsqueeze(-1), new.key_mask.unsqueeze(-1)).squeeze(-1)
    return KVCache(append(state.k, new.k), append(state.v, new.v), mask)


def last_tokens(state: KVCache, tokens: int) -> KVCache:
    """The cache of the last `tokens` tokens: views if the buffers are hardly larger, otherwise copies."""
    start = max(state.k.shape[-2] - tokens, 0)
    k, v = (_compact(x[..., start:, :]) for x in state[:2])
    mask = state.key_mask[:, start:]
    return KVCache(k, v, mask if mask_of(state) is None else _compact(mask.unsqueeze(-1)).squeeze(-1))


def _compact(x: Tensor) -> Tensor:
    """`x` itself if it is a large part of a buffer, otherwise a copy."""
    if _recorded(x) and _record(x) and x.untyped_storage().nbytes() <= _SPARE * x.nbytes:
        return x
    return _copy(x)


def _copy(x: Tensor) -> Tensor:
    """Copy that no caller can modify and that keeps no larger buffer alive."""
    return x.clone(memory_format=torch.contiguous_format)


def append(x: Tensor, new: Tensor) -> Tensor:
    """`x` [… tokens dim] followed by `new`: in place behind `x` if it owns enough spare capacity."""
    tokens, (*batch, added, dim) = x.shape[-2], new.shape
    trained = torch.is_grad_enabled() and (x.requires_grad or new.requires_grad)
    # A copy into a buffer would broadcast or convert where a concatenation raises or promotes.
    fits = x.shape[:-2] == new.shape[:-2] and x.shape[-1] == dim and x.dtype == new.dtype
    if trained or not (fits and x.device == new.device and _recorded(x) and _recorded(new)):
        return torch.cat([x, new], dim=-2)
    record = _record(x)
    if record is not None and record.tokens + added <= record.shape[-2]:
        # A backward pass may have saved the past tokens; `data` has a version counter of its own.
        buffer = x.data
    else:
        room = min(tokens, max(tokens // _SHARE, _ROOM))
        buffer = x.new_empty(*batch, tokens + max(added, room), dim)
        buffer.narrow(-2, 0, tokens).copy_(x)
        record = _Filled(tuple(buffer.shape), buffer.stride(), tokens)
    # The buffer may be any view of its storage.
    row, start = record.strides[-2], record.tokens - tokens
    buffer.as_strided(new.shape, record.strides, record.tokens * row).copy_(new)
    setattr(buffer.untyped_storage(), _RECORD, record._replace(tokens=record.tokens + added))
    return buffer.as_strided((*batch, tokens + added, dim), record.strides, start * row)


def _recorded(x: Tensor) -> bool:
    """Whether a tensor's storage can carry a record: outside compilers, transforms and subclasses."""
    return type(x) is Tensor and not torch.compiler.is_compiling() and not transformed(x)


def _record(x: Tensor) -> _Filled | None:
    """The record of a buffer, if `x` [… tokens dim] holds the last of its tokens, or None."""
    record: _Filled | None = getattr(x.untyped_storage(), _RECORD, None)
    if record is None or x.numel() == 0 or (x.is_inference() and not torch.is_inference_mode_enabled()):
        return None
    alike = x.stride() == record.strides and x.shape[:-2] == record.shape[:-2]
    ends = x.storage_offset() + x.shape[-2] * x.stride(-2) == record.tokens * x.stride(-2)
    return record if alike and ends and x.shape[-1] == record.shape[-1] else None
