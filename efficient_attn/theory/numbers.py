"""Checked arguments, and arithmetic on logarithms that must not overflow."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from efficient_attn.errors import OptionError, ShapeError

Floats = NDArray[np.float64]
# Numbers per array that a term of a series may take before the arguments are worked off in parts.
_BLOCK = 1 << 20


def squares(name: str, values: ArrayLike) -> Floats:
    """The values in float64, after a check that each may be the square of a length."""
    array = np.asarray(values, dtype=np.float64)
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        raise OptionError(f"{name} must be finite and at least 0, not {array[wrong].flat[0]}.")
    return array


def count(name: str, value: int) -> int:
    """The value, after a check that it counts something."""
    if int(value) != value or value < 1:
        raise OptionError(f"{name} must be a whole number of at least 1, not {value}.")
    return int(value)


def vectors(name: str, values: ArrayLike, head_dim: int | None = None) -> Floats:
    """The values in float64, after a check that they are finite vectors [tokens head_dim]."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or array.size == 0 or head_dim not in (None, array.shape[-1]):
        wanted = f"[tokens, {head_dim or 'head_dim'}]"
        raise ShapeError(f"{name} must have the shape {wanted}, not {list(array.shape)}.")
    if not np.all(np.isfinite(array)):
        raise OptionError(f"{name} must be finite, but holds an infinity or NaN.")
    return array


def log_expm1(exponent: Floats) -> Floats:
    """log(exp(s) − 1) for s ≥ 0; −∞ at 0."""
    with np.errstate(divide="ignore"):
        return exponent + np.log(-np.expm1(-exponent))


def log_factorials(last: int) -> Floats:
    """log k! for k = 0 … last."""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, last + 1)))])


def log_rising(start: float, last: int) -> Floats:
    """log (start)_k for k = 0 … last, with (b)_k = b (b + 1) … (b + k − 1)."""
    return np.concatenate([[0.0], np.cumsum(np.log(start + np.arange(last)))])


def log_sum_exp(terms: Floats) -> Floats:
    """log Σ exp(terms) over the last axis."""
    largest = terms.max(axis=-1, keepdims=True)
    return largest[..., 0] + np.log(np.exp(terms - largest).sum(axis=-1))


def log_power_series(argument: Floats, log_coefficients: Floats) -> Floats:
    """log Σ_k exp(log_coefficients_k) argument^k for arguments ≥ 0 and a coefficient 1 at k = 0."""
    powers = np.arange(len(log_coefficients))

    def series(part: Floats) -> Floats:
        # exp of a sum with this number is 0, without the 0·∞ that the logarithm of 0 would give at k = 0.
        log_part = np.log(np.maximum(part, np.finfo(np.float64).tiny))
        return log_sum_exp(log_coefficients + powers * log_part[..., None])

    return in_parts(series, argument, len(powers))


def in_parts(function: Callable[[Floats], Floats], argument: Floats, terms: int) -> Floats:
    """The elementwise function of the argument, in parts that keep `terms` numbers per element in bounds."""
    flat = np.ravel(argument)
    num_parts = 1 + flat.size * terms // _BLOCK
    parts = [function(part) for part in np.array_split(flat, num_parts)]
    return np.concatenate(parts).reshape(np.shape(argument))
