"""Error of an output against exact softmax attention in float64, compared with a trivial baseline.

The baseline is uniform attention, the mean of the values for every query. An approximation with a larger
error carries no information about the keys that a query attends to.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from efficient_attn.ops.softmax.definition import softmax_attention
from efficient_attn.shapes import Keys, Output, Queries, Values

# Scores are computed in blocks of rows, so that a long sequence never builds the whole float64 matrix.
_ENTRIES_AT_ONCE = 1 << 23


class OutputError(NamedTuple):
    """‖out − exact‖ / ‖exact‖, and the mean of (out − exact)² over all entries."""

    relative: float
    mse: float


def exact_output(
    q: Queries, k: Keys, v: Values, *, scale: float, causal: bool = False, rows: Tensor | None = None
) -> Output:
    """softmax(scale · q kᵀ) v in float64, in blocks of queries.

    Args:
        rows: Positions of the queries to compute, [rows]; None: all.
    """
    q, k, v = q.double(), k.double(), v.double()
    if rows is not None:
        visible = torch.arange(k.shape[-2], device=q.device) <= rows[:, None] + k.shape[-2] - q.shape[-2]
        return F.scaled_dot_product_attention(
            q[..., rows, :], k, v, attn_mask=visible if causal else None, scale=scale, enable_gqa=True
        )
    parts = [
        softmax_attention(
            q[..., rows, :], k[..., :end, :], v[..., :end, :], scale=scale, causal=causal, key_mask=None
        )
        for rows, end in blocks(q, k, causal=causal)
    ]
    return torch.cat(parts, dim=-2)


def mean_of_values(q: Queries, v: Values, *, causal: bool = False, key_mask: Tensor | None = None) -> Output:
    """Uniform-attention baseline: the mean of the visible values for every query."""
    # Sums of many values exceed the range of half precision.
    wide = v.to(torch.promote_types(v.dtype, torch.float32))
    wide = wide.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    seen = torch.ones_like(wide[:, :1, :, :1])
    if key_mask is not None:
        seen = key_mask[:, None, :, None].to(wide.dtype)
        wide = wide * seen
    if not causal:
        mean = wide.sum(dim=-2, keepdim=True) / seen.sum(dim=-2, keepdim=True).clamp_min(1)
        return mean.to(v.dtype).expand(*wide.shape[:2], q.shape[-2], v.shape[-1])
    mean = wide.cumsum(dim=-2) / seen.cumsum(dim=-2).clamp_min(1)
    return mean[..., v.shape[-2] - q.shape[-2] :, :].to(v.dtype)


def output_error(output: Output, exact: Output) -> OutputError:
    """‖out − exact‖ / ‖exact‖ and the mean squared error, in float64; `exact` from `exact_output`."""
    squares = (output.double() - exact).square()
    relative = (squares.sum() / exact.square().sum()).sqrt()
    return OutputError(relative=float(relative), mse=float(squares.mean()))


def unsafe_rows(denominators: Tensor) -> float:
    """Share of rows with a zero or negative denominator, whose output is not an average."""
    return float((denominators <= 0).double().mean())


def blocks(q: Queries, k: Keys, *, causal: bool) -> Iterator[tuple[slice, int]]:
    """Slices of the queries, with the number of keys visible to the last query of the slice."""
    q_tokens, k_tokens = q.shape[-2], k.shape[-2]
    step = max(1, _ENTRIES_AT_ONCE // (q.shape[0] * q.shape[1] * k_tokens))
    for start in range(0, q_tokens, step):
        end = min(start + step, q_tokens)
        yield slice(start, end), k_tokens - q_tokens + end if causal else k_tokens
