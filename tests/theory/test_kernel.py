"""Closed forms of the errors of random features: against integration, scipy and published numbers."""

import math

import numpy as np
import pytest
from scipy.special import hyp0f1, roots_jacobi, roots_legendre

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.ops.linear.features import draw_directions
from efficient_attn.theory.kernel import (
    ERRORS,
    fixed_norm_mean,
    log_fixed_norm_error,
    log_oprf_error,
    log_orthogonal_error,
    rare_error,
    unbiased_from,
)

log_positive_error = ERRORS["positive"]

# Estimate from a direction ω over SM, from ω·z or ω·Δ and |z|² or |Δ|² for z = x + y and Δ = x − y.
ESTIMATES = {
    "positive": lambda along, square: np.exp(along - square / 2),
    "hyperbolic": lambda along, square: np.exp(-square / 2) * np.cosh(along),
    "trigonometric": lambda along, square: np.exp(square / 2) * np.cos(along),
}


def oprf_estimate(w, z, a):
    return np.sqrt(1 - 4 * a) * np.exp(2 * a * w**2 + np.sqrt(1 - 4 * a) * w * z - z**2 / 2)


def normal_mean(function):
    """E f(ω) of a normal number, by a Gauss rule that is exact to roundings for exponents below 200."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    return (weights * function(nodes)).sum() / weights.sum()


@pytest.mark.parametrize("kind", ESTIMATES)
@pytest.mark.parametrize("square", [0.25, 8.0, 32.0])
def test_errors_of_independent_directions_are_their_integrals_up_to_long_vectors(kind, square):
    second = normal_mean(lambda w: ESTIMATES[kind](w * math.sqrt(square), square) ** 2)
    error = ERRORS[kind](square, num_directions=8)
    assert np.exp(error) == pytest.approx((second - 1) / 8, rel=1e-12)


def test_oprf_with_exponents_for_each_axis_has_the_integral_as_error():
    z, a = np.array([-0.7, 0.4, 1.1, 0.2, 3.0]), np.array([-0.3, -0.05, 0.02, 0.05, -0.3])
    second = math.prod(normal_mean(lambda w, i=i: oprf_estimate(w, z[i], a[i]) ** 2) for i in range(len(z)))
    assert np.exp(log_oprf_error(z, a=a, num_directions=8)) == pytest.approx((second - 1) / 8, rel=1e-12)
    positive = log_positive_error(z @ z, num_directions=8)
    assert log_oprf_error(z, a=np.zeros(5), num_directions=8) == pytest.approx(positive, rel=1e-12)


@pytest.mark.parametrize("square", [0.25, 2.0])
def test_the_error_of_rare_directions_follows_from_the_kurtosis(square):
    single, along = log_positive_error(square), math.sqrt(square)
    kurtosis = normal_mean(lambda w: (ESTIMATES["positive"](w * along, square) - 1) ** 4) / np.exp(2 * single)
    assert rare_error(single, samples=100) == pytest.approx(math.sqrt((kurtosis - 3) / 100), rel=1e-8)
    assert rare_error(log_positive_error(400.0), samples=1000) == math.inf
    assert rare_error(-math.inf, samples=1000) == 0.0


def integrated_pair_moment(kind, square, head_dim, a=0.0):
    """E[X₁X₂]/SM² from its definition: over both lengths, and over two coordinates of a unit vector."""
    radii, weights = roots_legendre(150)
    radii = (radii + 1) / 2 * (np.sqrt(head_dim) + np.sqrt(square) + 14)
    weights = weights * np.exp((head_dim - 1) * np.log(radii) - radii**2 / 2)
    weights = weights / weights.sum() * np.exp(2 * a * radii**2) * (1 - 4 * a) ** (head_dim / 2)
    nodes, node_weights = roots_jacobi(60, (head_dim - 4) / 2, 0)
    angles = np.arange(96) * 2 * np.pi / 96
    first = np.sqrt((nodes[:, None] + 1) / 2) * np.cos(angles)
    second = np.sqrt((nodes[:, None] + 1) / 2) * np.sin(angles)

    def over_lengths(coordinate):
        along = np.sqrt(square * (1 - 4 * a)) * coordinate[..., None] * radii
        return ESTIMATES[kind](along, square) @ weights

    mean_over_angles = (over_lengths(first) * over_lengths(second)).mean(axis=1)
    return mean_over_angles @ node_weights / node_weights.sum()


def pair_moment(square, *, kind, head_dim):
    """1 + (c − 1)/u from the error of two directions at ρ₂ − 1 = u, where u is the size that c reaches."""
    unit = np.zeros_like(square) if kind == "positive" else square
    sizes = {"num_directions": 2, "head_dim": head_dim}
    return 2 * np.exp(log_orthogonal_error(square, kind=kind, log_single=unit, **sizes) - unit)


@pytest.mark.parametrize("kind", ESTIMATES)
@pytest.mark.parametrize(("head_dim", "square"), [(4, 32.0), (5, 1.0), (5, 32.0), (64, 8.0)])
def test_pairs_have_the_moment_of_its_definition_up_to_long_vectors(head_dim, square, kind):
    unit = 1.0 if kind == "positive" else math.exp(square)
    expected = integrated_pair_moment(kind, square, head_dim)
    # Gauss rules of this order leave the rounding of exponents up to a hundred, and of 1 + (c − 1).
    moment = pair_moment(square, kind=kind, head_dim=head_dim)
    np.testing.assert_allclose(moment, 1 + (expected - 1) / unit, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("kind", ESTIMATES)
def test_the_error_of_blocks_counts_the_pairs_within_each(kind):
    head_dim, square = 16, 1.0
    single = np.exp(ERRORS[kind](square))
    excess = integrated_pair_moment(kind, square, head_dim) - 1
    for m in (1, 8, 16, 24, 48):
        block = np.arange(m) // head_dim
        pairs = (block == block[:, None]).sum() - m
        error = log_orthogonal_error(square, kind=kind, num_directions=m, head_dim=head_dim)
        assert np.exp(error) == pytest.approx(single / m + pairs / m**2 * excess, rel=1e-10)


def test_oprf_adds_the_same_for_every_pair_whatever_its_parameter():
    moment = pair_moment(2.0, kind="positive", head_dim=8)
    for a in (-0.3, -0.05):
        assert integrated_pair_moment("positive", 2.0, 8, a) == pytest.approx(moment, rel=1e-11)


@pytest.mark.parametrize("head_dim", [3, 64])
def test_what_a_pair_adds_keeps_its_digits_near_zero(head_dim):
    excess = 2 * 1e-8**2 / (head_dim + 2)
    sizes = {"num_directions": 2, "head_dim": head_dim, "log_single": math.log(2 * excess)}
    error = log_orthogonal_error(2e-8, kind="positive", **sizes)
    assert np.exp(error) == pytest.approx(excess / 2, rel=1e-6)


@pytest.mark.parametrize("kind", ESTIMATES)
def test_every_error_is_a_number_from_zero_to_lengths_that_overflow(kind):
    squares = np.array([0.0, 1e-12, 1.0, 600.0, 2000.0])
    errors = [ERRORS[kind](squares)]
    for head_dim in (2, 7):
        errors.append(log_orthogonal_error(squares, kind=kind, num_directions=2, head_dim=head_dim))
    for error in errors:
        assert error[0] == -np.inf and np.isfinite(error[1:]).all()


@pytest.mark.parametrize("head_dim", [1, 2, 3, 16, 33])
def test_the_mean_of_directions_of_fixed_norm_is_the_series(head_dim):
    squares, length = np.array([0.0, 0.3, 4.0, 20.0]), 0.8
    argument = length**2 * head_dim * squares / 4
    for sign, kind in ((1, "positive"), (1, "hyperbolic"), (-1, "trigonometric")):
        expected = np.exp(-sign * squares / 2) * hyp0f1(head_dim / 2, sign * argument)
        mean = fixed_norm_mean(squares, kind=kind, head_dim=head_dim, length=length)
        # The sum of cosines keeps 16 digits of one.
        np.testing.assert_allclose(mean, expected, rtol=1e-11, atol=1e-14 * np.exp(squares[-1] / 2))


@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
@pytest.mark.parametrize("kind", ESTIMATES)
def test_errors_of_directions_of_fixed_norm_are_measured_ones(kind, projection):
    head_dim, square, draws = 8, 3.0, 4000
    for directions in (1, 12):
        estimates = []
        for seed in range(draws):
            rows = draw_directions(projection, directions, head_dim, seed=seed, norms="fixed")
            estimates.append(ESTIMATES[kind](rows[:, 0].numpy() * math.sqrt(square), square).mean())
        mean = fixed_norm_mean(square, kind=kind, head_dim=head_dim)
        errors = (np.array(estimates) - 1) ** 2
        sizes = {"num_directions": directions, "head_dim": head_dim, "projection": projection}
        error = np.exp(log_fixed_norm_error(square, kind=kind, **sizes))
        for values, expected in ((np.array(estimates), mean), (errors, error)):
            assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(draws)


def test_fixed_norms_have_the_smaller_error_below_the_number_of_features_where_both_are_equal():
    number = unbiased_from(4.0, kind="hyperbolic", head_dim=16)
    for features, nearer in ((number, True), (number - 2, False)):
        pair = {"kind": "hyperbolic", "num_directions": features // 2, "head_dim": 16}
        assert (log_orthogonal_error(4.0, **pair) <= log_fixed_norm_error(4.0, **pair)) == nearer


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (lambda: log_positive_error(-1.0), OptionError, "square must be finite and at least 0"),
        (lambda: log_oprf_error([1.0], a=0.125), OptionError, r"a must be below 1/8, not 0\.125"),
        (
            lambda: log_orthogonal_error(1.0, kind="positiv", num_directions=1, head_dim=4),
            UnknownNameError,
            "'positive'",
        ),
    ],
)
def test_wrong_arguments_are_refused(request_, error, message):
    with pytest.raises(error, match=message):
        request_()
