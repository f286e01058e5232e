"""Causal linear attention with exponential features on CUDA, by Triton kernels: launches and their memory."""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from efficient_attn.ops.cuda.key_gradients import key_kernel, key_repair_kernel
from efficient_attn.ops.cuda.query_gradients import delta_kernel, query_kernel, query_repair_kernel
from efficient_attn.ops.cuda.rows import chunk_kernel, repair_kernel
from efficient_attn.ops.cuda.states import scan_kernel, walk_kernel
from efficient_attn.ops.cuda.tiles import Tile
from efficient_attn.ops.linear.inputs import LN_2, LOG2_E, LinearInputs, Outputs, new_outputs
from efficient_attn.ops.linear.state import CausalGradients, LinearState

# Segments whose states are scanned: few enough for one program to scan, enough to fill a GPU.
_SEGMENTS = 32
# Powers are at most 1, a row's largest is 1, and those below 2^−126 are zeros: denominators keep their digits
# down to here.
WEAK = 2.0**-80
# Base-2 logarithm of the largest power of the backward pass. Its product with the other factor is at most 1.
LIMIT = 80.0


class States(NamedTuple):
    """States of segments and of chunks, as sums relative to 2^reference.

    Attributes:
        segments: Sums [flat_heads segments+1 features value_dim], and sums of ones and the references, both
            [flat_heads segments+1 features]; float32.
        slots: The same for chunks, [flat_heads slots …], by name, with sums in the dtype of operands.
    """

    segments: tuple[Tensor, Tensor, Tensor]
    slots: dict[str, Tensor]


class KernelCall:
    """The arguments that kernels of one call share."""

    def __init__(self, inputs: LinearInputs, tile: Tile, chunk: int) -> None:
        assert inputs.directions is not None
        q, k, v = (_with_rows(x) for x in inputs[:3])
        self.inputs = inputs._replace(q=q, k=k, v=v)
        # Directions and, for a map with two features per direction, their opposites.
        self.directions = inputs.directions.to(q.dtype).contiguous()
        if inputs.map.per_direction == 2:
            self.directions = torch.cat([self.directions, -self.directions], dim=-2)
        self.mask = None if inputs.key_mask is None else inputs.key_mask.contiguous().view(torch.uint8)
        self.bias = None if inputs.log_weights is None else inputs.log_weights.float().contiguous()
        (batch, self.heads, rows, dim), (_, self.kv_heads, self.tokens, _) = q.shape, k.shape
        self.batch, self.before, self.features = batch, self.tokens - rows, inputs.num_features
        self.first, self.chunks = self.before // chunk, triton.cdiv(self.tokens, chunk)
        self.chunk, self.tile, self.value_dim = chunk, tile, v.shape[-1]
        self.key_offsets = self.new(batch, self.kv_heads, self.tokens)
        self.dtype = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
        # Rows of float32 do not fit the registers of four warps.
        self.repair_warps = 8 if self.dtype == torch.float32 else 4
        self.factors: tuple[float, ...] = (
            inputs.query_factor * LOG2_E,
            math.sqrt(abs(inputs.scale)) * LOG2_E,
            abs(inputs.scale) / 2 * LOG2_E,
            math.log2(self.features) / 2,
        )
        self.w_h = 0 if self.directions.ndim == 2 else self.directions.stride(0)
        self.sizes: dict[str, Any] = {
            "features": self.features,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "w_h": self.w_h,
            "DIM": dim,
            "VALUE_DIM": self.value_dim,
            "PADDED": _padded(dim),
            "VALUE_PADDED": _padded(self.value_dim),
            "TOKENS": chunk,
            "HAS_BIAS": self.bias is not None,
            "OPERANDS": tl.float32 if self.dtype == torch.float32 else tl.bfloat16,
        }

    def block(self, most: int) -> int:
        """Largest block of features that divides their number, a multiple of 16."""
        return math.gcd(self.features, most)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.inputs.q.new_empty(shape, dtype=dtype)

    @property
    def positions(self) -> dict[str, int]:
        """Positions of the queries among the keys, as arguments of kernels."""
        slots = self.chunks - self.first
        return {"tokens": self.tokens, "before": self.before, "first": self.first, "slots": slots}

    @property
    def rows(self) -> dict[str, Any]:
        """The inputs and their strides, as arguments of kernels."""
        q, k, v = self.inputs[:3]
        return {
            **{"w": self.directions, "bias": self.bias, "q": q, "k": k, "v": v},
            **{"key_offsets": self.key_offsets, **_strides(q=q, k=k, v=v)},
            **{"query_factor": self.factors[0], "factor": self.factors[1]},
        }


def forward(
    inputs: LinearInputs, past: LinearState | None, *, tile: Tile, with_state: bool = False
) -> tuple[Outputs, LinearState | None]:
    """Output of every query after the keys of `past`, and the state after all keys, or None."""
    call = KernelCall(inputs, tile, tile.tokens)
    q, _, v = call.inputs[:3]
    outputs = new_outputs(q, v)
    states = _key_states(call, past)
    slots = call.chunks - call.first
    flags = call.new(call.batch * call.heads * slots, dtype=torch.int32)
    arguments = call.rows | call.positions | call.sizes | {"FEATURES": call.block(tile.features)}
    arguments |= states.slots | {"flags": flags, "weak": WEAK}
    arguments |= {"out": outputs.out, "logarithms": outputs.log_normaliser}
    arguments |= {"negative": outputs.negative.view(torch.int8)}
    grid = (slots, call.batch * call.heads)
    chunk_kernel[grid](**arguments, num_warps=tile.warps, num_stages=2)
    repair_kernel[grid](**arguments, num_warps=call.repair_warps, num_stages=1)
    return outputs, _last_state(call, states) if with_state else None


def backward(
    inputs: LinearInputs,
    past: LinearState | None,
    grad_out: Tensor,
    outputs: Outputs,
    *,
    tile: Tile,
    to_past: bool = False,
) -> CausalGradients:
    """Gradients with respect to q, k, v and, if `to_past`, the sums of `past`."""
    call = KernelCall(inputs, tile, tile.grad_tokens)
    q, k, v = call.inputs[:3]
    g, rows = _with_rows(grad_out), q.shape[2]
    offsets, deltas = (call.new(call.batch, call.heads, rows) for _ in range(2))
    flat_heads = call.batch * call.heads
    tensors = g, outputs.out.contiguous(), outputs.log_normaliser.contiguous(), offsets, deltas
    sizes = {"VALUE_DIM": call.value_dim, "VALUE_PADDED": _padded(call.value_dim), "TOKENS": 64}
    grid = triton.cdiv(rows, 64), flat_heads
    delta_kernel[grid](*tensors, rows, call.heads, g.stride()[:3], **sizes, num_warps=4)
    arguments = call.rows | _strides(g=g) | call.positions | call.sizes
    arguments |= {"g": g, "offsets": offsets, "deltas": deltas, "limit": LIMIT}
    grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))

    key_states = _key_states(call, past).slots
    slots = call.chunks - call.first
    by_query = arguments | key_states | {"grad_q": grad_q}
    by_query |= {"flags": call.new(flat_heads * slots, dtype=torch.int32), "root": inputs.query_factor}
    by_query["FEATURES"] = call.block(tile.query_features)
    query_kernel[(slots, flat_heads)](**by_query, num_warps=tile.grad_warps, num_stages=2)
    query_repair_kernel[(slots, flat_heads)](**by_query, num_warps=call.repair_warps, num_stages=1)
    # Freed for the states of queries, which are as large.
    del by_query, key_states

    states = _query_states(call, g, offsets, deltas)
    by_key = arguments | states.slots
    by_key |= {"grad_k": grad_k, "grad_v": grad_v, "slots": slots + 1}
    by_key["FEATURES"] = call.block(tile.key_features)
    by_key |= {"root": math.sqrt(abs(inputs.scale)), "scale": abs(inputs.scale)}
    grid = (call.chunks, call.batch * call.kv_heads)
    by_key["flags"] = call.new(grid[0] * grid[1], dtype=torch.int32)
    key_kernel[grid](**by_key, num_warps=tile.grad_warps, num_stages=tile.key_stages)
    key_repair_kernel[grid](**by_key, num_warps=call.repair_warps, num_stages=1)
    grad_past = None
    if to_past:
        assert past is not None
        last = _last_state(call, states)
        grad_past = (last.log_scale + past.log_scale).exp().mT * last.sums
    return CausalGradients(grad_q, grad_k, grad_v, grad_past)


def _key_states(call: KernelCall, past: LinearState | None) -> States:
    """The states of keys before every chunk, and after all."""
    _, k, v = call.inputs[:3]
    _, *factors = call.factors
    arguments: dict[str, Any] = {"x": k, "y": v, "mask": call.mask, "bias": call.bias, **_strides(x=k, y=v)}
    arguments |= {"factor": factors[0], "half": factors[1], "constant": factors[2]}
    arguments |= {"offsets": call.key_offsets, "columns": None, "QUERIES": False}
    arguments["HAS_MASK"] = call.mask is not None
    return _states(call, arguments, call.chunks, past)


def _query_states(call: KernelCall, g: Tensor, offsets: Tensor, deltas: Tensor) -> States:
    """The states of queries after every chunk, and of all."""
    q = call.inputs.q
    arguments: dict[str, Any] = {"x": q, "y": g, "mask": None, "bias": None, **_strides(x=q, y=g)}
    arguments |= {"factor": call.factors[0], "half": 0.0, "constant": 0.0}
    arguments |= {"HAS_MASK": False, "HAS_BIAS": False}
    arguments |= {"offsets": offsets, "columns": deltas, "QUERIES": True}
    return _states(call, arguments, call.chunks - call.first, None)


def _states(call: KernelCall, arguments: dict[str, Any], steps: int, past: LinearState | None) -> States:
    per_segment = max(triton.cdiv(steps, _SEGMENTS), 1)
    segments, flat_heads = triton.cdiv(steps, per_segment), call.batch * call.kv_heads
    features, value_dim = call.features, call.value_dim
    slots = call.chunks - call.first + int(arguments["QUERIES"])
    alone, scanned, of_chunks = (
        (
            call.new(flat_heads, number, features, value_dim, dtype=dtype),
            call.new(flat_heads, number, features),
            call.new(flat_heads, number, features),
        )
        for number, dtype in (*[(segments + 1, torch.float32)] * 2, (slots, call.dtype))
    )
    names = ("sums", "ones", "references")
    states = States(scanned, dict(zip(names, of_chunks, strict=True)))
    if past is not None:
        sums, references = past.sums.flatten(0, 1), past.log_scale.flatten(0, 2)
        first = (sums[..., :-1], sums[..., -1], references * LOG2_E)
        for whole, values in zip(alone, first, strict=True):
            whole[:, 0] = values
    positions = call.positions | {"slots": slots, "per_segment": per_segment}
    arguments = call.sizes | positions | arguments | states.slots
    by_themselves, in_sequence = (
        {f"segment_{name}": x for name, x in zip(names, tensors, strict=True)} for tensors in (alone, scanned)
    )
    arguments["FEATURES"] = call.block(call.tile.walk_features)
    options = {"num_warps": call.tile.walk_warps, "num_stages": 2}
    grid = (features // arguments["FEATURES"], segments, flat_heads)
    walk_kernel[grid](w=call.directions, **arguments, **by_themselves, WRITE=False, **options)
    sizes = {"DIM": value_dim, "PADDED": _padded(value_dim), "FEATURES": 16, "HAS_PAST": past is not None}
    scan = scan_kernel[(features // 16, flat_heads)]
    scan(*alone, *scanned, segments, features, **sizes, num_warps=4)
    walk_kernel[grid](w=call.directions, **arguments, **in_sequence, WRITE=True, **options)
    return states


def _last_state(call: KernelCall, states: States) -> LinearState:
    sums, ones, references = (x[:, -1].unflatten(0, (call.batch, call.kv_heads)) for x in states.segments)
    return LinearState(torch.cat([sums, ones.unsqueeze(-1)], dim=-1), references.unsqueeze(-2) * LN_2)


def _strides(**tensors: Tensor) -> dict[str, tuple[int, ...]]:
    return {f"{name}_strides": x.stride()[:3] for name, x in tensors.items()}


def _with_rows(x: Tensor) -> Tensor:
    """The tensor, or a copy of it, whose rows are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _padded(dim: int) -> int:
    return max(triton.next_power_of_2(dim), 16)
