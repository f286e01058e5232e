"""Softmax attention over gathered keys with a score bias. Neither is stored for the backward pass."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efficient_attn.ops.alignment import padded_rows
from efficient_attn.ops.operators import transformed
from efficient_attn.ops.paths import tuned_for_cpu
from efficient_attn.ops.softmax import cpu_flash


class Step(NamedTuple):
    """Blocks of queries that attend in one call.

    Attributes:
        blocks: Index of their heads and blocks.
        at: Rows of the keys and values that each block reads, [heads blocks keys].
        bias: Broadcast to the scores [heads blocks rows keys], without gradients; None: zero.
    """

    blocks: tuple[slice, slice]
    at: Tensor
    bias: Tensor | None


Steps = Callable[[], Iterator[Step]]


def gathered_softmax(q: Tensor, k: Tensor, v: Tensor, steps: Steps, scale: float) -> Tensor:
    """softmax(scale · q kᵀ + bias) v of blocks of queries, [heads blocks rows dim].

    Args:
        q: [heads blocks rows dim], as wide as the wider of k and v; k and v: [rows dim].
        steps: Steps over all blocks, the same in each call; in compiled code each has all heads.
        scale: Positive factor on the scores.
    """
    if eager(q, k, v):
        return _GatheredSoftmax.apply(q, k, v, steps, scale)
    return torch.cat([_attend(q, k, v, step, scale)[0] for step in steps()], dim=1)


def eager(*tensors: Tensor) -> bool:
    """Whether no compiler, trace or transform of torch.func sees a call."""
    seen = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not seen and not transformed(*tensors)


def readable(contents: Tensor, *tensors: Tensor) -> bool:
    """Whether a call of these tensors may depend on the contents of one: on the CPU, seen by nothing else."""
    immediate = type(contents) is Tensor and tuned_for_cpu(contents) and eager(contents, *tensors)
    # A trace of operators is a mode of dispatch.
    return immediate and torch._C._len_torch_dispatch_stack() == 0


def _attend(
    q: Tensor, k: Tensor, v: Tensor, step: Step, scale: float, memory: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Output of a step, and the log-sum-exps that the fused kernel returns."""
    rows, (keys, values) = q[step.blocks], _gathered(k, v, step, memory)
    if eager(q, k, v) and cpu_flash.available(q, k, v):
        return cpu_flash.flash_rows(rows, keys, values, step.bias, scale)
    return _weights(rows, keys, step.bias, scale) @ values, None


def _gathered(k: Tensor, v: Tensor, step: Step, memory: tuple[Tensor, ...] | None) -> list[Tensor]:
    """Keys and values that each block reads, [heads blocks keys dim], equally wide.

    Args:
        memory: Memory that the steps share; None: a gradient needs the rows of each step.
    """
    at = step.at.flatten()
    if memory is None:
        rows = [x.index_select(0, at) for x in (k, v)]
    else:
        # A tensor without numbers takes any size, and its memory stays.
        rows = [torch.index_select(x, 0, at, out=y.resize_(0)) for x, y in zip((k, v), memory, strict=True)]
    width = max(k.shape[1], v.shape[1])
    return [padded_rows(x.view(*step.at.shape, x.shape[1]), width) for x in rows]


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scores = scale * q @ k.mT
    return (scores if bias is None else scores + bias).softmax(dim=-1)


class _GatheredSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, steps: Steps, scale: float) -> Tensor:
        out, log_sums, memory = q.new_empty(q.shape), [], (k.new_empty(0), v.new_empty(0))
        for step in steps():
            out[step.blocks], log_sum = _attend(q, k, v, step, scale, memory)
            log_sums.append(log_sum)
        ctx.save_for_backward(q, k, v, out, *log_sums)
        ctx.steps, ctx.scale = steps, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *log_sums = ctx.saved_tensors
        memory = None if torch.is_grad_enabled() else (k.new_empty(0), v.new_empty(0))
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step, log_sum in zip(ctx.steps(), log_sums, strict=True):
            grad, rows, (keys, values) = grad_out[step.blocks], q[step.blocks], _gathered(k, v, step, memory)
            # The fused kernel has no second derivatives.
            if log_sum is not None and memory is not None:
                by_rows, by_keys, by_values = cpu_flash.gradients(
                    grad, rows, keys, values, out[step.blocks], log_sum, step.bias, ctx.scale
                )
            else:
                weights = _weights(rows, keys, step.bias, ctx.scale)
                by_scores = weights * (grad @ values.mT)
                by_scores = ctx.scale * (by_scores - weights * by_scores.sum(dim=-1, keepdim=True))
                by_rows, by_keys, by_values = by_scores @ keys, by_scores.mT @ rows, weights.mT @ grad
            grad_q[step.blocks] = by_rows
            grad_k.index_add_(0, step.at.flatten(), by_keys[..., : k.shape[1]].flatten(0, 2))
            grad_v.index_add_(0, step.at.flatten(), by_values[..., : v.shape[1]].flatten(0, 2))
        return grad_q, grad_k, grad_v, None, None
