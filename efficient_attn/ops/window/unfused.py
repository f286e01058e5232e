"""Window attention by PyTorch's operators, for other devices, transforms and derivatives of any order."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from efficient_attn.ops.dtypes import upcast, upcast_dtype, zero_masked
from efficient_attn.ops.operators import transformed
from efficient_attn.ops.paths import parts, product_dtype, step_capacity, tuned_for_cpu
from efficient_attn.ops.softmax.definition import softmax_over
from efficient_attn.ops.window.global_keys import WindowInputs, global_keys_of

# Queries that share one slice of keys; a block reads window + 63 keys.
_BLOCK = 64
# Blocks per step on the CPU, so that the scores of a step stay in cache.
_GROUP = 8


def unfused_window(inputs: WindowInputs) -> Tensor:
    """softmax(scale · q kᵀ) v over the keys i−back … i+ahead and global keys, for the last q_tokens rows."""
    (q, k, v, key_mask, back, ahead, scale), first = inputs[:7], global_keys_of(inputs)
    back, ahead = min(back, k.shape[-2]), min(ahead, k.shape[-2])
    tokens, before = q.shape[-2], k.shape[-2] - q.shape[-2]
    blocks = -(-tokens // _BLOCK)
    # Scores beyond 65 504 would overflow in float16.
    dtype = q.dtype if product_dtype(q) is torch.bfloat16 else upcast_dtype(q.dtype)
    # Keys from the first query's window to the last query's, padded outside the sequence.
    reach, left, right = back + ahead, back - before, blocks * _BLOCK - tokens + ahead
    keys, values = (
        F.pad(zero_masked(x, key_mask).to(dtype), (0, 0, left, right)).unfold(-2, _BLOCK + reach, _BLOCK).mT
        for x in (k, v)
    )
    real = key_mask if key_mask is not None else k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool)
    real = F.pad(real, (left, right)).unfold(-1, _BLOCK + reach, _BLOCK)
    rows = F.pad((upcast(q) * scale).to(dtype), (0, 0, 0, blocks * _BLOCK - tokens))
    rows = rows.unflatten(-2, (blocks, _BLOCK))
    # Row i of a block may read columns i … i+window−1 of its slice.
    band = torch.ones(_BLOCK, _BLOCK + reach, dtype=torch.bool, device=q.device).triu().tril(reach)
    # Scores, or slices of keys or values, of all heads.
    numbers = q.shape[0] * q.shape[1] * (_BLOCK + reach) * max(_BLOCK, q.shape[-1], v.shape[-1])
    group = _GROUP if tuned_for_cpu(q) else step_capacity(numbers)
    if first is not None:
        first_k, first_v = (x.to(dtype).unsqueeze(2) for x in (first.k, first.v))
        far = real.new_ones(len(k), first.k.shape[2], tokens) if first.far is None else first.far
        far = F.pad(far, (tokens - far.shape[2], blocks * _BLOCK - tokens)).mT.unflatten(1, (blocks, _BLOCK))
    # Recompute weights in the backward pass, since tokens · window weights of all steps would stay alive.
    again = torch.is_grad_enabled() and not (tuned_for_cpu(q) or transformed(q, k, v))
    outs = []
    for part in parts(blocks, group):
        arguments = [rows[:, :, part], keys[:, :, part], values[:, :, part], real[:, part], band]
        if first is not None:
            arguments += [first_k, first_v, far[:, part]]
        # No saved generator state: nothing is random, and a CUDA graph could not capture the copy.
        outs.append(
            checkpoint(_attend, *arguments, use_reentrant=False, preserve_rng_state=False)
            if again
            else _attend(*arguments)
        )
    return torch.cat(outs, dim=2).flatten(2, 3)[:, :, :tokens].to(q.dtype)


def _attend(rows: Tensor, keys: Tensor, values: Tensor, real: Tensor, band: Tensor, *first: Tensor) -> Tensor:
    """Attention of blocks [batch heads blocks block dim] to their slices [batch kv_heads blocks keys dim].

    Args:
        first: Global keys and values [batch kv_heads 1 count dim], and rows that read them, bool
            [batch blocks block count]; or none.
    """
    visible = real[:, None, :, None, None, :] & band
    if first:
        first_k, first_v, far = first
        # The global keys are the first columns of every slice.
        blocks = keys.shape[2]
        keys = torch.cat([first_k.expand(-1, -1, blocks, -1, -1), keys], dim=3)
        values = torch.cat([first_v.expand(-1, -1, blocks, -1, -1), values], dim=3)
        visible = torch.cat([far[:, None, :, None], visible], dim=-1)
    groups = (keys.shape[1], rows.shape[1] // keys.shape[1])
    # [batch kv_heads blocks group block dim]: the heads of a group read the same slice.
    rows = rows.unflatten(1, groups).transpose(2, 3)
    scores = (rows.flatten(3, 4) @ keys.mT).unflatten(3, rows.shape[3:5])
    weights = softmax_over(upcast(scores), visible).to(values.dtype)
    out = (weights.flatten(3, 4) @ values).unflatten(3, rows.shape[3:5])
    return out.transpose(2, 3).flatten(1, 2)
