"""Softmax attention over a few learned mixtures of keys and values (Wang et al. 2020, Linformer)."""

from typing import Any

import torch
from torch import Tensor

from efficient_attn.ops.fused import fused_attention
from efficient_attn.ops.precision import hide, wide_dtype
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values


def linformer_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mix_keys: Tensor,
    mix_values: Tensor,
    scale: float,
    key_mask: KeyMask | None,
) -> Output:
    """softmax(scale · q (E k)ᵀ) F v (Wang et al. 2020, eq. 7), E and F [… rank max_tokens].

    Mixture r is divided by its share s_r = Σ_real |E_rj| / Σ_all |E_rj|, so that it stays an average
    of the same size whatever part of its tokens is real; one with share 0 takes no part.
    """
    dtype, heads = wide_dtype(q.dtype), q.shape[1]
    few_keys, alive = _mix(mix_keys.to(dtype), hide(k, key_mask).to(dtype), heads, key_mask)
    few_values, alive_values = _mix(mix_values.to(dtype), hide(v, key_mask).to(dtype), heads, key_mask)
    alive = (alive & alive_values).expand(q.shape[0], -1, -1)
    few_values = few_values.masked_fill(~alive.unsqueeze(-1), 0.0)
    inputs = (q.to(dtype), few_keys, few_values)
    if alive.shape[1] == 1:
        out = fused_attention(*inputs, scale=scale, key_mask=alive.squeeze(1), dropout=0.0, hidden=True)
        return out.to(q.dtype)
    # Each head has mixtures of its own, dead ones among them: a head is a batch entry here.
    alone = (x.flatten(0, 1).unsqueeze(1) for x in inputs)
    out = fused_attention(*alone, scale=scale, key_mask=alive.flatten(0, 1), dropout=0.0, hidden=True)
    return out.unflatten(0, q.shape[:2]).squeeze(2).to(q.dtype)


def _mix(mix: Tensor, x: Tensor, heads: int, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mixtures [batch heads rank dim] and which of them hold a real token, bool [batch 1|heads rank].

    `mix` is [rank max_tokens] for all heads, or [heads rank max_tokens].
    """
    used = mix[..., : x.shape[-2]]
    share = _share(mix, used, key_mask)
    if mix.ndim == 3:
        # Each head of queries mixes the keys of its group by a pair of its own.
        grouped = used.unflatten(0, (x.shape[1], heads // x.shape[1])).flatten(1, 2)
        mixed = (grouped @ x).unflatten(2, (heads // x.shape[1], mix.shape[-2])).flatten(1, 2)
    else:
        mixed = _MixAlike.apply(used, x.flatten(0, 1)).unflatten(0, x.shape[:2])
    alive = share > 0
    return mixed / torch.where(alive, share, 1.0).unsqueeze(-1), alive


class _MixAlike(torch.autograd.Function):
    """One matrix [rank tokens] times every list of rows [lists tokens dim].

    Left to itself torch copies all rows side by side to multiply them at once, and keeps the copy for the
    backward pass; a batch of products would take a gradient of the matrix for every list.
    """

    @staticmethod
    def forward(mix: Tensor, x: Tensor) -> Tensor:
        return torch.bmm(mix.expand(len(x), -1, -1), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        mix, x = ctx.saved_tensors
        by_mix, by_x = None, None
        if ctx.needs_input_grad[0]:
            by_mix = torch.zeros_like(mix)
            for one, other in zip(gradient, x, strict=True):
                by_mix = by_mix.addmm(one, other.mT)
        if ctx.needs_input_grad[1]:
            by_x = torch.bmm(mix.mT.expand(len(x), -1, -1), gradient)
        return by_mix, by_x


def _share(mix: Tensor, used: Tensor, key_mask: Tensor | None) -> Tensor:
    """Σ over real j of |E_rj| over Σ over all j of |E_rj|, [1|batch 1|heads rank]."""
    total = torch.linalg.vector_norm(mix, ord=1, dim=-1)
    if key_mask is None:
        real = torch.linalg.vector_norm(used, ord=1, dim=-1).unsqueeze(0)
    else:
        real = (used.abs() @ key_mask.to(mix.dtype).mT).movedim(-1, 0)
    share = real / torch.where(total > 0, total, 1.0)
    return share.unsqueeze(1) if mix.ndim == 2 else share
