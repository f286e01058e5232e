"""Full linear attention with trigonometric features, forward and backward, chunk by chunk and in place.

With F = [cos(w·x), sin(w·x)] for m directions w and s_j = exp(|k_j|²/2), relative to the largest, the
output is F(q_t)·Σ_j s_j F(k_j) v_j over the same sum without v; a query's own scale cancels.

With t = tan(x/2), cos x = 2/(1 + t²) − 1 and sin x = 2t/(1 + t²): one transcendental function instead of
two, with an absolute error of a few roundings for every t.
"""

import math

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, upcast_dtype
from efficient_attn.ops.linear.inputs import LinearInputs, Outputs, Scratch, chunks, new_outputs
from efficient_attn.ops.linear.state import (
    LinearState,
    exponential,
    finite,
    output_gradients,
    sees,
    with_ones,
)
from efficient_attn.ops.paths import parts

# Tokens per chunk for scales alone.
CHUNK = 512
# Features per chunk of the backward pass, which holds gradients and angles too: its peak stays below 4 MiB.
_FEATURES_BACK = 7 * 2**15


class TrigKernel:
    """Cosines and sines of queries and keys, and the pullback of gradients through them.

    Batch and key heads form one dimension, `flat_heads`. The features omit their factor 1/√m; the key sums
    carry 1/m instead.
    """

    def __init__(self, inputs: LinearInputs) -> None:
        assert inputs.directions is not None and inputs.log_weights is None
        self.inputs, self._scratch = inputs, Scratch()
        w = upcast(inputs.directions).to(upcast_dtype(inputs.q.dtype)) * math.sqrt(abs(inputs.scale))
        # Half directions, for tan(x/2).
        self.keys = inputs.expand_to_heads(w / 2)
        self.queries = self.keys if inputs.scale > 0 else -self.keys
        self.directions = w.shape[-2]

    def log_scales(self, positions: slice) -> Tensor:
        """|k|²/2 of scaled keys, −inf for masked keys, [flat_heads positions 1]."""
        keys = self.inputs.real_rows(self.inputs.k, positions).flatten(0, 1)
        real = self.inputs.real(positions)
        scales = torch.linalg.vector_norm(keys, dim=-1, keepdim=True)
        scales = scales.square_().mul_(abs(self.inputs.scale) / 2)
        return scales if real is None else scales.masked_fill_(~real, -torch.inf)

    def buffer_like(self, features: Tensor) -> Tensor:
        """Scratch buffer for gradients of features, overwritten when features are computed."""
        return self._scratch("gradients", features, tuple(features.shape))

    def features(self, rows: Tensor, directions: Tensor, factor: Tensor) -> Tensor:
        """factor · [cos(w·x), sin(w·x)] of rows, [flat_heads rows 2m], for factor [flat_heads|1 rows|1 1]."""
        shape = (*rows.shape[:-1], self.directions)
        t = torch.bmm(rows, directions.mT, out=self._scratch("angles", rows, shape)).tan_()
        features = self._scratch("features", rows, (*shape[:-1], 2 * shape[-1]))
        cos, sin = features.chunk(2, dim=-1)
        plus = torch.addcmul(t.new_ones(()), t, t, out=self._scratch("gradients", rows, shape))
        torch.div(2 * factor, plus, out=plus)
        torch.sub(plus, factor, out=cos)
        torch.mul(plus, t, out=sin)
        return features

    def gradient(self, features: Tensor, grad_features: Tensor, directions: Tensor) -> Tensor:
        """Gradient with respect to rows at a fixed factor, from the gradient of features without it."""
        cos, sin = features.chunk(2, dim=-1)
        grad_cos, grad_sin = grad_features.chunk(2, dim=-1)
        grad = torch.mul(cos, grad_sin, out=self._scratch("angles", cos, tuple(cos.shape)))
        return torch.bmm(grad.addcmul_(sin, grad_cos, value=-1), directions).mul_(2)


def trigonometric_attention(inputs: LinearInputs) -> tuple[Outputs, LinearState]:
    kernel = TrigKernel(inputs)
    state = _state(kernel)
    sums, outputs = state.sums.flatten(0, 1), new_outputs(inputs.q, inputs.v)
    for part in chunks(inputs, inputs.q.shape[-2]):
        rows = inputs.flat_queries(part)
        sums_of_rows = torch.bmm(kernel.features(rows, kernel.queries, rows.new_ones(())), sums)
        # The buffer of the logarithms holds the denominators until all are known.
        out, ones = (inputs.grouped(x)[..., part, :] for x in outputs[:2])
        sums_of_rows = sums_of_rows.unflatten(0, inputs.k.shape[:2]).unflatten(2, (inputs.group, -1))
        torch.div(sums_of_rows[..., :-1], ones.copy_(sums_of_rows[..., -1:]), out=out)
    torch.lt(outputs.log_normaliser, 0, out=outputs.negative)
    logarithm = inputs.grouped(outputs.log_normaliser).abs_().log_().add_(state.log_scale.unsqueeze(2))
    if inputs.key_mask is not None:
        fully_masked = ~sees(state).unsqueeze(2)
        inputs.grouped(outputs.out).masked_fill_(fully_masked, 0.0)
        logarithm.masked_fill_(fully_masked, torch.inf)
    return outputs, state


def _state(kernel: TrigKernel) -> LinearState:
    inputs = kernel.inputs
    scales = torch.cat([kernel.log_scales(part) for part in parts(inputs.k.shape[-2], CHUNK)], dim=-2)
    reference = scales.amax(dim=-2, keepdim=True)
    weights = exponential(scales.sub_(finite(reference)))
    sums = weights.new_zeros(len(weights), 2 * kernel.directions, inputs.v.shape[-1])
    ones = sums.new_zeros(*sums.shape[:-1], 1)
    for part in chunks(inputs, inputs.k.shape[-2]):
        keys, v = inputs.flat_keys_and_values(part)
        features = kernel.features(keys, kernel.keys, weights[:, part])
        sums.baddbmm_(features.mT, v)
        ones.add_(features.sum(dim=-2).unsqueeze(-1))
    both = torch.cat([sums, ones], dim=-1).div_(kernel.directions)
    return LinearState(*(x.unflatten(0, inputs.k.shape[:2]) for x in (both, reference)))


def trigonometric_gradients(
    inputs: LinearInputs, grad_out: Tensor, outputs: Outputs, state: LinearState
) -> tuple[Tensor, Tensor, Tensor]:
    kernel, kv_heads = TrigKernel(inputs), inputs.k.shape[1]
    sums, reference = state.sums.flatten(0, 1), finite(state.log_scale)
    grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])
    query_sums = torch.zeros_like(sums)
    for part in chunks(inputs, inputs.q.shape[-2], _FEATURES_BACK):
        logarithm, sign = outputs.normaliser(part, kv_heads)
        factor = exponential(reference - logarithm).mul_(sign).flatten(0, 1)
        g = output_gradients(grad_out, outputs.out, part, kv_heads).flatten(0, 1)
        features = kernel.features(inputs.flat_queries(part), kernel.queries, factor)
        grad = torch.bmm(g, sums.mT, out=kernel.buffer_like(features))
        grad_q[..., part, :] = inputs.unflatten_heads(kernel.gradient(features, grad, kernel.queries))
        query_sums.baddbmm_(features.mT, g)
    query_sums.div_(kernel.directions)
    for part in chunks(inputs, inputs.k.shape[-2], _FEATURES_BACK):
        keys, v = inputs.flat_keys_and_values(part)
        factor = exponential(kernel.log_scales(part).sub_(reference.flatten(0, 1)))
        features = kernel.features(keys, kernel.keys, factor)
        grad_v[..., part, :] = torch.bmm(features, query_sums[..., :-1]).view_as(grad_v[..., part, :])
        grad = torch.bmm(with_ones(v), query_sums.mT, out=kernel.buffer_like(features))
        grad_keys = kernel.gradient(features, grad, kernel.keys)
        grad_scale = features.mul_(grad).sum(dim=-1, keepdim=True).mul_(abs(inputs.scale))
        grad_keys.addcmul_(keys, grad_scale)
        grad_k[..., part, :] = grad_keys.view_as(grad_k[..., part, :])
    return grad_q, grad_k, grad_v
