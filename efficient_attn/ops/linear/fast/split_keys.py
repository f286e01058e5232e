"""Linear attention with exponential features as two fused attentions on a GPU, in the dtype of the inputs.

Attention of some hundred directions to all keys has few blocks of rows, which would occupy few
multiprocessors: 16 heads of 256 directions are 32 programs. The keys are therefore split into parts in the
batch, and means over parts are merged by their log-sum-exps.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import upcast, upcast_dtype, zero_masked
from efficient_attn.ops.linear.backward import Outputs
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.softmax import flex

# Programs for each multiprocessor: with some of each, none waits long for the last.
_PROGRAMS = 4
# Keys of the shortest part, below which the directions are read for few keys.
_KEYS = 256


def num_parts(keys: int, programs: int, multiprocessors: int) -> int:
    """Parts of the keys, a power of two.

    Args:
        programs: Number of programs without a split.
    """
    wanted = max(min(math.ceil(_PROGRAMS * multiprocessors / programs), keys // _KEYS), 1)
    parts = 2 ** (wanted.bit_length() - 1)
    # Unequal parts are padded, which copies all keys: fewer, equal parts that occupy the device are better.
    equal = math.gcd(parts, keys)
    return equal if equal * programs >= multiprocessors else parts


def rounded(inputs: LinearInputs) -> LinearInputs:
    """The same inputs with directions in the dtype of q, as the kernel reads them.

    Rounding then draws other directions, for queries and keys alike; directions rounded on one side alone
    would add an error to every exponent.
    """
    assert inputs.directions is not None
    return inputs._replace(directions=inputs.directions.to(inputs.q.dtype))


def mean_values(inputs: LinearInputs) -> tuple[Tensor, Tensor]:
    """float32 means of the values, [batch kv_heads features value_dim], and log-sum-exps of the exponents."""
    batch, kv_heads, keys = inputs.k.shape[:3]
    rows = math.ceil(inputs.num_features / flex.BLOCK_ROWS)
    parts = num_parts(keys, batch * kv_heads * rows, _multiprocessors(inputs.k.device))
    k, v = (zero_masked(x, inputs.key_mask) for x in (inputs.k, inputs.v))
    bias = torch.linalg.vector_norm(k, dim=-1, keepdim=True, dtype=upcast_dtype(k.dtype))
    bias = bias.square_().mul_(-abs(inputs.scale) / 2)
    if inputs.key_mask is not None:
        bias = bias.masked_fill_(~inputs.key_mask[:, None, :, None], -torch.inf)
    tensors = _split(k, parts), _split(v, parts), _split(bias, parts, -torch.inf).mT
    found = flex.attend(_directions(inputs, batch * parts), *tensors, math.sqrt(abs(inputs.scale)))
    means, log_sums = _merge(*(upcast(x).unflatten(0, (batch, parts)) for x in found))
    if inputs.key_mask is not None:
        log_sums = log_sums.masked_fill_(~inputs.key_mask.any(dim=-1)[:, None, None], -torch.inf)
    return means, log_sums


def read(inputs: LinearInputs, means: Tensor, log_sums: Tensor) -> Outputs:
    """Attention of the queries to the directions, with the mean values of the keys."""
    w = _directions(inputs, len(inputs.k)) * math.copysign(1.0, inputs.scale)
    factor = math.sqrt(abs(inputs.scale))
    out, logarithm = flex.attend(inputs.q, w, means.to(w.dtype), log_sums.unsqueeze(-2), factor)
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


def _merge(means: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Means over the keys of all parts [batch parts …], and their joint log-sum-exps."""
    joint = log_sums.logsumexp(dim=1)
    shares = (log_sums - joint.unsqueeze(1)).exp_().unsqueeze(-1)
    return (shares * means).sum(dim=1), joint


def _directions(inputs: LinearInputs, batch: int) -> Tensor:
    """The w of each feature, [batch kv_heads features head_dim]."""
    w = inputs.exponents().to(inputs.q.dtype)
    return w.expand(batch, inputs.k.shape[1], *w.shape[-2:]).contiguous()


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
