"""The backward pass of full linear attention with exponential features.

With p_tf = softmax_f(q_t·w_f + z_f), r_fj = softmax_j(k_j·w_f + b_j) and m_f = Σ_j r_fj v_j, the output is
Σ_f p_tf m_f. From g_t and δ_t = g_t·out_t follow, by exponents s_tf of queries and u_jf of keys,

    ∂s_tf = p_tf (g_t·m_f − δ_t),   M_f = Σ_t p_tf g_t,   ε_f = Σ_t p_tf δ_t,
    ∂u_jf = r_fj (v_j·M_f − ε_f),   ∂v_j = Σ_f r_fj M_f.
"""

import torch
from torch import Tensor

from efficient_attn.ops.linear.fast.exponentials import LOG2_E, Powers, power
from efficient_attn.ops.linear.inputs import Tokens
from efficient_attn.ops.linear.state import LinearState, finite

# Tokens at once: their features stay in cache.
_CHUNK = 128


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
