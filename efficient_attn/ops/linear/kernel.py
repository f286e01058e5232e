"""Estimates of the softmax kernel by features: ratios, row sums, and parameters fitted on samples.

Dense-exponential features are positive features of x' = Tx and y' = T^(−T) (y − c), a transform that changes
a row of x·y by a constant only, with exponents quadratic in the direction:

f(w, x') = Π_l (1 − 4a_l)^(1/4) exp(Σ_l a_l w_l² + Σ_l √(1 − 4a_l) w_l x'_l − |x'|²/2).

For every a < 1/8, T and c, f(w, x')·f(w, y') is an unbiased estimate of exp(x'·y'); the parameters determine
its variance. Likhosherstov et al., Chefs' Random Tables (NeurIPS 2022) and Dense-Exponential Random
Features (NeurIPS 2023).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.ops.dtypes import float64_device, upcast, zero_masked
from efficient_attn.ops.linear.causal import causal_linear_attention
from efficient_attn.ops.linear.full import full_linear_attention
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.state import finite

# Maps whose inner products estimate exp(x·y); other maps estimate another kernel.
SOFTMAX_KERNELS = ("positive", "hyperbolic", "trigonometric", "taylor-1", "taylor-2")
_ALL = slice(None)

# Lengths of directions over √head_dim that a calibration compares, and the most queries that it compares.
LENGTHS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
_QUERIES = 256


def kernel_ratios(inputs: LinearInputs) -> Tensor:
    """φ(x_i)·φ(y_i) / exp(x_i·y_i) for query i and key i, [batch heads tokens]. An exact estimate gives 1."""
    x, y = inputs.query_rows(_ALL), inputs.key_rows(_ALL)
    queries, keys = (inputs.map.features(rows, inputs.directions_for(x)) for rows in (x, y))
    logs = queries.log_scale + keys.log_scale - (x * y).sum(dim=-1, keepdim=True)
    if inputs.log_weights is not None:
        logs = logs + inputs.log_weights.to(x.dtype)
    if queries.values is None or keys.values is None:
        return torch.exp(logs).sum(dim=-1)
    return (queries.values * keys.values * torch.exp(logs)).sum(dim=-1)


def denominators(inputs: LinearInputs, *, causal: bool) -> Tensor:
    """Σ_j φ(q)·φ(k_j) over the largest visible exp(log_scale_j), [batch heads q_tokens].

    The query's own scale, common to its row, is omitted. Fully masked rows give 0.
    """
    # Values of width zero, since only the sum of the features is needed.
    bare = inputs._replace(v=inputs.k[..., :0])
    outputs = causal_linear_attention(bare) if causal else full_linear_attention(bare)
    scales = inputs.key_features(inputs.key_rows(_ALL), _ALL).log_scale
    before = inputs.k.shape[-2] - inputs.q.shape[-2]
    largest = scales.cummax(dim=-2).values[..., before:, :] if causal else scales.amax(-2, keepdim=True)
    logarithm = outputs.log_normaliser - finite(largest.repeat_interleave(inputs.group, dim=1))
    size = logarithm.masked_fill(logarithm == torch.inf, -torch.inf).exp()
    return torch.where(outputs.negative, -size, size).squeeze(-1)


class Moments(NamedTuple):
    """Moments of the queries, or keys, of each key head, in float64.

    Attributes:
        mean: [kv_heads head_dim].
        second: Second moment, the mean of xxᵀ, [kv_heads head_dim head_dim].
    """

    mean: Tensor
    second: Tensor
    num_vectors: int


class Fit(NamedTuple):
    """Parameters of the feature map for each key head.

    Attributes:
        curvatures: a, [kv_heads head_dim].
        factors: Factors on w_l x'_l, √(1 − 4a) times the length of the directions, [kv_heads head_dim].
        query_transform: T, [kv_heads head_dim head_dim]; zero heads without a transform.
        key_transform: T^(−T), of the same shape.
        shift: c, subtracted from the keys, [kv_heads head_dim]; zero heads without a shift.
    """

    curvatures: Tensor
    factors: Tensor
    query_transform: Tensor
    key_transform: Tensor
    shift: Tensor


def moments(rows: Tensor, num_vectors: int) -> Moments:
    """Moments of vectors [batch kv_heads rows head_dim], `num_vectors` per head. The other rows are zeros."""
    x = rows.to(float64_device(rows.device)).double().transpose(0, 1).flatten(1, 2)
    return Moments(x.sum(dim=1) / num_vectors, x.mT @ x / num_vectors, num_vectors)


def optimal_curvatures(mean_square: Tensor) -> Tensor:
    """a = (1 − 2L − √((2L + 1)² + 8L)) / 16 with L the mean of (x' + y')_l²: the minimum of the log-variance.

    One L for all axes: Likhosherstov et al. (2022); one per axis: Likhosherstov et al. (2023).
    """
    return (1 - 2 * mean_square - ((2 * mean_square + 1).square() + 8 * mean_square).sqrt()) / 16


def fit_oprf(x: Moments, y: Moments) -> Fit:
    """OPRF (FAVOR++): T = I, c = 0, one a for all axes from the mean of |x + y|²."""
    heads, head_dim = x.mean.shape
    squares = (m.second.diagonal(dim1=-2, dim2=-1).sum(dim=-1) for m in (x, y))
    together = sum(squares, 2 * (x.mean * y.mean).sum(dim=-1))
    a = optimal_curvatures(together / head_dim).unsqueeze(-1).expand(heads, head_dim)
    none = a.new_empty(0, head_dim, head_dim)
    return Fit(a.contiguous(), (1 - 4 * a).sqrt(), none, none.clone(), a.new_empty(0, head_dim))


def fit_full(x: Moments, y: Moments) -> Fit:
    """Centred inputs, ADERF's transform, then SDERF's own a for each axis.

    With C₁ and C₂ the covariances, T = S^(1/2) Uᵀ C₁^(−1/2), where C₁^(1/2) C₂ C₁^(1/2) = U S² Uᵀ, gives
    queries and keys the same diagonal covariance S (Likhosherstov et al. 2023, ADERF). The covariance of
    x' + y' is 2S, so its axes are SDERF's, and L = 2S. The variance depends on x' + y' alone; one shift of
    the keys, which leaves softmax unchanged, therefore centres queries and keys: c = mean y + TᵀT mean x.
    """
    values, axes = torch.linalg.eigh(_covariance(x))
    root = (axes * values.sqrt().unsqueeze(-2)) @ axes.mT
    squared, u = torch.linalg.eigh(root @ _covariance(y) @ root)
    s = squared.clamp_min(squared.amax(dim=-1, keepdim=True) * torch.finfo(squared.dtype).eps).sqrt()
    inverse_root = (axes / values.sqrt().unsqueeze(-2)) @ axes.mT
    query_transform = s.sqrt().unsqueeze(-1) * (u.mT @ inverse_root)
    key_transform = (u.mT @ root) / s.sqrt().unsqueeze(-1)
    shift = y.mean + (query_transform.mT @ query_transform @ x.mean.unsqueeze(-1)).squeeze(-1)
    a = optimal_curvatures(2 * s)
    return Fit(a, (1 - 4 * a).sqrt(), query_transform, key_transform, shift)


def _covariance(of: Moments) -> Tensor:
    """Covariance with one additional isotropic vector of the mean square of the others.

    Few or equal vectors leave axes of zero variance, by which the transform would divide. One vector in
    num_vectors + 1 keeps every variance positive, and its weight falls with their number.
    """
    head_dim = of.mean.shape[-1]
    outer = of.mean.unsqueeze(-1) * of.mean.unsqueeze(-2)
    square = of.second.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    # All-zero vectors have no scale; any positive one does.
    square = torch.where(square > 0, square, 1.0)[:, None, None]
    identity = torch.eye(head_dim, dtype=outer.dtype, device=outer.device)
    return (of.num_vectors * (of.second - outer) + square * identity) / (of.num_vectors + 1)


class DeviationSample(NamedTuple):
    """Deviations of exact attention from uniform attention at some queries.

    Attributes:
        rows: Positions of the queries, evenly spaced, [rows].
        uniform: Mean of the values that each query sees, [batch heads rows value_dim].
        exact: Softmax attention less the mean, of the same shape.
    """

    rows: Tensor
    uniform: Tensor
    exact: Tensor
    kv_heads: int

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, scale: float, causal: bool
    ) -> "DeviationSample":
        q, k, v = map(upcast, (q, zero_masked(k, key_mask), zero_masked(v, key_mask)))
        rows = torch.linspace(0, q.shape[2] - 1, min(q.shape[2], _QUERIES), device=q.device).round().long()
        visible = None if key_mask is None else key_mask[:, None, None, :]
        if causal:
            past = torch.arange(k.shape[2], device=q.device) <= rows[:, None] + k.shape[2] - q.shape[2]
            visible = past if visible is None else past & visible
        queries = q[:, :, rows]
        uniform, exact = (
            F.scaled_dot_product_attention(x, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
            for x in (torch.zeros_like(queries), queries)
        )
        return cls(rows, uniform, exact - uniform, k.shape[1])

    def correlation(self, out: Tensor) -> Tensor:
        """Cosine of the deviations of an output with the exact ones, [kv_heads]. Without any it is −1."""
        deviation = upcast(out[:, :, self.rows]) - self.uniform
        ours, right = (x.transpose(0, 1).reshape(self.kv_heads, -1) for x in (deviation, self.exact))
        return torch.nan_to_num(F.cosine_similarity(ours, right, eps=0.0), nan=-1.0)
