"""Full linear attention with exponential features as two softmaxes, through the fused kernel of the CPU.

With φ_f(q) = exp(q·w_f) and φ_f(k) = exp(k·w_f + b_k), b_k = −|k|²/2,

    Σ_f φ_f(q) Σ_j φ_f(k_j) v_j / Σ_f φ_f(q) Σ_j φ_f(k_j) = Σ_f softmax_f(q·w_f + z_f) m_f,
    z_f = log Σ_j exp(k_j·w_f + b_j),   m_f = Σ_j softmax_j(k_j·w_f + b_j) v_j:

attention of the directions to the keys, then of the queries to the directions. Features never exist, no
exponent is out of range, so that no guard is needed, and the state is one whose denominators are 1.
"""

import math

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import wide
from efficient_attn.ops.grouped_queries import fold, unfold
from efficient_attn.ops.linear.backward import Outputs, new_outputs
from efficient_attn.ops.linear.inputs import Tokens
from efficient_attn.ops.linear.state import LinearState, with_ones
from efficient_attn.ops.softmax import cpu_flash as flash

# Tokens at once where they have to be converted or masked first; what needs neither goes in one piece.
# From 768 rows on the kernel takes 256 of them at a time instead of 64.
_PIECE = 768


def suits(tokens: Tokens) -> bool:
    """Whether the features are exponential and the kernel takes these tensors."""
    return tokens.map.exponents is not None and flash.available(tokens.q, tokens.k, tokens.v)


def two_softmaxes(tokens: Tokens) -> tuple[Outputs, LinearState]:
    """The output of every query, and the state of all keys."""
    means, log_sums = _mean_values(tokens)
    out = _read(tokens, means, log_sums)
    return out, LinearState(with_ones(means[..., : tokens.v.shape[-1]]), log_sums.unsqueeze(-2))


def _mean_values(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """m [batch kv_heads features dim] and z [batch kv_heads features]."""
    w, factor = tokens.exponents(), math.sqrt(abs(tokens.scale))
    w = _widen(w.expand(*tokens.k.shape[:2], *w.shape[-2:]), tokens)
    means, log_sums = None, None
    for part in _pieces(tokens.k, tokens, masked=tokens.key_mask is not None):
        some, logarithm = _mean_values_of(tokens, part, w, factor)
        if means is None or log_sums is None:
            means, log_sums = some, logarithm
        else:
            means, log_sums = _join(means, log_sums, some, logarithm)
    assert means is not None and log_sums is not None
    log_sums = log_sums - math.log(w.shape[-2]) / 2
    if tokens.log_weights is not None:
        log_sums = log_sums + tokens.log_weights.to(log_sums.dtype).squeeze(-2)
    return means, log_sums.contiguous()


def _mean_values_of(tokens: Tokens, part: slice, w: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """The means over some keys, and the logarithms of their sums."""
    k, v = (_widen(x, tokens) for x in (tokens.keys(part), tokens.values(part)))
    bias = torch.linalg.vector_norm(k, dim=-1).square_().mul_(-abs(tokens.scale) / 2)
    real = None if tokens.key_mask is None else tokens.key_mask[:, None, part]
    if real is not None:
        bias = bias.masked_fill_(~real, -torch.inf)
    means, logarithm = flash.attend(w, k, v, bias.unsqueeze(-2), factor)
    if real is not None:
        logarithm = logarithm.masked_fill(~real.any(dim=-1, keepdim=True), -torch.inf)
    return means, logarithm


def _join(means: Tensor, log_sums: Tensor, others: Tensor, logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Means over the keys of both, and the logarithms of both sums together."""
    both = torch.logaddexp(log_sums, logarithms)
    finite = both.masked_fill(both == -torch.inf, 0.0)
    share, other_share = ((x - finite).exp().unsqueeze(-1) for x in (log_sums, logarithms))
    return share * means + other_share * others, both


def _read(tokens: Tokens, means: Tensor, log_sums: Tensor) -> Outputs:
    """Attention of the queries to the directions, whose keys' means they read."""
    w = tokens.exponents()
    w = _widen(w.expand(*tokens.k.shape[:2], *w.shape[-2:]), tokens) * math.copysign(1.0, tokens.scale)
    pieces = _pieces(tokens.q, tokens, masked=False)
    # What comes in one piece in the right dtype is the output: no second one is filled from it.
    if len(pieces) == 1 and tokens.q.dtype is means.dtype:
        rows = _read_rows(tokens, pieces[0], w, means, log_sums)
        return Outputs(*(unfold(x, tokens.q.shape[1]).contiguous() for x in rows))
    outputs = new_outputs(tokens.q, tokens.v)
    for part in pieces:
        outputs.put(part, _read_rows(tokens, part, w, means, log_sums))
    return outputs


def _read_rows(tokens: Tokens, part: slice, w: Tensor, means: Tensor, log_sums: Tensor) -> Outputs:
    """The outputs of some queries, one list of rows per key head."""
    rows = _widen(fold(wide(tokens.q[..., part, :]), tokens.k.shape[1]), tokens)
    factor = math.sqrt(abs(tokens.scale))
    out, logarithm = flash.attend(rows, w, means, log_sums.unsqueeze(-2), factor)
    logarithm = logarithm.unsqueeze(-1)
    if tokens.key_mask is not None:
        blind = (log_sums == -torch.inf).all(dim=-1)[..., None, None]
        logarithm.masked_fill_(blind, torch.inf)
    return Outputs(out[..., : tokens.v.shape[-1]], logarithm, torch.zeros_like(logarithm, dtype=torch.bool))


def _pieces(x: Tensor, tokens: Tokens, *, masked: bool) -> list[slice]:
    length, untouched = x.shape[-2], x.dtype is wide(x[:0]).dtype and not masked
    if untouched and tokens.q.shape[-1] == tokens.v.shape[-1]:
        return [slice(0, length)]
    return [slice(start, min(start + _PIECE, length)) for start in range(0, length, _PIECE)]


def _widen(x: Tensor, tokens: Tokens) -> Tensor:
    """The kernel wants queries, keys and values equally wide; zeros change no product."""
    missing = max(tokens.q.shape[-1], tokens.v.shape[-1]) - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x
