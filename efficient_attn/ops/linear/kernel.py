"""Feature estimates of the softmax kernel, for pairs of a query and a key, and for all keys of a query."""

import torch
from torch import Tensor

from efficient_attn.ops.grouped_queries import unfold
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.shapes import Weights

# Maps whose inner products estimate exp(x·y); other maps estimate another kernel.
SOFTMAX_KERNELS = ("positive", "hyperbolic", "trigonometric", "taylor-1", "taylor-2")
_ALL = slice(None)


def rows_of(inputs: LinearInputs) -> tuple[Tensor, Tensor]:
    """Scaled queries and keys, the arguments of the features, [batch heads tokens head_dim]."""
    return inputs.query_rows(_ALL), inputs.key_rows(_ALL)


def kernel_ratios(inputs: LinearInputs) -> Tensor:
    """φ(x_i)·φ(y_i) / exp(x_i·y_i) for query i and key i, [batch heads tokens]; 1 for an exact estimate."""
    x, y = rows_of(inputs)
    directions = None if inputs.directions is None else inputs.directions.to(x.dtype)
    queries, keys = (inputs.map.features(rows, directions) for rows in (x, y))
    logs = queries.log_scale + keys.log_scale - (x * y).sum(dim=-1, keepdim=True)
    if inputs.log_weights is not None:
        logs = logs + inputs.log_weights.to(x.dtype)
    if queries.values is None or keys.values is None:
        return torch.exp(logs).sum(dim=-1)
    return (queries.values * keys.values * torch.exp(logs)).sum(dim=-1)


def kernel_weights(inputs: LinearInputs) -> Weights:
    """φ(x_i)·φ(y_j) / Σ_j exp(x_i·y_j): estimates over exact sums, which no attention computes."""
    x, y = rows_of(inputs)
    directions = None if inputs.directions is None else inputs.directions.to(x.dtype)
    queries, keys = (inputs.map.features(rows, directions) for rows in (x, y))
    key_scale = keys.log_scale
    if inputs.log_weights is not None:
        key_scale = key_scale + inputs.log_weights.to(x.dtype)
    # The largest key scale of a feature moves to the queries, where the exact sums compensate it.
    largest = key_scale.amax(dim=-2, keepdim=True)
    log_sums = (x @ y.mT).logsumexp(dim=-1, keepdim=True)
    left = torch.exp(queries.log_scale + largest - log_sums)
    right = torch.exp(key_scale - largest)
    if queries.values is not None and keys.values is not None:
        left, right = queries.values * left, keys.values * right
    return unfold(left @ right.mT, inputs.q.shape[1])
