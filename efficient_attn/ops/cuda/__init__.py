"""Triton kernels for CUDA. Triton is imported by the first call that they serve."""

from importlib.util import find_spec

import torch
from torch import Tensor

from efficient_attn.ops import verdict
from efficient_attn.ops.cuda.tiles import Tile, tiles
from efficient_attn.ops.linear.inputs import LinearInputs, Outputs
from efficient_attn.ops.linear.state import CausalGradients, LinearState
from efficient_attn.ops.paths import note_kernel, only_torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_DIM = 128
# Offsets within a head have 32 bits, and a grid's second and third axis 16.
_MOST_OFFSET, _MOST_HEADS = 2**31 - 1, 65535


def serves(inputs: LinearInputs) -> bool:
    """Whether the kernels of causal linear attention serve a call on this machine."""
    q = inputs.q
    if not q.is_cuda or only_torch() or find_spec("triton") is None:
        return False
    return supports(inputs) and verdict.trusted("causal-linear", q.device, q.dtype)


def supports(inputs: LinearInputs) -> bool:
    """Whether the kernels can compute a call, on any machine."""
    q, k, v = inputs[:3]
    if not inputs.map.exponential or inputs.scale == 0 or inputs.num_features % 16:
        return False
    return (
        {q.dtype, k.dtype, v.dtype} <= {q.dtype} & set(DTYPES)
        and all(16 <= x.shape[-1] <= _MOST_DIM for x in (q, v))
        and all(x.numel() and max(x.stride()[2], x.shape[-1]) * x.shape[2] <= _MOST_OFFSET for x in (q, k, v))
        and q.shape[0] * q.shape[1] <= _MOST_HEADS
    )


def causal_rows(
    inputs: LinearInputs, past: LinearState | None, *, with_state: bool = False
) -> tuple[Outputs, LinearState | None]:
    """Output of every query, and the state after all keys. The keys of `past` precede them."""
    note_kernel("triton causal-linear")
    # Triton launches on the current device.
    with torch.cuda.device(inputs.q.device):
        from efficient_attn.ops.cuda.causal import forward

        return forward(inputs, past, tile=_tile(inputs), with_state=with_state)


def causal_gradients(
    inputs: LinearInputs, past: LinearState | None, grad_out: Tensor, outputs: Outputs, *, to_past: bool
) -> CausalGradients:
    """Gradients with respect to q, k, v and, if `to_past`, the state `past` of `causal_rows`."""
    with torch.cuda.device(inputs.q.device):
        from efficient_attn.ops.cuda.causal import backward

        return backward(inputs, past, grad_out, outputs, tile=_tile(inputs), to_past=to_past)


def _tile(inputs: LinearInputs) -> Tile:
    """The tile with which the kernels passed their check on this machine."""
    number = verdict.tile("causal-linear", inputs.q.device, inputs.q.dtype)
    assert number is not None
    capability = torch.cuda.get_device_capability(inputs.q.device)
    return tiles(capability, inputs.q.dtype, max(inputs.q.shape[-1], inputs.v.shape[-1]))[int(number)]
