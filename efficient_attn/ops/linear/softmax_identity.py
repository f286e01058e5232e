"""Full linear attention with exponential features as two softmaxes, by fused kernels.

With φ_f(q) = exp(q·w_f) and φ_f(k) = exp(k·w_f + b_k), b_k = −|k|²/2,

    Σ_f φ_f(q) Σ_j φ_f(k_j) v_j / Σ_f φ_f(q) Σ_j φ_f(k_j) = Σ_f softmax_f(q·w_f + z_f) m_f,
    z_f = log Σ_j exp(k_j·w_f + b_j),   m_f = Σ_j softmax_j(k_j·w_f + b_j) v_j:

attention of the directions to the keys, then of the queries to the directions. Features are never
materialised, no exponent leaves the range, so that no guard is needed, and the state has denominators of 1.

Backward, with p_tf = softmax_f(q_t·w_f + z_f) and r_fj = softmax_j(k_j·w_f + b_j), the output is
Σ_f p_tf m_f. With δ_t = g_t·out_t, the gradients of the exponents s_tf of queries and u_jf of keys are

    ∂s_tf = p_tf (g_t·m_f − δ_t),   M_f = Σ_t p_tf g_t,   ε_f = Σ_t p_tf δ_t,
    ∂u_jf = r_fj (v_j·M_f − ε_f),   ∂v_j = Σ_f r_fj M_f.

On a GPU attention of some hundred directions to all keys has few blocks of rows, which would occupy few
multiprocessors: 16 heads of 256 directions are 32 programs. The keys are therefore split into parts in the
batch, and means over parts are merged by their log-sum-exps.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.alignment import first_columns, padded_rows
from efficient_attn.ops.dtypes import upcast, upcast_dtype, zero_masked
from efficient_attn.ops.grouped_queries import unfold
from efficient_attn.ops.linear.inputs import (
    LOG2_E,
    ExpKernel,
    LinearInputs,
    Outputs,
    chunks,
    new_outputs,
    power,
)
from efficient_attn.ops.linear.state import LinearState, finite, with_ones
from efficient_attn.ops.paths import parts
from efficient_attn.ops.softmax import cpu_flash, flex

# Programs for each multiprocessor: with several, no multiprocessor idles long at the end.
_PROGRAMS = 4
# Keys of the shortest part: with fewer, loading the directions outweighs the work.
LEAST_KEYS = 256
# Tokens per kernel call if they have to be converted or masked first; otherwise one call takes all tokens.
# From 768 rows on the kernel processes 256 rows at a time instead of 64.
CHUNK = 768


def num_parts(keys: int, programs: int, multiprocessors: int) -> int:
    """Parts of the keys, a power of two, for a number of programs without a split."""
    most = max(min(math.ceil(_PROGRAMS * multiprocessors / programs), keys // LEAST_KEYS), 1)
    parts = 2 ** (most.bit_length() - 1)
    # Unequal parts are padded, which copies all keys: fewer, equal parts that occupy the device are better.
    equal = math.gcd(parts, keys)
    return equal if equal * programs >= multiprocessors else parts


def rounded_directions(inputs: LinearInputs) -> LinearInputs:
    """The same inputs with directions in the dtype of q, as the kernel reads them.

    Rounding then draws other directions, for queries and keys alike; directions rounded on one side alone
    would add an error to every exponent.
    """
    assert inputs.directions is not None
    return inputs._replace(directions=inputs.directions.to(inputs.q.dtype))


def mean_values_of_parts(inputs: LinearInputs) -> tuple[Tensor, Tensor]:
    """float32 means of the values, [batch kv_heads features value_dim], and log-sum-exps of the exponents."""
    batch, kv_heads, keys = inputs.k.shape[:3]
    rows = math.ceil(inputs.num_features / flex.BLOCK_ROWS)
    multiprocessors = torch.cuda.get_device_properties(inputs.k.device).multi_processor_count
    parts = num_parts(keys, batch * kv_heads * rows, multiprocessors)
    k, v = (zero_masked(x, inputs.key_mask) for x in (inputs.k, inputs.v))
    bias = torch.linalg.vector_norm(k, dim=-1, keepdim=True, dtype=upcast_dtype(k.dtype))
    bias = bias.square_().mul_(-abs(inputs.scale) / 2)
    if inputs.key_mask is not None:
        bias = bias.masked_fill_(~inputs.key_mask[:, None, :, None], -torch.inf)
    tensors = _split(k, parts), _split(v, parts), _split(bias, parts, -torch.inf).mT
    outputs = flex.flex_rows(_directions(inputs, batch * parts), *tensors, math.sqrt(abs(inputs.scale)))
    # [batch parts …]
    means, log_sums = (upcast(x).unflatten(0, (batch, parts)) for x in outputs)
    joint = log_sums.logsumexp(dim=1)
    means = ((log_sums - joint.unsqueeze(1)).exp_().unsqueeze(-1) * means).sum(dim=1)
    if inputs.key_mask is not None:
        joint = joint.masked_fill_(~inputs.key_mask.any(dim=-1)[:, None, None], -torch.inf)
    return means, joint


def read_fused(inputs: LinearInputs, means: Tensor, log_sums: Tensor) -> Outputs:
    """Attention of the queries to the directions, with the mean values of the keys."""
    w = _directions(inputs, len(inputs.k)) * math.copysign(1.0, inputs.scale)
    factor = math.sqrt(abs(inputs.scale))
    out, logarithm = flex.flex_rows(inputs.q, w, means.to(w.dtype), log_sums.unsqueeze(-2), factor)
    logarithm = logarithm.unsqueeze(-1)
    if inputs.key_mask is not None:
        logarithm = logarithm.masked_fill(~inputs.key_mask.any(dim=-1)[:, None, None, None], torch.inf)
    return Outputs(out.contiguous(), logarithm, torch.zeros_like(logarithm, dtype=torch.bool))


def _split(x: Tensor, parts: int, padding: float = 0.0) -> Tensor:
    """[batch kv_heads keys dim] as [batch·parts kv_heads keys/parts dim], padded to equal parts."""
    size = math.ceil(x.shape[2] / parts)
    if missing := parts * size - x.shape[2]:
        x = F.pad(x, (0, 0, 0, missing), value=padding)
    return x.unflatten(2, (parts, size)).transpose(1, 2).flatten(0, 1)


def _directions(inputs: LinearInputs, batch: int) -> Tensor:
    """Direction w of each feature, [batch kv_heads features head_dim]."""
    w = inputs.exponents().to(inputs.q.dtype)
    return w.expand(batch, inputs.k.shape[1], *w.shape[-2:]).contiguous()


def suits(inputs: LinearInputs) -> bool:
    """Whether the features are exponential and a fused kernel supports these tensors."""
    return inputs.map.exponential and (cpu_flash.available(*inputs[:3]) or flex.available(*inputs[:3]))


def two_softmaxes(inputs: LinearInputs) -> tuple[Outputs, LinearState]:
    """The output of every query, and the state of all keys.

    Raises:
        NotCompiledError: If a GPU's kernel cannot be compiled.
    """
    on_gpu = flex.available(*inputs[:3])
    inputs = rounded_directions(inputs) if on_gpu else inputs
    w = None
    if not on_gpu:
        w = inputs.exponents()
        w = _pad_width(w.expand(*inputs.k.shape[:2], *w.shape[-2:]), inputs)
    means, log_sums = mean_values_of_parts(inputs) if w is None else _mean_values(inputs, w)
    log_sums = log_sums - math.log(inputs.num_features) / 2
    if inputs.log_weights is not None:
        log_sums = log_sums + inputs.log_weights.to(log_sums.dtype).squeeze(-2)
    log_sums = log_sums.contiguous()
    out = read_fused(inputs, means, log_sums) if w is None else _read(inputs, w, means, log_sums)
    return out, LinearState(with_ones(first_columns(means, inputs.v.shape[-1])), log_sums.unsqueeze(-2))


def _mean_values(inputs: LinearInputs, w: Tensor) -> tuple[Tensor, Tensor]:
    """m [batch kv_heads features dim], and z [batch kv_heads features] without the constants of features."""
    factor, means, log_sums = math.sqrt(abs(inputs.scale)), None, None
    for part in _chunks(inputs.k, inputs, masked=inputs.key_mask is not None):
        rows = inputs.real_keys(part), inputs.real_rows(inputs.v, part)
        k, v = (_pad_width(x, inputs) for x in rows)
        bias = torch.linalg.vector_norm(k, dim=-1).square_().mul_(-abs(inputs.scale) / 2)
        real = None if inputs.key_mask is None else inputs.key_mask[:, None, part]
        if real is not None:
            bias = bias.masked_fill_(~real, -torch.inf)
        part_means, logarithm = cpu_flash.flash_rows(w, k, v, bias.unsqueeze(-2), factor)
        if real is not None:
            logarithm = logarithm.masked_fill(~real.any(dim=-1, keepdim=True), -torch.inf)
        if means is None or log_sums is None:
            means, log_sums = part_means, logarithm
            continue
        # Means over the keys of both chunks, and their joint log-sum-exps.
        both = torch.logaddexp(log_sums, logarithm)
        share, part_share = ((x - finite(both)).exp().unsqueeze(-1) for x in (log_sums, logarithm))
        means, log_sums = share * means + part_share * part_means, both
    assert means is not None and log_sums is not None
    return means, log_sums


def _read(inputs: LinearInputs, w: Tensor, means: Tensor, log_sums: Tensor) -> Outputs:
    w = w if inputs.scale > 0 else -w
    parts_of_q = _chunks(inputs.q, inputs, masked=False)
    # One call in the right dtype returns the output itself, without a copy.
    if len(parts_of_q) == 1 and inputs.q.dtype is means.dtype:
        rows = _read_rows(inputs, parts_of_q[0], w, means, log_sums)
        return Outputs(*(unfold(x, inputs.q.shape[1]).contiguous() for x in rows))
    outputs = new_outputs(inputs.q, inputs.v)
    for part in parts_of_q:
        outputs.put(part, _read_rows(inputs, part, w, means, log_sums))
    return outputs


def _read_rows(inputs: LinearInputs, part: slice, w: Tensor, means: Tensor, log_sums: Tensor) -> Outputs:
    """Outputs of a chunk of queries, grouped by key head."""
    rows = _pad_width(inputs.folded_queries(part), inputs)
    factor = math.sqrt(abs(inputs.scale))
    out, logarithm = cpu_flash.flash_rows(rows, w, means, log_sums.unsqueeze(-2), factor)
    logarithm = logarithm.unsqueeze(-1)
    if inputs.key_mask is not None:
        fully_masked = (log_sums == -torch.inf).all(dim=-1)[..., None, None]
        logarithm.masked_fill_(fully_masked, torch.inf)
    out = first_columns(out, inputs.v.shape[-1])
    return Outputs(out, logarithm, torch.zeros_like(logarithm, dtype=torch.bool))


def _chunks(x: Tensor, inputs: LinearInputs, *, masked: bool) -> list[slice]:
    length, untouched = x.shape[-2], x.dtype is upcast_dtype(x.dtype) and not masked
    if inputs.transforms is None and untouched and inputs.q.shape[-1] == inputs.v.shape[-1]:
        return [slice(0, length)]
    return parts(length, CHUNK)


def _pad_width(x: Tensor, inputs: LinearInputs) -> Tensor:
    """`x` padded to the common width that the kernel requires. Zero columns change no product."""
    return padded_rows(x, max(inputs.q.shape[-1], inputs.v.shape[-1]))


def two_softmaxes_gradients(
    inputs: LinearInputs, grad_out: Tensor, out: Tensor, logarithm: Tensor, state: LinearState
) -> tuple[Tensor, Tensor, Tensor]:
    if flex.available(*inputs[:3]):
        inputs = rounded_directions(inputs)
    kernel = ExpKernel(inputs, shared_buffer=True)
    grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])
    ones = state.sums[..., -1:]
    means = (state.sums[..., :-1] / ones.masked_fill(ones == 0, 1.0)).flatten(0, 1)
    sums = finite(state.log_scale + ones.mT.log()).mul_(LOG2_E).flatten(0, 1)
    grad_means, deltas = torch.zeros_like(means), torch.zeros_like(means[..., :1])
    for part in chunks(inputs, inputs.q.shape[-2]):
        g = inputs.flatten_heads(grad_out, part)
        delta = (g * inputs.flatten_heads(out, part)).sum(dim=-1, keepdim=True)
        rows = inputs.flat_queries(part)
        offset = inputs.flatten_heads(logarithm, part).mul(-LOG2_E)
        p = power(kernel.query_exponents(rows, offset).add_(sums))
        grad = torch.baddbmm(delta, g, means.mT, beta=-1, out=kernel.buffer("gradients", rows)).mul_(p)
        grad_q[..., part, :] = inputs.unflatten_heads(kernel.query_gradient(grad))
        grad_means.baddbmm_(p.mT, g)
        deltas.baddbmm_(p.mT, delta)
    for part in chunks(inputs, inputs.k.shape[-2]):
        keys, v = inputs.flat_keys_and_values(part)
        r = power(kernel.real_key_exponents(keys, part).sub_(sums))
        grad = torch.bmm(v, grad_means.mT, out=kernel.buffer("gradients", keys)).sub_(deltas.mT).mul_(r)
        grad_k[..., part, :] = kernel.key_gradient(keys, grad).view_as(grad_k[..., part, :])
        grad_v[..., part, :] = torch.bmm(r, grad_means).view_as(grad_v[..., part, :])
    return grad_q, grad_k, grad_v
