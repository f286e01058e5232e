"""Positive features with directions of the fixed length √d: a smaller error bought with a bias (SMREG)."""

import numpy as np
from numpy.typing import ArrayLike

from efficient_attn.theory.confluent import log_bessel
from efficient_attn.theory.couplings import paired_share
from efficient_attn.theory.numbers import Floats, count, log_expm1, squares


def log_regularised_ratio(sum_square: ArrayLike, *, head_dim: int) -> Floats:
    """log of SMREG/SM = e^(−|z|²/2) 0F1(; d/2; d|z|²/4), z = x + y: at most 0, so SMREG is biased low.

    Choromanski et al. (2021), equation 6 and theorem 1: ω = √d u with a random unit vector u.
    """
    square = squares("sum_square", sum_square)
    return log_bessel(count("head_dim", head_dim) * square / 4, head_dim) - square / 2


def log_regularised_variance(
    sum_square: ArrayLike, *, num_directions: int, head_dim: int, orthogonal: bool = True
) -> Floats:
    """log of the variance over SM², from the second moment e^(−|z|²) 0F1(; d/2; d|z|²), z = x + y.

    Pairs within an orthogonal block have E[X₁X₂]/SM² = e^(−|z|²) 0F1(; d/2; d|z|²/2). Both moments are
    differences of logarithms, good to 1e-15/|z|² in relative terms.
    """
    square = squares("sum_square", sum_square)
    log_bias = log_regularised_ratio(square, head_dim=head_dim)
    m = count("num_directions", num_directions)
    log_second = log_bessel(head_dim * square, head_dim) - square
    log_pair = log_bessel(head_dim * square / 2, head_dim) - square
    share = paired_share(m, head_dim) if orthogonal else 0.0
    one = log_expm1(np.maximum(log_second - 2 * log_bias, 0.0))
    exact = np.isneginf(one)
    with np.errstate(divide="ignore"):
        ratio = np.where(exact, 0.0, np.expm1(log_pair - 2 * log_bias) / np.exp(np.where(exact, 0.0, one)))
        return 2 * log_bias + one + np.log(np.maximum(1 / m + share * ratio, 0.0))


def log_regularised_error(
    sum_square: ArrayLike, *, num_directions: int, head_dim: int, orthogonal: bool = True
) -> Floats:
    """log of the mean squared error against SM over SM²: variance plus the square of the bias."""
    variance = log_regularised_variance(
        sum_square, num_directions=num_directions, head_dim=head_dim, orthogonal=orthogonal
    )
    bias = -np.expm1(log_regularised_ratio(sum_square, head_dim=head_dim))
    with np.errstate(divide="ignore"):
        return np.logaddexp(variance, 2 * np.log(np.maximum(bias, 0.0)))
