"""Errors with coupled directions: orthogonal and simplex blocks with chi-distributed lengths.

Directions come in blocks of at most d = `head_dim`; blocks are independent of each other, and the last may
be partial. Every direction alone is N(0, I), so an estimate stays unbiased and differs from independent
directions only by the covariance of the pairs within a block.
"""

import math
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from efficient_attn.errors import OptionError
from efficient_attn.theory.confluent import pair_excess
from efficient_attn.theory.kernel import log_hyperbolic_error, log_positive_error, log_trigonometric_error
from efficient_attn.theory.numbers import Floats, count, squares

# Gauss nodes for the angle between two lengths: machine precision for head_dim up to 4096.
_NODES = 400


def paired_share(num_directions: int, head_dim: int) -> float:
    """Σ b(b − 1) / m² over blocks of b directions: the share of ordered pairs that lie in one block."""
    m, d = count("num_directions", num_directions), count("head_dim", head_dim)
    blocks, rest = divmod(m, d)
    return (blocks * d * (d - 1) + rest * (rest - 1)) / m**2


def orthogonal_pair_excess(sum_square: ArrayLike, *, head_dim: int) -> Floats:
    """E[X₁X₂]/SM² − 1 = e^(−|z|²) 1F1(d; d/2; |z|²/2) − 1 for two orthogonal directions and z = x + y.

    X is the estimate from one direction by positive features, hyperbolic ones, or OPRF with any A: a factor
    exp(2A|ω|²) rescales the chi law by (1 − 4A)^(−1/2), which √(1 − 4A) ω·z undoes. |R₁u₁ + R₂u₂|² is
    chi-square with 2d degrees of freedom in a uniform direction, and its mean over 0F1(; d/2; |z|² S/4) is
    the 1F1.
    """
    return pair_excess(squares("sum_square", sum_square) / 2, count("head_dim", head_dim))


def simplex_pair_excess(sum_square: ArrayLike, *, head_dim: int) -> Floats:
    """E[X₁X₂]/SM² − 1 for two directions with the cosine ρ = −1/(d − 1), for the same features.

    The mean of e^(−|z|²) 1F1(d; d/2; |z|²/2 (1 + ρ sin 2α)) − 1 over sin²α ~ Beta(d/2, d/2), by Gauss
    quadrature in 2α. The coupling: Reid et al., Simplex Random Features (ICML 2023).
    """
    half = squares("sum_square", sum_square) / 2
    return _mean_over_lengths(half, head_dim, _simplex_cosine(head_dim), np.zeros_like(half))


def log_coupled_error(
    log_error_of_one_direction: ArrayLike,
    excess: ArrayLike,
    *,
    num_directions: int,
    head_dim: int,
    log_unit: ArrayLike = 0.0,
) -> Floats:
    """log of (ρ₂ − 1)/m + f (c − 1) for any estimator: ρ₂ and c are moments of one direction and of a pair.

    f is `paired_share`; with orthogonal or simplex blocks, ρ₂ − 1 and c − 1 are errors over SM².

    Args:
        log_error_of_one_direction: log(ρ₂ − 1), the error at m = 1.
        excess: (c − 1) / exp(log_unit).
    """
    log_one = np.asarray(log_error_of_one_direction, dtype=np.float64)
    share = paired_share(num_directions, head_dim)
    exact = np.isneginf(log_one)
    # Divided by ρ₂ − 1, which bounds c − 1 by Cauchy-Schwarz, so that nothing here overflows.
    ratio = np.where(
        exact, 0.0, np.asarray(excess) * np.exp(np.where(exact, 0.0, np.asarray(log_unit) - log_one))
    )
    with np.errstate(divide="ignore"):
        return log_one + np.log(np.maximum(1 / num_directions + share * ratio, 0.0))


def log_orthogonal_positive_error(sum_square: ArrayLike, *, num_directions: int, head_dim: int) -> Floats:
    """log of the exact error of positive features with orthogonal blocks over SM².

    Choromanski et al. (2021), theorem 2, bounds it; see `log_orthogonal_bound`.
    """
    excess = orthogonal_pair_excess(sum_square, head_dim=head_dim)
    one = log_positive_error(sum_square)
    return log_coupled_error(one, excess, num_directions=num_directions, head_dim=head_dim)


def log_orthogonal_hyperbolic_error(sum_square: ArrayLike, *, num_directions: int, head_dim: int) -> Floats:
    """log of the exact error of hyperbolic features with m orthogonal directions (2m features) over SM².

    ω₁ + ω₂ and ω₁ − ω₂ have the same distribution, so the pair terms are the same as for positive features.
    """
    excess = orthogonal_pair_excess(sum_square, head_dim=head_dim)
    one = log_hyperbolic_error(sum_square)
    return log_coupled_error(one, excess, num_directions=num_directions, head_dim=head_dim)


def log_orthogonal_trigonometric_error(
    difference_square: ArrayLike, *, num_directions: int, head_dim: int
) -> Floats:
    """log of the exact error of trigonometric features with m orthogonal directions (2m features) over SM².

    The pair terms are the same as for positive features at −|x − y|²: E[cos cos] = 1F1(d; d/2; −|x−y|²/2)
    against e^(−|x−y|²). For distant pairs in few dimensions the error slightly exceeds that of independent
    directions.
    """
    square = squares("difference_square", difference_square)
    excess = pair_excess(-square / 2, count("head_dim", head_dim))
    one = log_trigonometric_error(square)
    return log_coupled_error(one, excess, num_directions=num_directions, head_dim=head_dim, log_unit=square)


def log_simplex_positive_error(sum_square: ArrayLike, *, num_directions: int, head_dim: int) -> Floats:
    """log of the exact error of positive features with simplex blocks of directions over SM².

    Reid et al., Simplex Random Features (ICML 2023); the value is the double integral over both lengths.
    """
    excess = simplex_pair_excess(sum_square, head_dim=head_dim)
    one = log_positive_error(sum_square)
    return log_coupled_error(one, excess, num_directions=num_directions, head_dim=head_dim)


def log_simplex_hyperbolic_error(sum_square: ArrayLike, *, num_directions: int, head_dim: int) -> Floats:
    """log of the exact error of hyperbolic features with simplex blocks over SM².

    ω₁ + ω₂ and ω₁ − ω₂ enter in equal parts: the cosines ρ and −ρ.
    """
    square = squares("sum_square", sum_square)
    excess = _mirrored_simplex_excess(square / 2, head_dim)
    one = log_hyperbolic_error(square)
    return log_coupled_error(one, excess, num_directions=num_directions, head_dim=head_dim, log_unit=square)


def log_simplex_trigonometric_error(
    difference_square: ArrayLike, *, num_directions: int, head_dim: int
) -> Floats:
    """log of the exact error of trigonometric features with simplex blocks over SM².

    ω₁ + ω₂ and ω₁ − ω₂ enter in equal parts: the cosines ρ and −ρ.
    """
    square = squares("difference_square", difference_square)
    excess = _mirrored_simplex_excess(-square / 2, head_dim)
    one = log_trigonometric_error(square)
    return log_coupled_error(one, excess, num_directions=num_directions, head_dim=head_dim, log_unit=square)


def log_orthogonal_bound(sum_square: ArrayLike, *, num_directions: int, head_dim: int) -> Floats:
    """log of the bound (e^(|z|²) − 1)/m − 2(m−1)/(m(d+2)) (1 − e^(−|z|²/2))², z = x + y, over SM².

    Choromanski et al. (2021), theorem 2, for positive features with one block of m ≤ d orthogonal
    directions. It agrees with the exact error to leading order in |z|² and lies between it and independent
    directions.
    """
    square = squares("sum_square", sum_square)
    m, d = count("num_directions", num_directions), count("head_dim", head_dim)
    if m > d:
        raise OptionError(f"num_directions must be at most head_dim={d} for the bound, not {m}.")
    gap = -2 / (d + 2) * np.expm1(-square / 2) ** 2
    # Within one block f = (m − 1)/m is the factor of the bound too.
    return log_coupled_error(log_positive_error(square), gap, num_directions=m, head_dim=d)


def _simplex_cosine(head_dim: int) -> float:
    if count("head_dim", head_dim) < 2:
        raise OptionError("head_dim must be at least 2 for simplex directions, not 1.")
    return -1 / (head_dim - 1)


def _mirrored_simplex_excess(half: Floats, head_dim: int) -> Floats:
    """Mean of the pair's excess over the cosines ±ρ, in units of exp(2|half|)."""
    cosine, log_unit = _simplex_cosine(head_dim), 2 * np.abs(half)
    below = _mean_over_lengths(half, head_dim, cosine, log_unit)
    return (below + _mean_over_lengths(half, head_dim, -cosine, log_unit)) / 2


def _mean_over_lengths(half: Floats, head_dim: int, cosine: float, log_unit: Floats) -> Floats:
    """Mean over sin 2α of e^(−2w) 1F1(d; d/2; w (1 + ρ sin 2α)) − 1, in units of exp(log_unit)."""
    sines, weights = _sines(head_dim)
    w, unit = half[..., None], log_unit[..., None]
    stretched = w * (1 + cosine * sines)
    shift = 2 * w * cosine * sines
    # c(w(1+ρs)) e^(2wρs) − 1 = (c − 1) e^(2wρs) + (e^(2wρs) − 1), which keeps the digits of small w.
    log_factor = 2 * np.maximum(-stretched, 0.0) + shift - unit
    rest = np.sign(shift) * np.exp(np.maximum(shift, 0.0) - unit) * -np.expm1(-np.abs(shift))
    return (pair_excess(stretched, head_dim) * np.exp(log_factor) + rest) @ weights


@cache
def _sines(head_dim: int) -> tuple[Floats, Floats]:
    """sin 2α and the weights of the law of 2α, whose density on [0, π] is proportional to sin^(d−1)."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    sines = np.sin(math.pi / 2 * (nodes + 1))
    weights = weights * sines ** (head_dim - 1)
    return sines, weights / weights.sum()
