"""Positive features with exponents quadratic in ω: OPRF (FAVOR++) and the dense-exponential family (FAVOR#).

f(ω, x') = Π_l (1 − 4a_l)^(1/4) exp(Σ_l a_l ω_l² + Σ_l √(1 − 4a_l) ω_l (Qᵀx')_l − |x'|²/2) after x' = Tx for
queries and y' = T^(−T) y for keys, which keeps x·y. All members are unbiased and positive and differ in
T, Q and a. With u_l = 1 − 8a_l and z' = x' + y', log E[X²]/SM² = Σ_l [log((1 + u_l)/2) − ½ log u_l +
(Qᵀz')_l²/u_l] for one direction. Likhosherstov et al., Chefs' Random Tables (NeurIPS 2022) and
Dense-Exponential Random Features (NeurIPS 2023).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from efficient_attn.errors import OptionError
from efficient_attn.theory.numbers import Floats, count, log_expm1, squares, vectors


def optimal_parameter(mean_square: ArrayLike) -> Floats:
    """A* = (1 − 2L − √((2L + 1)² + 8L))/16, at most 0, where L is the mean of (x + y)_l².

    It minimises the mean of log E[X²]. For OPRF, L = |x + y|²/d averaged over the pairs; in Likhosherstov
    et al. (2022) ρ = 1/(1 − 8A*) is the positive root that gives it, in Likhosherstov et al. (2023) it is
    one for each axis.
    """
    mean = squares("mean_square", mean_square)
    return (1 - 2 * mean - np.sqrt((2 * mean + 1) ** 2 + 8 * mean)) / 16


def log_oprf_second_moment(sum_square: ArrayLike, *, head_dim: int, a: float) -> Floats:
    """log of E[X²]/SM² = ((1 + u)/2)^d u^(−d/2) e^(|x+y|²/u), u = 1 − 8A, for one direction; A = 0 is FAVOR+.

    Likhosherstov et al. (2022), the softmax form of their positive-sign features with real A < 1/8.
    """
    square, u = squares("sum_square", sum_square), _spread(np.asarray(a, dtype=np.float64))
    return count("head_dim", head_dim) * (np.log((1 + u) / 2) - np.log(u) / 2) + square / u


def log_oprf_error(sum_square: ArrayLike, *, head_dim: int, a: float, num_directions: int = 1) -> Floats:
    """log of the error of OPRF over SM² for m independent directions, hence m features.

    For orthogonal or simplex blocks give the error at m = 1 to `couplings.log_coupled_error`.
    """
    moment = log_oprf_second_moment(sum_square, head_dim=head_dim, a=a)
    return log_expm1(np.maximum(moment, 0.0)) - math.log(count("num_directions", num_directions))


@dataclass(frozen=True, kw_only=True)
class DenseExponential:
    """A member of the family, with its parameters fitted or given.

    Attributes:
        transform: T [head_dim head_dim], for queries; keys take its inverse transpose.
        basis: Q [head_dim head_dim], orthonormal columns.
        parameters: a [head_dim], each below 1/8.
    """

    transform: Floats
    basis: Floats
    parameters: Floats


def positive_map(head_dim: int) -> DenseExponential:
    """FAVOR+ as a member: T = Q = I, a = 0."""
    identity = np.eye(count("head_dim", head_dim))
    return DenseExponential(transform=identity, basis=identity, parameters=np.zeros(head_dim))


def fitted_oprf(x: ArrayLike, y: ArrayLike) -> DenseExponential:
    """OPRF for the pairs of these queries and keys: T = Q = I, one A* from the mean of |x + y|²/d."""
    x, y = _pair(x, y)
    identity = np.eye(x.shape[1])
    return _with_one_parameter(x, y, identity)


def fitted_saderf(x: ArrayLike, y: ArrayLike) -> DenseExponential:
    """SADERF: T = diag((Σ_j y_jl² / Σ_i x_il²)^(1/4)) balances queries and keys axis by axis, then OPRF.

    Likhosherstov et al. (2023). The queries are multiplied by T: an axis on which the keys are long
    stretches them.
    """
    x, y = _pair(x, y)
    x_square, y_square = (x**2).mean(axis=0), (y**2).mean(axis=0)
    for square in (x_square, y_square):
        _check_full_rank(square)
    return _with_one_parameter(x, y, np.diag((y_square / x_square) ** 0.25))


def fitted_aderf(x: ArrayLike, y: ArrayLike) -> DenseExponential:
    """ADERF: T gives queries and keys the same diagonal second moments S, then OPRF.

    T = S^(1/2) Uᵀ M₁^(−1/2) with M₁^(1/2) M₂ M₁^(1/2) = U S² Uᵀ, M₁ = mean xxᵀ, M₂ = mean yyᵀ.
    Likhosherstov et al. (2023).
    """
    x, y = _pair(x, y)
    return _with_one_parameter(x, y, _aderf_transform(x, y))


def fitted_sderf(x: ArrayLike, y: ArrayLike) -> DenseExponential:
    """SDERF: T = I, Q and L are the eigenpairs of the mean of (x + y)(x + y)ᵀ over all pairs, a_l = A*(L_l).

    Likhosherstov et al. (2023).
    """
    x, y = _pair(x, y)
    return _with_all_parameters(x, y, np.eye(x.shape[1]))


def fitted_full(x: ArrayLike, y: ArrayLike) -> DenseExponential:
    """ADERF's transform, then SDERF's basis and parameters: on the objective never worse than ADERF or OPRF.

    SDERF is at least as good as OPRF on the same vectors, since equal a in any basis is among its choices;
    both are in Likhosherstov et al. (2023), their composition is not.
    """
    x, y = _pair(x, y)
    return _with_all_parameters(x, y, _aderf_transform(x, y))


def log_second_moments(member: DenseExponential, x: ArrayLike, y: ArrayLike) -> Floats:
    """log of E[X²]/SM² for one direction [queries keys]; the family's closed form."""
    x, y = _pair(x, y, head_dim=len(member.parameters))
    u = _spread(member.parameters)
    x_rotated = x @ member.transform.T @ member.basis / np.sqrt(u)
    y_rotated = np.linalg.solve(member.transform.T, y.T).T @ member.basis / np.sqrt(u)
    lengths = (x_rotated**2).sum(axis=1)[:, None] + (y_rotated**2).sum(axis=1) + 2 * x_rotated @ y_rotated.T
    return (np.log((1 + u) / 2) - np.log(u) / 2).sum() + lengths


def objective(member: DenseExponential, x: ArrayLike, y: ArrayLike) -> float:
    """Mean over all pairs of log E[X²]/SM², which the fits minimise: the shifted log-variance."""
    return float(log_second_moments(member, x, y).mean())


def log_errors(member: DenseExponential, x: ArrayLike, y: ArrayLike, *, num_directions: int = 1) -> Floats:
    """log of the error of the member over SM² [queries keys], for m independent directions: m features."""
    moments = np.maximum(log_second_moments(member, x, y), 0.0)
    return log_expm1(moments) - math.log(count("num_directions", num_directions))


def _pair(x: ArrayLike, y: ArrayLike, head_dim: int | None = None) -> tuple[Floats, Floats]:
    queries = vectors("x", x, head_dim)
    return queries, vectors("y", y, queries.shape[1])


def _spread(parameters: Floats) -> Floats:
    if not np.all(parameters < 1 / 8):
        raise OptionError(f"a must be below 1/8, not {np.max(parameters)}: the second moment is infinite.")
    return 1 - 8 * parameters


def _with_one_parameter(x: Floats, y: Floats, transform: Floats) -> DenseExponential:
    head_dim = x.shape[1]
    a = optimal_parameter(np.trace(_mean_outer_square(x, y, transform)) / head_dim)
    return DenseExponential(transform=transform, basis=np.eye(head_dim), parameters=np.full(head_dim, a))


def _with_all_parameters(x: Floats, y: Floats, transform: Floats) -> DenseExponential:
    values, basis = np.linalg.eigh(_mean_outer_square(x, y, transform))
    return DenseExponential(
        transform=transform, basis=basis, parameters=optimal_parameter(np.maximum(values, 0.0))
    )


def _mean_outer_square(x: Floats, y: Floats, transform: Floats) -> Floats:
    """Mean of (x' + y')(x' + y')ᵀ over all pairs, from the moments of each side."""
    moved_x, moved_y = x @ transform.T, np.linalg.solve(transform.T, y.T).T
    across = np.outer(moved_x.mean(axis=0), moved_y.mean(axis=0))
    return moved_x.T @ moved_x / len(x) + moved_y.T @ moved_y / len(y) + across + across.T


def _aderf_transform(x: Floats, y: Floats) -> Floats:
    values, vectors_ = np.linalg.eigh(x.T @ x / len(x))
    _check_full_rank(values)
    root = vectors_ * np.sqrt(values) @ vectors_.T
    squared, u = np.linalg.eigh(root @ (y.T @ y / len(y)) @ root)
    _check_full_rank(squared)
    return squared[:, None] ** 0.25 * u.T @ (vectors_ / np.sqrt(values) @ vectors_.T)


def _check_full_rank(moments: Floats) -> None:
    """Refuse moments that the transform would have to divide by rounding errors."""
    if not moments.min() > np.finfo(np.float64).eps * moments.max():
        raise OptionError(
            "x and y must each span every axis to fit a transform: give more tokens than head_dim, "
            "or use fitted_sderf."
        )
