"""Fits of the dense-exponential family, written down from the papers, for comparison with calibrations."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class DenseExponential:
    """x' = Tx for queries and y' = T^(−T) y for keys, rotated by Q, with an exponent a for each axis."""

    transform: np.ndarray
    basis: np.ndarray
    parameters: np.ndarray


def optimal_parameter(mean_square):
    """A* = (1 − 2L − √((2L + 1)² + 8L))/16, where L is the mean of (x + y)² along an axis."""
    return (1 - 2 * mean_square - np.sqrt((2 * mean_square + 1) ** 2 + 8 * mean_square)) / 16


def fitted_oprf(x, y):
    """T = Q = I and a single A*; Likhosherstov et al. (2022)."""
    head_dim = x.shape[1]
    a = optimal_parameter(np.trace(outer_square(x, y, np.eye(head_dim))) / head_dim)
    return DenseExponential(
        transform=np.eye(head_dim), basis=np.eye(head_dim), parameters=np.full(head_dim, a)
    )


def fitted_full(x, y):
    """Transform of ADERF, then basis and parameters of SDERF; Likhosherstov et al. (2023).

    T = S^(1/2) Uᵀ M₁^(−1/2) with M₁^(1/2) M₂ M₁^(1/2) = U S² Uᵀ, M₁ = mean xxᵀ, M₂ = mean yyᵀ.
    """
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    root = vectors * np.sqrt(values) @ vectors.T
    squared, u = np.linalg.eigh(root @ (y.T @ y / len(y)) @ root)
    transform = squared[:, None] ** 0.25 * u.T @ (vectors / np.sqrt(values) @ vectors.T)
    values, basis = np.linalg.eigh(outer_square(x, y, transform))
    parameters = optimal_parameter(np.maximum(values, 0.0))
    return DenseExponential(transform=transform, basis=basis, parameters=parameters)


def outer_square(x, y, transform):
    """Mean of (x' + y')(x' + y')ᵀ over all pairs."""
    z = ((x @ transform.T)[:, None] + y @ np.linalg.inv(transform)).reshape(-1, x.shape[1])
    return z.T @ z / len(z)


def objective(member, x, y):
    """Mean over all pairs of log E[X²]/SM², which the fits minimise."""
    u = 1 - 8 * member.parameters
    z = ((x @ member.transform.T)[:, None] + y @ np.linalg.inv(member.transform)) @ member.basis
    return float((np.log((1 + u) / 2) - np.log(u) / 2 + z**2 / u).sum(axis=-1).mean())
