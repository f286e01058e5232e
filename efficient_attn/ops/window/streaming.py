"""Streaming state of a window with global tokens: constant memory, whatever the length."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import zero_masked
from efficient_attn.ops.operators import transformed
from efficient_attn.ops.softmax.kv_cache import (
    KVCache,
    append,
    append_tokens,
    last_tokens,
    mask_of,
    summarise_tokens,
)
from efficient_attn.ops.window.global_keys import AgedKeys, GlobalKeys, tokens_at


class WindowState(NamedTuple):
    """Global keys of a stream, and a `KVCache` of its last tokens, where global keys are masked or absent.

    After `slide_window`, k and v are [last tokens, global tokens, newer tokens], and as many of the oldest
    tokens as there are newer ones have left the window. The length of `key_mask` is that of the window.

    Attributes:
        first_k: [batch kv_heads count head_dim], arbitrary where not real.
        first_v: [batch kv_heads count value_dim].
        first_real: Whether the stream already has this global token, bool [batch count].
    """

    k: Tensor
    v: Tensor
    key_mask: Tensor
    first_k: Tensor
    first_v: Tensor
    first_real: Tensor


def extend_window(
    state: WindowState | None, k: Tensor, v: Tensor, key_mask: Tensor | None, *, count: int, back: int
) -> tuple[KVCache, GlobalKeys | None, WindowState]:
    """Keys that new tokens read, and the state after them, with `count` global tokens.

    Returns:
        A cache for the window, the global keys outside it (None while the cache is the whole sequence), and
        the next state.
    """
    if state is not None and state.k.shape[2] > state.key_mask.shape[1]:
        keys = _without_global(state.k, state.first_k, back)
        state = state._replace(k=keys, v=_without_global(state.v, state.first_v, back))
    masked = key_mask is not None and k.shape[2] > 0
    if masked or (state is not None and mask_of(KVCache(*state[:3])) is not None):
        return _extend_masked(state, k, v, key_mask, count, back)
    if state is not None and state.first_k.shape[2] == count:
        cache = append_tokens(KVCache(*state[:3]), k, v, None)
        after = state._replace(**last_tokens(cache, back)._asdict())
        return cache, GlobalKeys(state.first_k, state.first_v, None), after
    if state is not None:
        # So far all tokens are global.
        k, v = torch.cat([state.first_k, k], dim=2), torch.cat([state.first_v, v], dim=2)
    whole = summarise_tokens(k, v, None)
    rest = KVCache(k[:, :, count:], v[:, :, count:], whole.key_mask[:, count:])
    first_k, first_v = (x[:, :, :count].clone(memory_format=torch.contiguous_format) for x in (k, v))
    real = k.new_ones(len(k), first_k.shape[2], dtype=torch.bool)
    return whole, None, WindowState(*last_tokens(rest, back), first_k, first_v, real)


def hide_tokens(state: KVCache | WindowState, read: Tensor, shown: Tensor) -> KVCache | WindowState | None:
    """The state with past tokens masked that were `read` and are not `shown`, both bool [batch tokens].

    Returns:
        None if a global token is hidden: the real token that would take its place may have been dropped.
    """
    k, v, back = state.k, state.v, state.key_mask.shape[1]
    if isinstance(state, WindowState):
        if (read & ~shown & (read.cumsum(dim=1) <= state.first_k.shape[2])).any():
            return None
        k, v = _without_global(k, state.first_k, back), _without_global(v, state.first_v, back)
    mask = state.key_mask & shown[:, shown.shape[1] - back :]
    return state._replace(**summarise_tokens(k, v, mask)._asdict())


def slide_window(
    state: KVCache | WindowState, q: Tensor, k: Tensor, v: Tensor, *, back: int
) -> tuple[Tensor, Tensor, KVCache | WindowState] | None:
    """Keys and values that a new token reads, in any order, and the next state, without copies of the past.

    Returns:
        None before the window is full, with masked keys or derivatives, and in compiled code.
    """
    full = k.shape[2] == 1 and state.key_mask.shape[1] == back > 0 and mask_of(KVCache(*state[:3])) is None
    tensors = q, k, v, state.k, state.v
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if not full or trained or torch.compiler.is_compiling() or transformed(*tensors):
        return None
    if not isinstance(state, WindowState):
        keys, values = append(state.k, k), append(state.v, v)
        return keys, values, KVCache(keys.narrow(2, 1, back), values.narrow(2, 1, back), state.key_mask)
    all_k, all_v = _slide(state.k, k, state.first_k, back), _slide(state.v, v, state.first_v, back)
    rows = back + state.first_k.shape[2] + 1
    start = all_k.shape[2] - rows
    keys, values = all_k.narrow(2, start, rows), all_v.narrow(2, start, rows)
    return keys, values, WindowState(all_k, all_v, *state[2:])


def _slide(x: Tensor, new: Tensor, first: Tensor, back: int) -> Tensor:
    """Keys or values of a `WindowState` and a new token, with global keys in between."""
    # The order of the keys depends only on the shape of a state, so its continuations are bitwise equal.
    if not 0 <= x.shape[2] - back - first.shape[2] < back:
        x = torch.cat([_without_global(x, first, back), first], dim=2)
    return append(x, new)


def _without_global(x: Tensor, first: Tensor, back: int) -> Tensor:
    """The last tokens of keys or values of a `WindowState`."""
    end = back + first.shape[2]
    return x if x.shape[2] <= back else torch.cat([x[:, :, x.shape[2] - end : back], x[:, :, end:]], dim=2)


def _extend_masked(
    state: WindowState | None, k: Tensor, v: Tensor, key_mask: Tensor | None, count: int, back: int
) -> tuple[KVCache, GlobalKeys, WindowState]:
    tokens = k.shape[2]
    real = k.new_ones(len(k), tokens, dtype=torch.bool) if key_mask is None else key_mask
    if state is None:
        none = k[:, :, :0], v[:, :, :0], real[:, :0]
        state = WindowState(*none, *none)
    *past, first_k, first_v, stored = state
    missing = count - stored.shape[1]
    first_k, first_v = (F.pad(x, (0, 0, 0, missing)) for x in (first_k, first_v))
    stored = F.pad(stored, (0, missing))
    number = torch.arange(count, device=k.device) - stored.sum(dim=-1, keepdim=True)
    rank = real.cumsum(dim=-1)
    # Positions of the global tokens among the new ones, 0 for earlier ones and `tokens` where there is none.
    at = (rank[:, None] <= number[..., None]).sum(dim=-1)
    row = stored[:, None, :, None]
    index = at.clamp(0, tokens - 1)
    first_k, first_v = (
        torch.where(row, x, tokens_at(zero_masked(new, real), index))
        for x, new in ((first_k, k), (first_v, v))
    )
    near = real & (rank > number[:, -1:] + 1)
    cache = append_tokens(KVCache(*past), k, v, near)
    far = at[..., None] <= torch.arange(tokens, device=k.device)
    after = WindowState(*last_tokens(cache, back), first_k, first_v, at < tokens)
    return cache, GlobalKeys(first_k, first_v, far), after


def state_of(cache: KVCache, first: AgedKeys, *, tokens: int) -> WindowState:
    """The state after a prefill of `tokens` tokens, with global keys aged from the end of the cache."""
    count, length = min(first.k.shape[2], tokens), cache.k.shape[2]
    if mask_of(cache) is None:
        rest = last_tokens(cache, min(length, tokens - count))
        keys, values = first.k[:, :, :count], first.v[:, :, :count]
        return WindowState(*rest, keys, values, first.age[:, :count] > 0)
    column = torch.arange(length, 0, -1, device=first.age.device)
    near = cache.key_mask & ~(first.age[..., None] == column).any(dim=1)
    return WindowState(*summarise_tokens(cache.k, cache.v, near), first.k, first.v, first.age > 0)
