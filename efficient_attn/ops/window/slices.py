"""Window attention in bfloat16 on a CPU with tiles: one call of fused attention per block of queries."""

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.paths import bfloat16_instructions, parts
from efficient_attn.ops.window.global_keys import GlobalKeys

# Queries of a block, and keys of the smallest window whose products are worth a call.
_BLOCK, _FEWEST_KEYS = 128, 129


def supports_slices(q: Tensor, back: int, ahead: int, key_mask: Tensor | None) -> bool:
    """Whether slices serve a call in inference: in float32, and without tiles, they are slower."""
    cpu = q.device.type == "cpu" and q.dtype is torch.bfloat16 and key_mask is None
    wide = back + ahead + 1 >= _FEWEST_KEYS
    return cpu and wide and not torch.compiler.is_compiling() and bfloat16_instructions() == "amx_bf16"


def sliced_window(
    q: Tensor, k: Tensor, v: Tensor, back: int, ahead: int, scale: float, first: GlobalKeys | None
) -> Tensor:
    """The output, each block of queries on the global keys and a slice of the keys."""
    q_tokens, k_tokens = q.shape[-2], k.shape[-2]
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    for rows in parts(q_tokens, _BLOCK):
        begin, end = rows.start + k_tokens - q_tokens, rows.stop + k_tokens - q_tokens
        keys = slice(max(begin - back, 0), min(end + ahead, k_tokens))
        age = torch.arange(begin, end)[:, None] - torch.arange(keys.start, keys.stop)
        visible = ((age <= back) & (age >= -ahead)).expand(len(q), 1, -1, -1)
        keys_read, values_read = k[..., keys, :], v[..., keys, :]
        if first is not None:
            far = torch.ones(*first.k.shape[:3:2], q_tokens, dtype=torch.bool)
            if first.far is not None:
                far = F.pad(first.far, (q_tokens - first.far.shape[-1], 0))
            visible = torch.cat([far[..., rows].mT.unsqueeze(1), visible], dim=-1)
            keys_read = torch.cat([first.k, keys_read], dim=-2)
            values_read = torch.cat([first.v, values_read], dim=-2)
        bias = q.new_zeros(visible.shape).masked_fill(~visible, -torch.inf)
        out[..., rows, :] = F.scaled_dot_product_attention(
            q[..., rows, :], keys_read, values_read, attn_mask=bias, scale=scale, enable_gqa=True
        )
    return out
