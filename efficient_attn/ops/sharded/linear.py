"""Linear attention of the tokens of a rank to the tokens of all ranks.

Ranks exchange states, whose size does not depend on the number of tokens: full attention reads their sum,
and causal attention starts each segment from the sum over earlier segments. Gradients with respect to the
sums of a state go back the same way. States are in float32 or better.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from efficient_attn.ops.linear.causal import causal_row_gradients, causal_rows
from efficient_attn.ops.linear.full import key_gradients, query_gradients, read_state, whole_state
from efficient_attn.ops.linear.inputs import LinearInputs, Outputs
from efficient_attn.ops.linear.state import LinearState, Means, exponential, finite
from efficient_attn.ops.sharded.exchange import gathered_near, largest, shifted, total
from efficient_attn.ops.sharded.layout import Layout


def sharded_linear_attention(inputs: LinearInputs, layout: Layout, *, causal: bool) -> Tensor:
    """Output of the queries of this rank, [batch heads q_tokens value_dim], in the dtype of q."""
    if not causal:
        return _Read.apply(False, *total_state(_key_state(inputs), layout), *inputs)
    segments = [_segment(inputs, part) for part in layout.parts(inputs.k.shape[-2])]
    pasts = states_before([_key_state(one) for one in segments], layout)
    rows = [_Read.apply(True, *past, *one) for past, one in zip(pasts, segments, strict=True)]
    return torch.cat(rows, dim=-2)


def final_state(inputs: LinearInputs, layout: Layout) -> LinearState | Means:
    """The streaming state after the tokens of all ranks, on every rank."""
    state = total_state(_key_state(inputs), layout)
    return state if inputs.map.has_values else Means.of(state)


def total_state(state: LinearState, layout: Layout) -> LinearState:
    """The state of the keys of all ranks."""
    reference = largest(state.log_scale, layout)
    return LinearState(total(_rescaled(state.sums, state.log_scale, reference), layout), reference)


def states_before(states: list[LinearState], layout: Layout) -> list[LinearState]:
    """For each own segment, the state of all keys before it, from the states of the own segments."""
    near = gathered_near(torch.stack([_packed(one) for one in states]), layout)  # [near segments numbers]
    place, heads = layout.rank - layout.near.start, near[:, 0]
    earlier = _scanned(heads, states[0], 1, layout)
    before = [torch.cat([earlier, heads[:place]])]
    if layout.kind == "head-tail":
        # Tails follow all heads, in the opposite order of ranks.
        later = _scanned(near.flatten(0, 1), states[0], -1, layout)
        before.append(torch.cat([earlier, heads, later, near[place + 1 :, 1]]))
    return [_merged(rows, states[0]) for rows in before]


def _scanned(near: Tensor, like: LinearState, direction: int, layout: Layout) -> Tensor:
    """States of all ranks before `layout.near`, or behind, in ⌈log₂⌉ rows, by a scan over such ranges.

    A step receives the state of 1, 2, 4, … ranges (Hillis and Steele, Data parallel algorithms, 1986).

    Args:
        near: Packed states of `layout.near`, [states numbers].
        like: A state of the same shape.
        direction: 1 for the ranks before, −1 for the ranks behind.
    """
    found, step = [near[:0]], len(layout.near)
    while step < layout.ranks:
        state = _packed(_merged(torch.cat([near, *found]), like))
        found.append(shifted(state, direction * step, layout))
        step *= 2
    return torch.cat(found)


def _packed(state: LinearState) -> Tensor:
    return torch.cat([state.sums.flatten(), state.log_scale.detach().flatten()])


def _merged(rows: Tensor, like: LinearState) -> LinearState:
    """The state of several, or of none, that are packed in rows."""
    sums, log_scale = rows.split([like.sums.numel(), like.log_scale.numel()], dim=1)
    sums = sums.unflatten(1, like.sums.shape)
    log_scale = log_scale.detach().unflatten(1, like.log_scale.shape)
    reference = torch.cat([torch.full_like(like.log_scale[None], -torch.inf), log_scale]).amax(dim=0)
    return LinearState(_rescaled(sums, log_scale, reference).sum(dim=0), reference)


def _rescaled(sums: Tensor, log_scale: Tensor, reference: Tensor) -> Tensor:
    return exponential(log_scale - finite(reference)).mT * sums


def _segment(inputs: LinearInputs, part: slice) -> LinearInputs:
    q, k, v = (x[..., part, :] for x in inputs[:3])
    return inputs._replace(q=q, k=k, v=v, key_mask=inputs.mask(part))


def _key_state(inputs: LinearInputs) -> LinearState:
    """The state of the keys of some inputs, with gradients for k and v."""
    # Queries determine sizes of chunks alone.
    return LinearState(*_KeyState.apply(*inputs._replace(q=inputs.q.detach())))


class _KeyState(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *fields: Any) -> tuple[Tensor, Tensor]:
        inputs = LinearInputs(*fields)
        state = whole_state(inputs)
        _save(ctx, inputs, state.log_scale)
        ctx.mark_non_differentiable(state.log_scale)
        return state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sums: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        inputs, (reference,) = _saved(ctx, 1)
        return None, *key_gradients(inputs, reference, grad_sums), *[None] * 5


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, causal: bool, sums: Tensor, log_scale: Tensor, *fields: Any) -> Tensor:
        inputs, state = LinearInputs(*fields), LinearState(sums, log_scale)
        outputs = causal_rows(inputs, state) if causal else read_state(inputs, state)
        ctx.causal = causal
        _save(ctx, inputs, *state, *outputs)
        return outputs.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs, (sums, log_scale, *rest) = _saved(ctx, 5)
        state, outputs = LinearState(sums, log_scale), Outputs(*rest)
        if ctx.causal:
            grads = causal_row_gradients(inputs, state, grad_out, outputs, to_past=True)
            return None, grads.past_sums, None, *grads[:3], *[None] * 5
        grad_q, grad_sums = query_gradients(inputs, state, grad_out, outputs)
        return None, grad_sums, None, grad_q, *[None] * 7


def _save(ctx: Any, inputs: LinearInputs, *tensors: Tensor) -> None:
    *own, ctx.kind, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *own)


def _saved(ctx: Any, number: int) -> tuple[LinearInputs, tuple[Tensor, ...]]:
    """The saved inputs, and so many tensors."""
    tensors = ctx.saved_tensors
    fields = [*tensors[number:], ctx.kind, ctx.scale]
    return LinearInputs(*fields), tensors[:number]
