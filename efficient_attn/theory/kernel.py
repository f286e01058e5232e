"""Errors of random features in closed form, in float64.

Vectors are scaled, x = q/d^(1/4) and y = k/d^(1/4), so that the softmax kernel is SM = exp(x·y).
An error is the mean squared error of a kernel entry over SM², given as its natural logarithm, since it
leaves the range of float64 long before attention leaves the range of inputs.

m is `num_directions`, the number of directions ω ~ N(0, I); trigonometric and hyperbolic maps make two
features of each direction, the positive map one. Errors depend on a pair only through `square`: |x − y|² for
trigonometric features, |x + y|² for the others.

Directions of fixed norm √d are uniform on a sphere. Their mean E[exp(w·z)] = 0F1(; d/2; d |z|²/4) is smaller
than exp(|z|²/2): the estimate has less variance and a bias that no number of features removes.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.problem import positive_count

Floats = NDArray[np.float64]

# Up to here the power series of `_pair_excess` loses less than two digits to cancellation.
_SMALL = 1.0
# Nodes of a quadrature, exact for polynomials of twice their degree: enough for radii up to about 500.
_NODES = 512
# Most directions of a crossing of two errors.
_MOST_DIRECTIONS = 2**40
# Terms of a series that are summed after each further term is at most half of its predecessor.
_HALVINGS = 64


def log_trigonometric_error(square: ArrayLike, *, num_directions: int = 1) -> Floats:
    """log of ½ e^(|x−y|²) (1 − e^(−|x−y|²))² / m: the error of cos and sin features over SM².

    Choromanski et al., Rethinking Attention with Performers (ICLR 2021), lemma 2, divided by SM². It is −∞
    for x = y, where the estimate is exact. With |x+y|² it is the error of hyperbolic features, at ω and −ω.
    """
    square = _squares(square)
    return 2 * _log_expm1(square) - square - math.log(2 * num_directions)


def log_positive_error(square: ArrayLike, *, num_directions: int = 1) -> Floats:
    """log of (e^(|x+y|²) − 1) / m: the error of positive features (FAVOR+) over SM².

    Choromanski et al. (2021), lemma 2, divided by SM². It is −∞ for x = −y, where the estimate is exact.
    """
    return _log_expm1(_squares(square)) - math.log(num_directions)


def log_oprf_error(z: ArrayLike, *, a: ArrayLike, num_directions: int = 1) -> Floats:
    """log of the error of OPRF (FAVOR++) over SM², for z = x + y [..., head_dim].

    With u = 1 − 8a, log E[X²]/SM² = Σ_l log((1 + u_l)/2) − ½ log u_l + z_l²/u_l for one direction; a = 0 is
    the positive map. Likhosherstov et al., Chefs' Random Tables (NeurIPS 2022), and Dense-Exponential Random
    Features (NeurIPS 2023) with an exponent for each axis.

    Args:
        a: Quadratic exponents below 1/8, one for all axes or one for each.
    """
    z, a = np.asarray(z, dtype=np.float64), np.asarray(a, dtype=np.float64)
    if not np.all(a < 1 / 8):
        raise OptionError(f"a must be below 1/8, not {np.max(a)}: the second moment is infinite.")
    u = 1 - 8 * a
    moment = (np.log((1 + u) / 2) - np.log(u) / 2 + z**2 / u).sum(axis=-1)
    return _log_expm1(np.maximum(moment, 0.0)) - math.log(num_directions)


# Kinds of features with a closed form at every pair, by backend.
KINDS = {
    "performer-positive": "positive",
    "performer-hyperbolic": "hyperbolic",
    "performer-trig": "trigonometric",
}

# Error by kind of features.
ERRORS: dict[str, Callable[..., Floats]] = {
    "positive": log_positive_error,
    "hyperbolic": log_trigonometric_error,
    "trigonometric": log_trigonometric_error,
}


def log_orthogonal_error(
    square: ArrayLike,
    *,
    kind: str,
    num_directions: int,
    head_dim: int,
    log_single: ArrayLike | None = None,
) -> Floats:
    """log of the exact error of orthogonal directions over SM²: (ρ₂ − 1)/m + f (c − 1).

    Directions come in blocks of at most d = `head_dim` with chi-distributed lengths; blocks are independent
    of each other, and the last may be partial. ρ₂ = E[X²]/SM² of one direction, c = E[X₁X₂]/SM² of a pair in
    a block, and f = Σ b(b − 1)/m² over blocks of b directions is the share of such pairs.

    c = e^(−|z|²) 1F1(d; d/2; |z|²/2) for z = x + y, also for OPRF with any exponent and for features at ω and
    −ω; −|x − y|² in place of |z|² for trigonometric features. Choromanski et al. (2021), theorem 2, bounds
    this error.

    Args:
        kind: `positive`, `hyperbolic` or `trigonometric`.
        log_single: log(ρ₂ − 1), by default the error of this kind at m = 1; OPRF is of the kind `positive`.
    """
    square = _squares(square)
    if kind not in ERRORS:
        raise UnknownNameError("kind", kind, ERRORS)
    half = -square / 2 if kind == "trigonometric" else square / 2
    log_unit = square if kind == "trigonometric" else np.zeros_like(square)
    positive_count("num_directions", num_directions)
    log_error = np.asarray(ERRORS[kind](square) if log_single is None else log_single, dtype=np.float64)
    exact = np.isneginf(log_error)
    # Divided by ρ₂ − 1, which bounds c − 1 by Cauchy-Schwarz, so that nothing here overflows.
    excess = _pair_excess(half, head_dim)
    ratio = np.where(exact, 0.0, excess * np.exp(np.where(exact, 0.0, log_unit - log_error)))
    with np.errstate(divide="ignore"):
        share = _pair_share(num_directions, head_dim)
        return log_error + np.log(np.maximum(1 / num_directions + share * ratio, 0.0))


def log_sphere_mean(radius: ArrayLike, *, head_dim: int) -> Floats:
    """log E[e^(r u)] for an entry u of a uniform unit vector.

    It is log 0F1(; d/2; r²/4).
    """
    places, weights = _sphere_rule(head_dim)
    radius = np.asarray(radius, dtype=np.float64)
    return radius + np.log(np.exp(radius[..., None] * (places - 1)) @ weights)


def sphere_cosine(radius: ArrayLike, *, head_dim: int) -> Floats:
    """E[cos(r u)] for an entry u of a uniform unit vector.

    It is 0F1(; d/2; −r²/4).
    """
    places, weights = _sphere_rule(head_dim)
    return np.cos(np.asarray(radius, dtype=np.float64)[..., None] * places) @ weights


@lru_cache(maxsize=8)
def _sphere_rule(head_dim: int) -> tuple[Floats, Floats]:
    """Nodes and weights of the mean over an entry u of a unit vector, with density ∝ (1 − u²)^((d − 3)/2)."""
    if head_dim == 1:
        return np.array([-1.0, 1.0]), np.array([0.5, 0.5])
    # Each rule has the remaining factor of the density as a polynomial.
    if head_dim % 2:
        places, weights = np.polynomial.legendre.leggauss(_NODES)
        weights = weights * (1 - places**2) ** ((head_dim - 3) // 2)
    else:
        places, weights = np.polynomial.chebyshev.chebgauss(_NODES)
        weights = weights * (1 - places**2) ** ((head_dim - 2) // 2)
    return places, weights / weights.sum()


def fixed_norm_mean(square: ArrayLike, *, kind: str, head_dim: int, length: float = 1.0) -> Floats:
    """Mean estimate over SM from directions of norm s √d, s = `length`, of any coupling.

    e^(−|z|²/2) 0F1(; d/2; s² d |z|²/4) for z = x + y. Trigonometric features have
    e^(|Δ|²/2) 0F1(; d/2; −s² d |Δ|²/4) for Δ = x − y, which may be negative.
    """
    square = _squares(square)
    radius = length * np.sqrt(head_dim * square)
    if kind == "trigonometric":
        return np.exp(square / 2) * sphere_cosine(radius, head_dim=head_dim)
    return np.exp(log_sphere_mean(radius, head_dim=head_dim) - square / 2)


def log_fixed_norm_error(
    square: ArrayLike, *, kind: str, num_directions: int, head_dim: int, projection: str = "orthogonal"
) -> Floats:
    """log of the error over SM² of directions of norm √d: (ρ₂ − μ²)/m + f (c − μ²) + (μ − 1)².

    μ is `fixed_norm_mean`, ρ₂ = E[X²]/SM² of one direction, c = E[X₁X₂]/SM² of an orthogonal pair, and f the
    share of such pairs, as in `log_orthogonal_error`. Twice a direction has the norm 2√d, the sum of an
    orthogonal pair √(2d): both are uniform on a sphere.
    """
    square = _squares(square)
    mean, radius = fixed_norm_mean(square, kind=kind, head_dim=head_dim), np.sqrt(head_dim * square)
    if kind == "trigonometric":
        twice, pair = (sphere_cosine(x * radius, head_dim=head_dim) for x in (2.0, math.sqrt(2)))
        second, pair = np.exp(square) * (1 + twice) / 2, np.exp(square) * pair
    else:
        radii = (2.0 * radius, math.sqrt(2) * radius)
        second, pair = (np.exp(log_sphere_mean(x, head_dim=head_dim) - square) for x in radii)
    if kind == "hyperbolic":
        second = (np.exp(-square) + second) / 2
    share = _pair_share(num_directions, head_dim) if projection == "orthogonal" else 0.0
    variance = (second - mean**2) / num_directions + share * (pair - mean**2)
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(variance, 0.0) + (mean - 1) ** 2)


def unbiased_from(square: float, *, kind: str, head_dim: int) -> int:
    """Number of features from which norms of Gaussian vectors have a smaller error than fixed norms."""

    def nearer(directions: int) -> bool:
        pair: dict[str, Any] = {"kind": kind, "num_directions": directions, "head_dim": head_dim}
        return bool(log_orthogonal_error(square, **pair) <= log_fixed_norm_error(square, **pair))

    directions = range(1, _MOST_DIRECTIONS)
    number = directions[bisect_left(directions, True, key=nearer)]
    return number if kind == "positive" else 2 * number


def _pair_share(num_directions: int, head_dim: int) -> float:
    """Share of pairs of directions within a block, Σ b(b − 1)/m²."""
    blocks, rest = divmod(num_directions, head_dim)
    return (blocks * head_dim * (head_dim - 1) + rest * (rest - 1)) / num_directions**2


def log_pair_error(
    angle: ArrayLike,
    *,
    kind: str,
    projection: str,
    norm: float,
    num_features: int,
    head_dim: int,
    norms: str = "chi",
) -> Floats | None:
    """log of the error over SM² at pairs of equal norm, None without a closed form.

    With |x| = |y| = r and the angle φ, |x ± y|² = 2 r² (1 ± cos φ).

    Args:
        angle: φ in degrees.
        projection: `iid` or `orthogonal`; no other coupling of directions has a closed form.
        norms: Norms of the directions, `chi` or `fixed`.
    """
    sign = -1 if kind == "trigonometric" else 1
    square = 2 * norm**2 * (1 + sign * np.cos(np.radians(np.asarray(angle, dtype=np.float64))))
    directions = num_features if kind == "positive" else num_features // 2
    if projection not in ("iid", "orthogonal"):
        return None
    coupled: dict[str, Any] = {"kind": kind, "num_directions": directions, "head_dim": head_dim}
    if norms == "fixed":
        return log_fixed_norm_error(square, projection=projection, **coupled)
    if projection == "iid":
        return ERRORS[kind](square, num_directions=directions)
    return log_orthogonal_error(square, **coupled)


def rare_error(log_single: ArrayLike, *, samples: int) -> Floats:
    """√((κ − 3)/samples): relative standard error of a measured error that comes from rare directions.

    κ = e^(4σ²) + 2e^(3σ²) + 3e^(2σ²) − 3 is the kurtosis of a lognormal estimate with σ² = log ρ₂, such as
    that of positive features from one direction. Beyond |x + y|² of about 2 nearly all of its variance comes
    from directions that are almost never drawn: a measured error is too small, and the sample hides it.

    Args:
        log_single: log(ρ₂ − 1), the error of one direction.
        samples: Number of directions over all draws.
    """
    with np.errstate(over="ignore"):
        ratio = np.exp(np.logaddexp(0.0, log_single))
        return np.sqrt((ratio**4 + 2 * ratio**3 + 3 * ratio**2 - 6) / samples)


def _pair_excess(argument: Floats, head_dim: int) -> Floats:
    """e^(−2w) 1F1(d; d/2; w) − 1, for w < 0 in units of e^(2|w|), the size that it reaches there.

    By Kummer's transformation it is a sum of (−d/2)_k (−w)^k e^(−|w|) / ((d/2)_k k!), less the unit. Terms
    are at most |w|^k e^(−|w|) / k!, which add up to 1, and end by themselves for even d. Near 0 they would
    cancel, but the function solves w c″ + (3w + d/2) c′ + 2w c = 0: the coefficients of its power series
    obey a recurrence, with c₀ = 1 and c₁ = 0.
    """
    half, small = head_dim / 2, np.abs(argument) <= _SMALL
    coefficients = [1.0, 0.0]
    for n in range(1, _HALVINGS):
        following = -(3 * n * coefficients[n] + 2 * coefficients[n - 1]) / ((n + 1) * (n + half))
        coefficients.append(following)
    near = np.polynomial.polynomial.polyval(np.where(small, argument, 0.0), [0.0, *coefficients[1:]])
    last = head_dim // 2
    if head_dim % 2:
        last = int(2 * np.max(np.abs(argument), initial=0.0)) + head_dim + _HALVINGS
    powers = np.arange(last + 1)
    factors = powers[:-1] - half
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.abs(factors)))])
    logs = logs - _log_rising(half, last) - _log_rising(1, last)
    signs = np.concatenate([[1.0], np.cumprod(np.sign(factors))])
    size = np.abs(argument)[..., None]
    signs = np.where(argument[..., None] > 0, (-1.0) ** powers, 1.0) * signs
    # The smallest number for 0, so that 0·log 0 stays 0.
    terms = signs * np.exp(logs + powers * np.log(np.maximum(size, np.finfo(np.float64).tiny)) - size)
    unit = np.exp(-2 * np.maximum(-argument, 0.0))
    return np.where(small, near * unit, terms.sum(axis=-1) - unit)


def _log_rising(start: float, last: int) -> Floats:
    """log (start)_k for k = 0 … last, with (b)_k = b (b + 1) … (b + k − 1)."""
    return np.concatenate([[0.0], np.cumsum(np.log(start + np.arange(last)))])


def _log_expm1(exponent: Floats) -> Floats:
    """log(exp(s) − 1) for s ≥ 0, −∞ at 0."""
    with np.errstate(divide="ignore"):
        return exponent + np.log(-np.expm1(-exponent))


def _squares(values: ArrayLike) -> Floats:
    """Values in float64, checked to be squares of lengths."""
    array = np.asarray(values, dtype=np.float64)
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        raise OptionError(f"square must be finite and at least 0, not {array[wrong].flat[0]}.")
    return array
