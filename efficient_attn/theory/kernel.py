"""Errors of trigonometric, positive and hyperbolic random features with independent directions.

m is `num_directions`, the number of independent ω ~ N(0, I); trigonometric and hyperbolic maps make two
features of each direction, the positive map one. The relative errors depend on the pair only through |x +
y|² or |x − y|².
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.theory.numbers import Floats, count, log_expm1, squares

FEATURES_PER_DIRECTION = {"trigonometric": 2, "positive": 1, "hyperbolic": 2}


def log_trigonometric_error(difference_square: ArrayLike, *, num_directions: int = 1) -> Floats:
    """log of ½ e^(|x−y|²) (1 − e^(−|x−y|²))² / m: the error of cos and sin features over SM².

    Choromanski et al., Rethinking Attention with Performers (ICLR 2021), lemma 2, divided by SM². No head_dim
    enters. It is −∞ for x = y, where the estimate is exact.
    """
    square = squares("difference_square", difference_square)
    return 2 * log_expm1(square) - square - math.log(2 * count("num_directions", num_directions))


def log_positive_error(sum_square: ArrayLike, *, num_directions: int = 1) -> Floats:
    """log of (e^(|x+y|²) − 1) / m: the error of positive features (FAVOR+) over SM².

    Choromanski et al. (2021), lemma 2, divided by SM². It is −∞ for x = −y, where the estimate is exact.
    """
    square = squares("sum_square", sum_square)
    return log_expm1(square) - math.log(count("num_directions", num_directions))


def log_hyperbolic_error(sum_square: ArrayLike, *, num_directions: int = 1) -> Floats:
    """log of ½ (1 − e^(−|x+y|²)) (e^(|x+y|²) − 1) / m: the error of features at ω and −ω over SM².

    Choromanski et al. (2021), lemma 2, divided by SM²: less than half the error of positive features for
    twice their number, hence never worse at equal numbers of features.
    """
    square = squares("sum_square", sum_square)
    return 2 * log_expm1(square) - square - math.log(2 * count("num_directions", num_directions))


def log_error_of_one_feature(estimator: str, log_error_of_one_direction: ArrayLike) -> Floats:
    """log of error × features, the error of one feature: r independent features divide it by r.

    The estimator is one of `FEATURES_PER_DIRECTION`; the error is that of m = 1.
    """
    if estimator not in FEATURES_PER_DIRECTION:
        raise UnknownNameError("estimator", estimator, FEATURES_PER_DIRECTION)
    log_error = np.asarray(log_error_of_one_direction, dtype=np.float64)
    return log_error + math.log(FEATURES_PER_DIRECTION[estimator])


def log_mean_squared_error(log_error: ArrayLike, product: ArrayLike) -> Floats:
    """log of the mean squared error itself, from that over SM² and x·y: SM² = exp(2 x·y)."""
    return np.asarray(log_error, dtype=np.float64) + 2 * np.asarray(product, dtype=np.float64)


def log_utility(norm: ArrayLike, angle: ArrayLike) -> Floats:
    """log of MSE_trig / MSE_positive at equal directions, for |x| = |y| = norm and the angle between them.

    Choromanski et al. (2021), figure 2; above 0 the positive features are the better ones. For equal
    numbers of features add log 2.
    """
    square = np.asarray(norm, dtype=np.float64) ** 2
    cosine = np.cos(angle)
    # The halved angle keeps 1 ± cos exact where it vanishes.
    differences = 4 * square * np.sin(np.asarray(angle) / 2) ** 2
    sums = np.maximum(2 * square * (1 + cosine), 0.0)
    return log_trigonometric_error(differences) - log_positive_error(sums)


def log_generalized_error(
    square: ArrayLike, *, head_dim: int, a: complex, sign: int = 1, num_directions: int = 1
) -> Floats:
    """log of the error of generalized exponential features over the kernel's square.

    Re f₁(x) f₂(y) with f = D exp(A|ω|² + B ω·x + C|x|²), B = √(s(1 − 4A)), C = −(s+1)/2, D = (1 − 4A)^(d/4)
    and B s in place of B for y. Likhosherstov et al., Chefs' Random Tables (NeurIPS 2022), their theorem on
    GERF. The sign s = 1 with A = 0 is the positive map, s = −1 with A = 0 the trigonometric one; complex A
    is allowed.

    Args:
        square: |x + s y|².
        a: A, with a real part below 1/8.
    """
    q = squares("square", square)
    dim = count("head_dim", head_dim)
    if sign not in (1, -1):
        raise OptionError(f"sign must be 1 or -1, not {sign}.")
    if not complex(a).real < 1 / 8:
        raise OptionError(f"a must have a real part below 1/8, not {a}: the second moment is infinite.")
    spread = 1 - 8 * complex(a)
    narrow = 1 - 4 * complex(a)
    # (1 + 16A²/(1 − 8A))^(d/2), written so that no branch of the power has to be chosen when d is odd.
    log_first = dim * np.log(narrow) - dim / 2 * np.log(spread) + sign / spread * q
    slope = (sign + 2 * abs(narrow)) / (2 * spread.real) - sign / 2
    log_second = slope * q + (dim * math.log(abs(narrow)) - dim / 2 * math.log(spread.real))
    largest = np.maximum(np.maximum(log_first.real, log_second), 0.0)
    moments = (np.exp(log_first - largest).real + np.exp(log_second - largest)) / 2
    with np.errstate(divide="ignore"):
        excess = np.log(np.maximum(moments - np.exp(-largest), 0.0))
    return largest + excess - math.log(count("num_directions", num_directions))
