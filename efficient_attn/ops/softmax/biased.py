"""Softmax attention with a score bias. Scores are not kept for the backward pass."""

from typing import Any

import torch
from torch import Tensor

from efficient_attn.ops.operators import transformed
from efficient_attn.ops.softmax import cpu_flash


def biased_softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q kᵀ + bias) v, [batch heads rows value_dim].

    Args:
        q: [batch heads rows dim]; k: [batch heads keys dim]; v: [batch heads keys value_dim].
        bias: Broadcast to [batch heads rows keys], without gradients; None: zero.
    """
    apply = _BiasedSoftmax.apply if eager(q, k, v) else _softmax
    return apply(q, k, v, bias)[0]


def eager(*tensors: Tensor) -> bool:
    """Whether neither the compiler nor a transform of torch.func sees a call."""
    return not torch.compiler.is_compiling() and not transformed(*tensors)


def _softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of each row [batch heads rows], by the fused kernel where it serves."""
    if eager(q, k, v) and q.shape[-1] == v.shape[-1] and cpu_flash.available(q, k, v):
        return cpu_flash.flash_rows(q, k, v, bias, 1.0)
    scores = q @ k.mT
    if bias is not None:
        scores = scores + bias
    log_sum = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - log_sum).exp() @ v, log_sum.squeeze(-1)


class _BiasedSoftmax(torch.autograd.Function):
    # The log-sum-exp is an output, since second derivatives pass through it.
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        out, log_sum = _softmax(q, k, v, bias)
        ctx.save_for_backward(q, k, v, bias, out, log_sum)
        return out, log_sum

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, log_sum = ctx.saved_tensors
        scores = q @ k.mT
        if bias is not None:
            scores = scores + bias
        weights = (scores - log_sum.unsqueeze(-1)).exp()
        decrease = (grad_out * out).sum(dim=-1) - grad_log_sum
        by_score = weights * (grad_out @ v.mT - decrease.unsqueeze(-1))
        return by_score @ k, by_score.mT @ q, weights.mT @ grad_out, None
