"""Exact outputs, comparison of two outputs, and bounds on the effect of rounding."""

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import Inputs
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import run
from efficient_attn.ops.naive import softmax_attention

# Difference that reordering the same operations may cause, relative to the largest value.
ROUNDING = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 1e-4, "float16": 1e-4}
# Change of an output that later tokens may cause; LEAK_LONG applies at 20 times Gaussian norms.
LEAK = {"float64": 1e-10, "float32": 1e-4}
LEAK_LONG = {"float64": 1e-10, "float32": 1e-3}
LONG = 20.0


def exact(inputs: Inputs, *, scale: float, causal: bool, window: int | None = None, first: int = 0) -> Tensor:
    """Softmax attention by its definition, in the dtype of the inputs; options as of `naive`."""
    q, k, v, mask = inputs
    return softmax_attention(
        q, k, v, scale=scale, causal=causal, key_mask=mask, window=window, global_tokens=first
    )


def largest(x: Tensor) -> float:
    """Largest magnitude; 0 for an empty tensor, NaN if any entry is NaN."""
    return float(x.detach().double().abs().max()) if x.numel() else 0.0


def same_bits(where: str, got: Tensor, expected: Tensor) -> Finding:
    """Bitwise equality; NaN equals NaN."""
    equal = got.shape == expected.shape and torch.equal(got.nan_to_num(nan=7e4), expected.nan_to_num(nan=7e4))
    gap = 0.0 if equal else distance(got, expected)
    return Finding(where, gap or (0.0 if equal else float("nan")), 0.0)


def distance(got: Tensor, expected: Tensor) -> float:
    """Largest difference of two tensors; NaN if either contains NaN or the shapes differ."""
    if got.shape != expected.shape:
        return float("nan")
    return largest(got.detach().double() - expected.detach().double())


def close(where: str, got: Tensor, expected: Tensor, bound: float | Tensor) -> Finding:
    """Agreement within a bound, which may vary by row; the finding reports the worst entry."""
    if got.shape != expected.shape:
        return Finding(
            f"{where}: shape {list(got.shape)} instead of {list(expected.shape)}", float("nan"), 0.0
        )
    gap = (got.detach().double() - expected.detach().double()).abs()
    limit = torch.as_tensor(bound, dtype=torch.float64).expand_as(gap)
    if gap.numel() == 0:
        return Finding(where, 0.0, float(limit.max()) if limit.numel() else 0.0)
    # NaN counts as the largest error.
    worst = (gap / limit.clamp_min(torch.finfo(torch.float64).tiny)).nan_to_num(nan=torch.inf).argmax()
    return Finding(where, float(gap.flatten()[worst]), float(limit.flatten()[worst]))


def condition(backend: Backend, inputs: Inputs) -> Tensor:
    """Condition number Σ_j |weight_ij| of every row, at least 1, [batch heads q_tokens 1]."""
    if backend.spec.capabilities.nonnegative:
        return torch.ones(*inputs.q.shape[:-1], 1, dtype=torch.float64)
    weights = backend.attention_weights(inputs.q, inputs.k, key_mask=inputs.key_mask)
    return weights.detach().double().abs().sum(dim=-1, keepdim=True).nan_to_num(nan=1.0).clamp_min(1.0)


def rounding(backend: Backend, inputs: Inputs, dtype: str) -> Tensor:
    """Bound on the rounding error of each row of the output, [batch heads q_tokens 1]."""
    steps = 2 * rounding_step(inputs.v) if dtype in ("bfloat16", "float16") else 0.0
    return magnified(ROUNDING[dtype], backend, inputs) + steps * condition(backend, inputs)


def magnified(share: float, backend: Backend, inputs: Inputs) -> Tensor:
    """Effect on each output row of a relative error `share` in the weights, [batch heads q_tokens 1].

    With κ = Σ_j |weight_ij| the numerator is off by share · κ · |v| and the denominator by share · κ:
    together κ · share · (|v| + |output_i|). The bound uses the larger of the two norms.
    """
    out = run(backend, inputs).detach().double().abs()
    size = out.amax(dim=-1, keepdim=True) if out.shape[-1] else out.new_zeros(*out.shape[:-1], 1)
    size = size.nan_to_num(nan=0.0, posinf=0.0).clamp_min(max(1.0, largest(inputs.v)))
    return share * condition(backend, inputs) * size


def rounding_step(x: Tensor) -> float:
    """Spacing of the dtype's numbers at the largest entry of x; one rounding loses half of it."""
    return torch.finfo(x.dtype).eps * largest(x)
