"""Full linear attention with trigonometric features, forward and backward, chunk by chunk and in place.

With F = [cos(w·x), sin(w·x)] for m directions w and s_j = exp(|k_j|²/2), relative to the largest, the
output is F(q_t)·Σ_j s_j F(k_j) v_j over the same sum without v: a query's own scale cancels.
"""

import torch
from torch import Tensor

from efficient_attn.ops.linear.backward import Outputs, new_outputs, output_gradients
from efficient_attn.ops.linear.fast.waves import Waves
from efficient_attn.ops.linear.inputs import Tokens
from efficient_attn.ops.linear.state import LinearState, exponential, finite, sees, with_ones

# Tokens at once: their features stay in cache, and on the way back their derivatives too.
_CHUNK, _CHUNK_BACK = 144, 112
# Tokens at once of which nothing but a scale is wanted.
_PIECE = 512


def trigonometric_attention(tokens: Tokens) -> tuple[Outputs, LinearState]:
    """The output of every query, and the state of all keys."""
    waves = Waves(tokens)
    state = _state(waves)
    sums, outputs = state.sums.flatten(0, 1), new_outputs(tokens.q, tokens.v)
    for part in _chunks(tokens.q, _CHUNK):
        rows = tokens.lists(tokens.q, part)
        found = torch.bmm(waves.of_queries(rows, rows.new_ones(())), sums)
        # The logarithms' place holds the denominators until all of them are there.
        out, ones = (tokens.grouped(x)[..., part, :] for x in outputs[:2])
        found = found.unflatten(0, tokens.k.shape[:2]).unflatten(2, (tokens.group, -1))
        torch.div(found[..., :-1], ones.copy_(found[..., -1:]), out=out)
    torch.lt(outputs.log_normaliser, 0, out=outputs.negative)
    logarithm = tokens.grouped(outputs.log_normaliser).abs_().log_().add_(state.log_scale.unsqueeze(2))
    if tokens.key_mask is not None:
        blind = ~sees(state).unsqueeze(2)
        tokens.grouped(outputs.out).masked_fill_(blind, 0.0)
        logarithm.masked_fill_(blind, torch.inf)
    return outputs, state


def _state(waves: Waves) -> LinearState:
    """The state of all keys."""
    tokens = waves.tokens
    scales = torch.cat([waves.log_scales(part) for part in _chunks(tokens.k, _PIECE)], dim=-2)
    reference = scales.amax(dim=-2, keepdim=True)
    weights = exponential(scales.sub_(finite(reference)))
    sums = weights.new_zeros(len(weights), 2 * waves.directions, tokens.v.shape[-1])
    ones = sums.new_zeros(*sums.shape[:-1], 1)
    for part in _chunks(tokens.k, _CHUNK):
        features = waves.of_keys(tokens.key_lists(part), weights[:, part])
        sums.baddbmm_(features.mT, tokens.value_lists(part))
        ones.add_(features.sum(dim=-2).unsqueeze(-1))
    both = torch.cat([sums, ones], dim=-1).div_(waves.directions)
    return LinearState(*(x.unflatten(0, tokens.k.shape[:2]) for x in (both, reference)))


def trigonometric_gradients(
    tokens: Tokens, gradient: Tensor, outputs: Outputs, state: LinearState
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives by q, k and v; `state` is that of all keys."""
    waves, kv_heads = Waves(tokens), tokens.k.shape[1]
    sums, reference = state.sums.flatten(0, 1), finite(state.log_scale)
    by_q, by_k, by_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tokens[:3])
    query_sums = torch.zeros_like(sums)
    for part in _chunks(tokens.q, _CHUNK_BACK):
        logarithm, sign = outputs.normaliser(part, kv_heads)
        factor = exponential(reference - logarithm).mul_(sign).flatten(0, 1)
        g = output_gradients(gradient, outputs.out, part, kv_heads).flatten(0, 1)
        features = waves.of_queries(tokens.lists(tokens.q, part), factor)
        by = torch.bmm(g, sums.mT, out=waves.room_like(features))
        by_q[..., part, :] = tokens.unlist(waves.by_queries(features, by))
        query_sums.baddbmm_(features.mT, g)
    query_sums.div_(waves.directions)
    for part in _chunks(tokens.k, _CHUNK_BACK):
        keys, factor = (
            tokens.key_lists(part),
            exponential(waves.log_scales(part).sub_(reference.flatten(0, 1))),
        )
        features = waves.of_keys(keys, factor)
        by_v[..., part, :] = torch.bmm(features, query_sums[..., :-1]).view_as(by_v[..., part, :])
        by = torch.bmm(with_ones(tokens.value_lists(part)), query_sums.mT, out=waves.room_like(features))
        by_keys = waves.by_keys(features, by)
        by_scale = features.mul_(by).sum(dim=-1, keepdim=True).mul_(abs(tokens.scale))
        by_keys.addcmul_(keys, by_scale)
        by_k[..., part, :] = by_keys.view_as(by_k[..., part, :])
    return by_q, by_k, by_v


def _chunks(x: Tensor, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, x.shape[-2], size)]
