"""Attention by sums over ranks, of a size independent of the number of tokens.

Full linear attention reads the sum of the states of all ranks, and causal attention starts each segment from
the sum over earlier segments. Gradients with respect to the sums of a state go back the same way. Linformer
projects keys and values to sums over tokens. States and sums are in float32 or better.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from efficient_attn.backend import Backend
from efficient_attn.distributed.exchange import gathered, largest, total
from efficient_attn.distributed.layout import Layout
from efficient_attn.errors import ShapeError
from efficient_attn.ops.dtypes import upcast, zero_masked
from efficient_attn.ops.linear.causal import causal_row_gradients, causal_rows
from efficient_attn.ops.linear.full import key_gradients, query_gradients, read_state, whole_state
from efficient_attn.ops.linear.inputs import LinearInputs, Outputs
from efficient_attn.ops.linear.state import LinearState, Means, exponential, finite
from efficient_attn.ops.linformer import attend_projected, real_weight, rescaled, row_sums
from efficient_attn.ops.paths import product_dtype


def attend_states(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> Tensor:
    """Linear attention by a core with `inputs(q, k, v, key_mask)`."""
    inputs = backend.core.inputs(q, k, v, key_mask)
    return _attend(inputs, layout, causal=backend.problem.causal).to(q.dtype)


def prefill_states(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> tuple[Tensor, LinearState | Means]:
    """Causal attention as in `attend_states`, and the state after the tokens of all ranks, on each."""
    inputs = backend.core.inputs(q, k, v, key_mask)
    out = _attend(inputs, layout, causal=True).to(q.dtype)
    state = total_state(_key_state(inputs), layout)
    return out, state if inputs.map.has_values else Means.of(state)


def attend_sums(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layout: Layout
) -> Tensor:
    """Linformer, by a core with `mix_keys` and `mix_values`."""
    core, tokens = backend.core, k.shape[-2] * layout.ranks
    if tokens > core.mix_keys.shape[-1]:
        raise ShapeError(
            f"This 'linformer' was built for at most {core.mix_keys.shape[-1]} tokens and k has {tokens} "
            f"on all ranks. Build it with max_tokens={tokens} or more."
        )

    def projected(mix: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        mix = mix.to(product_dtype(x))
        local = torch.cat(
            [mix[..., near.start : near.stop] for near in layout.positions(x.shape[-2])], dim=-1
        )
        sums = total(upcast(row_sums(local, zero_masked(x, key_mask), q.shape[1])), layout)
        return rescaled(sums, mix, total(real_weight(local, key_mask), layout))

    keys, values = projected(core.mix_keys, k), projected(core.mix_values, v)
    return attend_projected(q, keys, values, scale=backend.problem.factor)


def _attend(inputs: LinearInputs, layout: Layout, *, causal: bool) -> Tensor:
    """Output of the queries of this rank, [batch heads q_tokens value_dim], in the dtype of q."""
    if not causal:
        return _Read.apply(False, *total_state(_key_state(inputs), layout), *inputs)
    segments = []
    for part in layout.parts(inputs.k.shape[-2]):
        q, k, v = (x[..., part, :] for x in inputs[:3])
        segments.append(inputs._replace(q=q, k=k, v=v, key_mask=inputs.mask(part)))
    pasts = states_before([_key_state(segment) for segment in segments], layout)
    rows = [_Read.apply(True, *past, *segment) for past, segment in zip(pasts, segments, strict=True)]
    return torch.cat(rows, dim=-2)


def total_state(state: LinearState, layout: Layout) -> LinearState:
    reference = largest(state.log_scale, layout)
    return LinearState(total(_rescaled(state.sums, state.log_scale, reference), layout), reference)


def states_before(states: list[LinearState], layout: Layout) -> list[LinearState]:
    """For each local segment, the state of all keys before it, from the states of the local segments."""
    rows = [torch.cat([x.sums.flatten(), x.log_scale.detach().flatten()]) for x in states]
    near = gathered(torch.stack(rows), layout)  # [ranks segments numbers]
    before = [near[: layout.rank, 0]]
    if layout.kind == "head-tail":
        # Tails follow all heads, in the opposite order of ranks.
        before.append(torch.cat([near[:, 0], near[layout.rank + 1 :, 1]]))
    return [_merged(rows, states[0]) for rows in before]


def _merged(rows: Tensor, like: LinearState) -> LinearState:
    """Merge states that are packed in rows. No rows give the empty state."""
    sums, log_scale = rows.split([like.sums.numel(), like.log_scale.numel()], dim=1)
    sums = sums.unflatten(1, like.sums.shape)
    log_scale = log_scale.detach().unflatten(1, like.log_scale.shape)
    reference = torch.cat([torch.full_like(like.log_scale[None], -torch.inf), log_scale]).amax(dim=0)
    return LinearState(_rescaled(sums, log_scale, reference).sum(dim=0), reference)


def _rescaled(sums: Tensor, log_scale: Tensor, reference: Tensor) -> Tensor:
    return exponential(log_scale - finite(reference)).mT * sums


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
        return None, *key_gradients(inputs, reference, grad_sums), *[None] * 6


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
            return None, grads.past_sums, None, *grads[:3], *[None] * 6
        grad_q, grad_sums = query_gradients(inputs, state, grad_out, outputs)
        return None, grad_sums, None, grad_q, *[None] * 8


def _save(ctx: Any, inputs: LinearInputs, *tensors: Tensor) -> None:
    *fields, ctx.kind, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *fields)


def _saved(ctx: Any, number: int) -> tuple[LinearInputs, tuple[Tensor, ...]]:
    tensors = ctx.saved_tensors
    fields = [*tensors[number:], ctx.kind, ctx.scale]
    return LinearInputs(*fields), tensors[:number]
