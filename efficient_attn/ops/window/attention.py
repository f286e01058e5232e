"""Softmax attention over a window of neighbouring keys, in blocks of queries: O(tokens · window)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.operators import transformed
from efficient_attn.ops.paths import held, tuned_for_cpu
from efficient_attn.ops.softmax import cpu_flash
from efficient_attn.ops.softmax.definition import softmax_over
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.ops.window.operator import fused_window, fused_window_backward
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values

# Queries that share one slice of keys; a block reads window + 63 keys.
_BLOCK = 64
# Blocks per step on the CPU, so that the scores of a step stay in cache.
_GROUP = 8


def window_attention(
    q: Queries, k: Keys, v: Values, *, scale: float, back: int, ahead: int, key_mask: KeyMask | None
) -> Output:
    """softmax over the keys i−back … i+ahead (Vaswani et al. 2017, section 4, restricted self-attention).

    The queries are the last positions of the keys; `ahead` ends at the last key.
    """
    q_tokens, k_tokens = q.shape[-2], k.shape[-2]
    back, ahead = min(back, k_tokens), min(ahead, k_tokens)
    mapped = transformed(q, k, v)
    # The fused kernel of exact attention has no second derivatives, which the window promises.
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if not (mapped or trained) and back >= k_tokens - 1 and (ahead == 0 or ahead >= q_tokens - 1):
        return fused_attention(q, k, v, scale=scale, causal=ahead == 0, key_mask=key_mask, dropout=0.0)
    if mapped or not cpu_flash.available(q, k, v):
        return _unfused(q, k, v, key_mask, back, ahead, scale)
    if scale <= 0:
        q, scale = q * scale, 1.0
    value_dim, widest = v.shape[-1], max(q.shape[-1], v.shape[-1])
    # The kernel requires one width for all three; zero columns change no product.
    q, k, v = (x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    k, v = zero_masked(k, key_mask), zero_masked(v, key_mask)
    out, _ = fused_window(q, k, v, key_mask, back, ahead, scale)
    return out if value_dim == widest else out[..., :value_dim]


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, key_mask, ctx.back, ctx.ahead, ctx.scale = inputs
    ctx.save_for_backward(*output, q, k, v, key_mask)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple:
    if not torch.is_grad_enabled():
        found = fused_window_backward(grad_out, *ctx.saved_tensors, ctx.back, ctx.ahead, ctx.scale)
        return *found, None, None, None, None
    # Second derivatives exist for the unfused operators only.
    *_, q, k, v, key_mask = ctx.saved_tensors
    out = _unfused(q, k, v, key_mask, ctx.back, ctx.ahead, ctx.scale)
    wanted = [x for x in (q, k, v) if x.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, grad_out, create_graph=True))
    return *(next(found) if x.requires_grad else None for x in (q, k, v)), None, None, None, None


fused_window.register_autograd(_backward, setup_context=_keep)


def _unfused(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, back: int, ahead: int, scale: float
) -> Tensor:
    """Window attention by unfused operators, for other devices, transforms and derivatives of any order."""
    tokens, before = q.shape[-2], k.shape[-2] - q.shape[-2]
    blocks = -(-tokens // _BLOCK)
    # Keys from the first query's window to the last query's, padded outside the sequence.
    reach, left, right = back + ahead, back - before, blocks * _BLOCK - tokens + ahead
    keys, values = (
        F.pad(upcast(zero_masked(x, key_mask)), (0, 0, left, right)).unfold(-2, _BLOCK + reach, _BLOCK).mT
        for x in (k, v)
    )
    real = key_mask if key_mask is not None else k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool)
    real = F.pad(real, (left, right)).unfold(-1, _BLOCK + reach, _BLOCK)
    rows = F.pad(upcast(q) * scale, (0, 0, 0, blocks * _BLOCK - tokens)).unflatten(-2, (blocks, _BLOCK))
    band = _band(_BLOCK + reach, q.device)
    group = _group(q, v, _BLOCK + reach)
    out = torch.cat(
        [
            _blocks(rows[:, :, part], keys[:, :, part], values[:, :, part], real[:, part], band)
            for part in (slice(i, i + group) for i in range(0, blocks, group))
        ],
        dim=2,
    )
    return out.flatten(2, 3)[:, :, :tokens].to(q.dtype)


def _group(q: Tensor, v: Tensor, width: int) -> int:
    """Blocks per step: scores, or slices of keys or values, of all heads."""
    if tuned_for_cpu(q):
        return _GROUP
    return held(q.shape[0] * q.shape[1] * width * max(_BLOCK, q.shape[-1], v.shape[-1]))


def _blocks(rows: Tensor, keys: Tensor, values: Tensor, real: Tensor, band: Tensor) -> Tensor:
    """Attention of blocks [batch heads blocks block dim] to their slices [batch kv_heads blocks keys dim]."""
    groups = (keys.shape[1], rows.shape[1] // keys.shape[1])
    # [batch kv_heads blocks group block dim]: the heads of a group read the same slice.
    rows = rows.unflatten(1, groups).transpose(2, 3)
    scores = (rows.flatten(3, 4) @ keys.mT).unflatten(3, rows.shape[3:5])
    visible = real[:, None, :, None, None, :] & band
    out = (softmax_over(scores, visible).flatten(3, 4) @ values).unflatten(3, rows.shape[3:5])
    return out.transpose(2, 3).flatten(1, 2)


def _band(keys: int, device: torch.device) -> Tensor:
    """Row i of a block may read columns i … i+window−1 of its slice, bool [block keys]."""
    ones = torch.ones(_BLOCK, keys, dtype=torch.bool, device=device)
    return ones.triu().tril(keys - _BLOCK)
