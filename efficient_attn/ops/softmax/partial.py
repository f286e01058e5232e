"""Softmax over some of the keys and its log-sum-exps, by which such softmaxes are merged.

Both have gradients. Scores are not kept for the backward pass.
"""

from typing import Any

import torch
from torch import Tensor

from efficient_attn.ops.operators import transformed
from efficient_attn.ops.softmax import cpu_flash


def partial_softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ + bias) v, and the log-sum-exp of each row.

    Args:
        q: [batch heads rows dim]; k: [batch heads keys dim]; v: [batch heads keys value_dim].
        bias: Broadcast to [batch heads rows keys], without gradients; None: zero.

    Returns:
        [batch heads rows value_dim] and [batch heads rows].
    """
    if not eager(q, k, v):
        return softmax(q, k, v, bias)
    return _PartialSoftmax.apply(q, k, v, bias)


def eager(*tensors: Tensor) -> bool:
    """Whether neither the compiler nor a transform of torch.func sees a call."""
    return not torch.compiler.is_compiling() and not transformed(*tensors)


def softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`partial_softmax` without gradients where the fused kernel serves, and by operators elsewhere."""
    if eager(q, k, v) and q.shape[-1] == v.shape[-1] and cpu_flash.available(q, k, v):
        return cpu_flash.attend(q, k, v, bias, 1.0)
    scores = q @ k.mT
    if bias is not None:
        scores = scores + bias
    log_sum = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - log_sum).exp() @ v, log_sum.squeeze(-1)


def gradients(
    grad_out: Tensor, decrease: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to q, k and v, from those of rows whose softmax may have further keys.

    Args:
        decrease: ⟨grad_out, out⟩ less the gradient of the log-sum-exp, for each row.
        log_sum: Log-sum-exp of each row over all its keys.
    """
    scores = q @ k.mT
    if bias is not None:
        scores = scores + bias
    weights = (scores - log_sum.unsqueeze(-1)).exp()
    by_score = weights * (grad_out @ v.mT - decrease.unsqueeze(-1))
    return by_score @ k, by_score.mT @ q, weights.mT @ grad_out


class _PartialSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        out, log_sum = softmax(q, k, v, bias)
        ctx.save_for_backward(q, k, v, bias, out, log_sum)
        return out, log_sum

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, log_sum = ctx.saved_tensors
        decrease = (grad_out * out).sum(dim=-1) - grad_log_sum
        return *gradients(grad_out, decrease, q, k, v, bias, log_sum), None
