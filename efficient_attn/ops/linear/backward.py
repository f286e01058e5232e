"""Shared parts of the backward passes of full and causal linear attention.

With p_tj the normalised weight of key j in row t and δ_t = g_t·out_t, the gradient with respect to the
unnormalised weight is (g_t·v_j − δ_t) / normaliser_t: the product of [g_t, −δ_t] with [v_j, 1]. The same
recurrence run over queries, with normalised query features and [g, −δ] in place of [v, 1], gives the
key and value gradients.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast
from efficient_attn.ops.grouped_queries import fold, unfold
from efficient_attn.ops.linear.features import Features
from efficient_attn.ops.linear.state import exponential, finite


class Scaled(NamedTuple):
    """Features relative to a reference that keeps them in range.

    Attributes:
        weights: [… rows features].
        scale: Factor between the map's values and `weights`, [… rows 1]; None for a positive map.
    """

    weights: Tensor
    scale: Tensor | None


class Outputs(NamedTuple):
    """Results of a forward pass: the output and, for the backward pass, the normaliser of each row.

    Attributes:
        out: [batch heads q_tokens value_dim], in the dtype of q.
        log_normaliser: Logarithm of |Σ_j φ(q)·φ(k_j)|, [batch heads q_tokens 1]; +inf: no key.
        negative: Whether that sum is negative, bool [batch heads q_tokens 1].
    """

    out: Tensor
    log_normaliser: Tensor
    negative: Tensor

    def put(self, part: slice, rows: "Outputs") -> None:
        """Write the rows of a chunk, grouped by key head."""
        for whole, some in zip(self, rows, strict=True):
            whole[..., part, :] = unfold(some, whole.shape[1])

    def normaliser(self, part: slice, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Log normalisers and signs (1 or −1) of the rows, grouped by key head."""
        logarithm, negative = (fold(x[..., part, :], kv_heads) for x in self[1:])
        return logarithm, torch.where(negative, -1.0, 1.0).to(logarithm)


class CausalGradients(NamedTuple):
    """Gradients of causal attention after the keys of a state.

    Attributes:
        q: [batch heads q_tokens head_dim].
        k: [batch kv_heads k_tokens head_dim].
        v: [batch kv_heads k_tokens value_dim].
        past_sums: Of the sums of that state, [batch kv_heads features value_dim+1]; None: not wanted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    past_sums: Tensor | None


def new_outputs(q: Tensor, v: Tensor) -> Outputs:
    """Uninitialised outputs of queries q over values v."""
    shape = q.shape[:-1]
    logarithm = upcast(q.new_empty(0)).new_empty(*shape, 1)
    return Outputs(q.new_empty(*shape, v.shape[-1]), logarithm, torch.empty_like(logarithm, dtype=torch.bool))


def at_reference(features: Features, offset: Tensor) -> Scaled:
    """Features times exp(offset)."""
    scale = exponential(features.log_scale + offset)
    return Scaled(scale, None) if features.values is None else Scaled(scale * features.values, scale)


def normalised(queries: Features, reference: Tensor, logarithm: Tensor, sign: Tensor) -> Scaled:
    """Query features at `reference` over the row's normaliser; zeros for a fully-masked row."""
    weights, scale = at_reference(queries, finite(reference) - logarithm)
    return Scaled(weights * sign, None if scale is None else scale * sign)


def feature_gradients(scaled: Scaled, grad_weights: Tensor) -> Features:
    """Gradients with respect to logarithmic scale and values, from the gradient of the weights."""
    grad_log_scale = scaled.weights * grad_weights
    if scaled.scale is None:
        return Features(grad_log_scale, None)
    return Features(grad_log_scale.sum(dim=-1, keepdim=True), scaled.scale * grad_weights)


def output_gradients(grad_out: Tensor, out: Tensor, part: slice, kv_heads: int) -> Tensor:
    """[g, −δ] of a chunk, [batch kv_heads group·part value_dim+1]."""
    g, out = (fold(upcast(x[..., part, :]), kv_heads) for x in (grad_out, out))
    return torch.cat([g, -(g * out).sum(dim=-1, keepdim=True)], dim=-1)


def keep_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Save the inputs, the output and each row's normaliser for the backward pass, but no features."""
    *tensors, ctx.kind, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)
    # Only the first output has a gradient; zero gradients of the others would be wasted.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
