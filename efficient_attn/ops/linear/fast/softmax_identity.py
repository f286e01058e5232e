"""Full linear attention with exponential features as two softmaxes, through the fused kernel of the CPU.

With φ_f(q) = exp(q·w_f) and φ_f(k) = exp(k·w_f + b_k), b_k = −|k|²/2,

    Σ_f φ_f(q) Σ_j φ_f(k_j) v_j / Σ_f φ_f(q) Σ_j φ_f(k_j) = Σ_f softmax_f(q·w_f + z_f) m_f,
    z_f = log Σ_j exp(k_j·w_f + b_j),   m_f = Σ_j softmax_j(k_j·w_f + b_j) v_j:

attention of the directions to the keys, then of the queries to the directions. Features never exist, no
exponent is out of range, so that no guard is needed, and the state is one whose denominators are 1.

Backward, with p_tf = softmax_f(q_t·w_f + z_f), r_fj = softmax_j(k_j·w_f + b_j), the output is Σ_f p_tf m_f.
From g_t and δ_t = g_t·out_t follow, by exponents s_tf of queries and u_jf of keys,

    ∂s_tf = p_tf (g_t·m_f − δ_t),   M_f = Σ_t p_tf g_t,   ε_f = Σ_t p_tf δ_t,
    ∂u_jf = r_fj (v_j·M_f − ε_f),   ∂v_j = Σ_f r_fj M_f.
"""

import math

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import wide
from efficient_attn.ops.grouped_queries import fold, unfold
from efficient_attn.ops.linear.backward import Outputs, new_outputs
from efficient_attn.ops.linear.fast.exponentials import LOG2_E, Powers, power
from efficient_attn.ops.linear.inputs import Tokens
from efficient_attn.ops.linear.state import LinearState, finite, with_ones
from efficient_attn.ops.softmax import cpu_flash

# Tokens at once where they have to be converted or masked first; what needs neither goes in one piece.
# From 768 rows on the kernel takes 256 of them at a time instead of 64.
_PIECE = 768
# Tokens at once on the way back: their features stay in cache.
_CHUNK = 128


def suits(tokens: Tokens) -> bool:
    """Whether the features are exponential and the kernel takes these tensors."""
    return tokens.map.exponents is not None and cpu_flash.available(tokens.q, tokens.k, tokens.v)


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
    means, logarithm = cpu_flash.attend(w, k, v, bias.unsqueeze(-2), factor)
    if real is not None:
        logarithm = logarithm.masked_fill(~real.any(dim=-1, keepdim=True), -torch.inf)
    return means, logarithm


def _join(means: Tensor, log_sums: Tensor, others: Tensor, logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Means over the keys of both, and the logarithms of both sums together."""
    both = torch.logaddexp(log_sums, logarithms)
    reference = finite(both)
    share, other_share = ((x - reference).exp().unsqueeze(-1) for x in (log_sums, logarithms))
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
    out, logarithm = cpu_flash.attend(rows, w, means, log_sums.unsqueeze(-2), factor)
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


def two_softmaxes_gradients(
    tokens: Tokens, gradient: Tensor, out: Tensor, logarithm: Tensor, state: LinearState
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives by q, k and v.

    Args:
        gradient: By the output, [batch heads q_tokens value_dim].
        logarithm: Of each row's denominator, [batch heads q_tokens 1]; +inf: no key.
        state: Of all keys.
    """
    powers = Powers(tokens, in_turns=True)
    by_q, by_k, by_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tokens[:3])
    ones = state.sums[..., -1:]
    means = (state.sums[..., :-1] / ones.masked_fill(ones == 0, 1.0)).flatten(0, 1)
    sums = finite(state.log_scale + ones.mT.log()).mul_(LOG2_E).flatten(0, 1)
    by_means, slopes = torch.zeros_like(means), torch.zeros_like(means[..., :1])
    for part in _chunks(tokens.q):
        g = tokens.lists(gradient, part)
        slope = (g * tokens.lists(out, part)).sum(dim=-1, keepdim=True)
        rows, offset = tokens.lists(tokens.q, part), tokens.lists(logarithm, part).mul(-LOG2_E)
        p = power(powers.of_queries(rows, offset).add_(sums))
        by = torch.baddbmm(slope, g, means.mT, beta=-1, out=powers.room("derivatives", rows)).mul_(p)
        by_q[..., part, :] = tokens.unlist(powers.by_queries(by))
        by_means.baddbmm_(p.mT, g)
        slopes.baddbmm_(p.mT, slope)
    for part in _chunks(tokens.k):
        keys, v = tokens.key_lists(part), tokens.value_lists(part)
        r = power(powers.of_real_keys(keys, part).sub_(sums))
        by = torch.bmm(v, by_means.mT, out=powers.room("derivatives", keys)).sub_(slopes.mT).mul_(r)
        by_k[..., part, :] = powers.by_keys(keys, by).view_as(by_k[..., part, :])
        by_v[..., part, :] = torch.bmm(r, by_means).view_as(by_v[..., part, :])
    return by_q, by_k, by_v


def _chunks(x: Tensor) -> list[slice]:
    return [slice(start, start + _CHUNK) for start in range(0, x.shape[-2], _CHUNK)]
