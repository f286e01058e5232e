"""Softmax attention over low-rank projections of keys and values (Linformer, Wang et al. 2020)."""

from typing import Any

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast_dtype, zero_masked
from efficient_attn.ops.paths import dynamic, parts, product_dtype, step_capacity, tuned_for_cpu
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.shapes import KeyMask, Keys, Output, Queries, Values

# Tokens per chunk on the CPU, in half precision and in the gradient of the mixtures.
_PIECE = 512


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

    Projected key r is divided by its share s_r = Σ_real |E_rj| / Σ_all |E_rj|, which keeps the scale of a
    mean for every key mask; a projected key of share 0 is masked.
    """
    heads = q.shape[1]
    keys, values = _mix(mix_keys, k, heads, key_mask), _mix(mix_values, v, heads, key_mask)
    return attend_projected(q, keys, values, scale=scale)


def attend_projected(
    q: Queries, keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor], *, scale: float
) -> Tensor:
    """Attention to projected keys and values, each with whether a row holds a real token."""
    (few_keys, alive), (few_values, alive_values) = keys, values
    alive = (alive & alive_values).expand(q.shape[0], -1, -1)
    few_values = few_values.masked_fill(~alive.unsqueeze(-1), 0.0)
    rows = [
        _read(q[..., part, :].to(few_keys.dtype), few_keys, few_values, alive, scale).to(q.dtype)
        for part in _pieces(q)
    ]
    if not rows:
        return q.new_zeros(*q.shape[:-1], few_values.shape[-1])
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-2)


def _pieces(x: Tensor) -> list[slice]:
    """One chunk of all tokens, or several where an upcast copy takes memory."""
    return _parts(x) if product_dtype(x) is not x.dtype else parts(x.shape[-2], max(x.shape[-2], 1))


def _parts(x: Tensor) -> list[slice]:
    """Chunks of as many tokens of [… tokens dim] as the device serves well."""
    size = _PIECE if tuned_for_cpu(x) else step_capacity(x.numel() // max(x.shape[-2], 1))
    return parts(x.shape[-2], size)


def _read(q: Tensor, few_keys: Tensor, few_values: Tensor, alive: Tensor, scale: float) -> Tensor:
    """Softmax attention to the projected keys that `alive` keeps, bool [batch 1|heads rank]."""
    if alive.shape[1] == 1:
        return fused_attention(
            q, few_keys, few_values, scale=scale, key_mask=alive.squeeze(1), dropout=0.0, zeroed=True
        )
    # Each head has its own projection and its own mask: a head becomes a batch entry.
    alone = (x.flatten(0, 1).unsqueeze(1) for x in (q, few_keys, few_values))
    out = fused_attention(*alone, scale=scale, key_mask=alive.flatten(0, 1), dropout=0.0, zeroed=True)
    return out.unflatten(0, q.shape[:2]).squeeze(2)


def _mix(mix: Tensor, x: Tensor, heads: int, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Projected rows [batch heads rank dim], and whether each holds a real token, bool [batch 1|heads rank].

    `mix` is [rank max_tokens] for all heads, or [heads rank max_tokens].
    """
    mix = mix.to(product_dtype(x))
    tokens = x.shape[-2]
    # The exporter assumes that a slice is shorter than the whole.
    used = mix[..., torch.arange(tokens, device=x.device)] if dynamic(tokens) else mix[..., :tokens]
    sums = row_sums(used, zero_masked(x, key_mask), heads)
    if key_mask is None and not dynamic(tokens) and used.shape[-1] == mix.shape[-1]:
        # All tokens are real, so every share is 1 except that of an all-zero row.
        alive = (mix.detach().abs().sum(dim=-1) > 0).unsqueeze(0)
        return sums, alive.unsqueeze(1) if mix.ndim == 2 else alive
    return rescaled(sums, mix, real_weight(used, key_mask))


def rescaled(sums: Tensor, mix: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over their shares of real tokens, and whether a share is positive.

    Args:
        real: Σ |E_rj| over real tokens j, [1|batch rank], or [1|batch heads rank] with one mixture per head.
    """
    weight = torch.linalg.vector_norm(mix, ord=1, dim=-1, dtype=real.dtype)
    share = real / torch.where(weight > 0, weight, 1.0)
    share = share.unsqueeze(1) if mix.ndim == 2 else share
    alive = share > 0
    return (sums / torch.where(alive, share, 1.0).unsqueeze(-1)).to(mix.dtype), alive


def real_weight(mix: Tensor, key_mask: Tensor | None) -> Tensor:
    """Σ over real tokens j of |E_rj|, [1|batch rank], or [1|batch heads rank] with one mixture per head."""
    dtype = upcast_dtype(mix.dtype)
    if key_mask is not None:
        return (mix.abs().to(dtype) @ key_mask.to(dtype).mT).movedim(-1, 0)
    return torch.linalg.vector_norm(mix, ord=1, dim=-1, dtype=dtype).unsqueeze(0)


def row_sums(mix: Tensor, x: Tensor, heads: int) -> Tensor:
    """E x, [batch heads rank dim], or [batch kv_heads rank dim] with one mixture for all heads."""
    if mix.ndim == 2:
        return _MixedRows.apply(mix, x.flatten(0, 1)).unflatten(0, x.shape[:2])
    # Each query head projects the keys of its group by its own pair.
    groups = (x.shape[1], heads // x.shape[1])
    mix = mix.unflatten(0, groups).flatten(1, 2)
    sums = None
    for part in _pieces(x):
        piece = mix[..., part] @ x[..., part, :].to(mix.dtype)
        sums = piece if sums is None else sums + piece
    if sums is None:
        sums = mix.new_zeros(*x.shape[:2], mix.shape[-2], x.shape[-1])
    return sums.unflatten(2, (groups[1], -1)).flatten(1, 2)


class _MixedRows(torch.autograd.Function):
    """Product of one matrix [rank tokens] with a batch of rows [flat_heads tokens dim].

    PyTorch's `matmul` would copy all rows into one matrix and save the copy for the backward pass; `bmm`
    would hold one gradient of the matrix per batch entry. Half-precision rows are saved as they are and
    upcast chunk by chunk.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(mix: Tensor, x: Tensor) -> Tensor:
        sums = None
        for part in _pieces(x):
            piece = torch.bmm(mix[:, part].expand(len(x), -1, -1), x[:, part].to(mix.dtype))
            sums = piece if sums is None else sums.add_(piece)
        return mix.new_zeros(len(x), len(mix), x.shape[-1]) if sums is None else sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        mix, x = ctx.saved_tensors
        grad_mix, grad_x = None, None
        if ctx.needs_input_grad[0]:
            grad_mix = grad_out.new_zeros(mix.shape)
            for part in _parts(x):
                piece = torch.tensordot(grad_out, x[:, part].to(mix.dtype), dims=([0, 2], [0, 2]))
                grad_mix[:, part].copy_(piece)
        if ctx.needs_input_grad[1]:
            rows = [torch.bmm(mix[:, part].mT.expand(len(x), -1, -1), grad_out) for part in _pieces(x)]
            grad_x = (
                rows[0].to(x.dtype) if len(rows) == 1 else torch.cat([y.to(x.dtype) for y in rows], dim=-2)
            )
        return grad_mix, grad_x
