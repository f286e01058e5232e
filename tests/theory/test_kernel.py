"""Closed forms of the errors of random features: against measurement, integration and published numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import hyp1f1, roots_jacobi, roots_legendre
from theory.dense_exponential import fitted_full, fitted_oprf, objective, optimal_parameter
from theory.draws import assert_mean, block_projections, importance_draws, simplex_directions, vector_pair

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.theory.kernel import (
    log_coupled_error,
    log_hyperbolic_error,
    log_moment,
    log_oprf_error,
    log_positive_error,
    log_trigonometric_error,
    log_utility,
    standard_error,
)

KINDS = ("positive", "hyperbolic", "trigonometric")
COUPLINGS = ("orthogonal", "simplex")
# Directions of all draws together; few directions need more draws for the same standard error.
NUMBERS = 2_000_000


def independent_error(kind, square, m):
    formulas = (log_positive_error, log_hyperbolic_error, log_trigonometric_error)
    return dict(zip(KINDS, formulas, strict=True))[kind](square, num_directions=m)


def ratio(kind, along, square):
    """Estimate from one direction over SM, from ω·e along z = x + y or Δ = x − y."""
    exponent = np.sqrt(square) * along
    if kind == "trigonometric":
        return np.cos(exponent) * np.exp(square / 2)
    return (np.exp(exponent) if kind == "positive" else np.cosh(exponent)) * np.exp(-square / 2)


def feature_map(kind, x, omega):
    if kind == "trigonometric":
        both = np.concatenate([np.cos(omega @ x), np.sin(omega @ x)], axis=-1)
        return np.exp(x @ x / 2) * both / np.sqrt(omega.shape[-2])
    positive = np.exp(omega @ x - x @ x / 2) / np.sqrt(omega.shape[-2])
    if kind == "positive":
        return positive
    negative = np.exp(-omega @ x - x @ x / 2) / np.sqrt(omega.shape[-2])
    return np.concatenate([positive, negative], axis=-1) / np.sqrt(2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [4, 64])
@pytest.mark.parametrize("squares", [(0.25, 1.0), (1.0, 3.0)], ids=["short", "long"])
def test_the_error_of_a_whole_feature_map_is_that_of_lemma_2(kind, head_dim, squares):
    x, y = vector_pair(head_dim, *squares)
    omega = np.random.default_rng(head_dim).standard_normal((20_000, 8, head_dim))
    estimates = (feature_map(kind, x, omega) * feature_map(kind, y, omega)).sum(axis=-1)
    expected = np.exp(independent_error(kind, squares[kind == "trigonometric"], 8) + 2 * x @ y)
    assert_mean((estimates - np.exp(x @ y)) ** 2, expected)


@pytest.mark.parametrize("sum_square", [1.0, 8.0, 32.0])
@pytest.mark.parametrize("kind", ["positive", "hyperbolic"])
def test_the_error_holds_where_plain_sampling_would_miss_it(sum_square, kind):
    z = vector_pair(16, sum_square, 0.0)[0] * 2
    omega, weights = importance_draws(z, 200_000, seed=1)
    estimates = ratio(kind, omega @ z / np.sqrt(sum_square), sum_square)
    assert_mean(weights * estimates, 1.0)
    assert_mean(weights * (estimates - 1) ** 2, np.exp(independent_error(kind, sum_square, 1)))


WHOLE = [(kind, coupling, d, d) for kind in KINDS for coupling in COUPLINGS for d in (3, 16, 64)]
# Whole blocks; a part of a block, and several; distant pairs, where no estimate overflows.
BLOCKS = [
    *((*block, 0.25) for block in WHOLE),
    *((*block, 1.0) for block in WHOLE),
    *((kind, "orthogonal", m, 16, 0.8) for kind in ("positive", "trigonometric") for m in (8, 24, 48)),
    *(("trigonometric", "orthogonal", 8, 8, square) for square in (4.0, 16.0, 64.0)),
]


@pytest.mark.parametrize(("kind", "coupling", "num_directions", "head_dim", "square"), BLOCKS)
def test_blocks_of_coupled_directions_have_the_exact_error(kind, coupling, num_directions, head_dim, square):
    directions = np.eye(head_dim) if coupling == "orthogonal" else simplex_directions(head_dim)
    along = block_projections(directions, num_directions, NUMBERS // num_directions, seed=0)
    sizes = {"num_directions": num_directions, "head_dim": head_dim}
    expected = log_coupled_error(square, kind=kind, projection=coupling, **sizes)
    assert_mean((ratio(kind, along, square).mean(axis=1) - 1) ** 2, np.exp(expected))


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_oprf_adds_the_same_for_every_pair_whatever_its_parameter(coupling):
    head_dim, square = 8, 1.0
    a = optimal_parameter(square / head_dim)
    directions = np.eye(head_dim) if coupling == "orthogonal" else simplex_directions(head_dim)
    generator = np.random.default_rng(2)
    unit = generator.standard_normal((100_000, head_dim))
    cosines = unit / np.linalg.norm(unit, axis=1, keepdims=True) @ directions.T
    lengths = generator.chisquare(head_dim, (100_000, head_dim))
    along = np.sqrt(lengths * square) * cosines
    estimates = np.exp(2 * a * lengths + np.sqrt(1 - 4 * a) * along - square / 2)
    estimates *= (1 - 4 * a) ** (head_dim / 2)
    log_single = log_oprf_error(np.sqrt(square) * np.eye(head_dim)[0], a=np.full(head_dim, a))
    expected = log_coupled_error(
        square, kind="positive", projection=coupling, num_directions=8, head_dim=8, log_single=log_single
    )
    assert_mean((estimates.mean(axis=1) - 1) ** 2, np.exp(expected))


def pair_moment(square, *, kind="positive", projection="orthogonal", head_dim):
    """c of two directions: with (ρ₂ − 1) = 1 their error is 1/2 + (c − 1)/2."""
    sizes = {"num_directions": 2, "head_dim": head_dim}
    return 2 * np.exp(log_coupled_error(square, kind=kind, projection=projection, log_single=0.0, **sizes))


def integrated_pair_moment(square, head_dim, cosine):
    """E[X₁X₂]/SM² from its definition: over both lengths, and over two coordinates of a unit vector."""
    radii, weights = roots_legendre(300)
    radii = (radii + 1) / 2 * (np.sqrt(head_dim) + np.sqrt(square) + 14)
    weights = weights * np.exp((head_dim - 1) * np.log(radii) - radii**2 / 2)
    weights /= weights.sum()
    nodes, node_weights = roots_jacobi(60, (head_dim - 4) / 2, 0)
    angles = np.arange(96) * 2 * np.pi / 96
    first = np.sqrt((nodes[:, None] + 1) / 2) * np.cos(angles)
    second = np.sqrt((nodes[:, None] + 1) / 2) * np.sin(angles)
    second = cosine * first + np.sqrt(1 - cosine**2) * second

    def over_lengths(coordinate):
        return np.exp(np.sqrt(square) * coordinate[..., None] * radii - square / 2) @ weights

    mean_over_angles = (over_lengths(first) * over_lengths(second)).mean(axis=1)
    return mean_over_angles @ node_weights / node_weights.sum()


@pytest.mark.parametrize("head_dim", [4, 5, 64])
@pytest.mark.parametrize("square", [1.0, 8.0, 32.0])
def test_pairs_have_the_moment_of_its_definition_up_to_long_vectors(head_dim, square):
    # Gauss rules of this order leave the rounding of exponents up to a hundred, and of 1 + (c − 1).
    rounding = {"rtol": 1e-11, "atol": 1e-14}
    for projection, cosine in (("orthogonal", 0.0), ("simplex", -1 / (head_dim - 1))):
        moment = pair_moment(square, projection=projection, head_dim=head_dim)
        expected = integrated_pair_moment(square, head_dim, cosine)
        np.testing.assert_allclose(moment, expected, **rounding)


@pytest.mark.parametrize("head_dim", [2, 3, 8, 33, 64])
def test_orthogonal_pairs_have_the_confluent_function_of_scipy(head_dim):
    w = np.array([0.0, 1e-3, 0.5, 0.999, 1.001, 2.0, 10.0])
    half = head_dim / 2
    positive = np.exp(-2 * w) * hyp1f1(head_dim, half, w)
    np.testing.assert_allclose(pair_moment(2 * w, head_dim=head_dim), positive, rtol=1e-12)
    # In units of e^(2w), which the moment reaches.
    trigonometric = np.maximum(np.exp(-w) * hyp1f1(-half, half, w), 0.0)
    moment = pair_moment(2 * w, kind="trigonometric", head_dim=head_dim) * np.exp(-2 * w)
    np.testing.assert_allclose(moment, trigonometric, rtol=0, atol=1e-13)


@pytest.mark.parametrize("head_dim", [3, 64])
def test_what_a_pair_adds_keeps_its_digits_near_zero(head_dim):
    excess = 2 * 1e-8**2 / (head_dim + 2)
    sizes = {"num_directions": 2, "head_dim": head_dim, "log_single": math.log(2 * excess)}
    error = log_coupled_error(2e-8, kind="positive", projection="orthogonal", **sizes)
    assert np.exp(error) == pytest.approx(excess / 2, rel=1e-6)


@pytest.mark.parametrize("head_dim", [4, 16, 64])
def test_the_exact_error_is_below_the_bound_of_theorem_2_which_is_below_independent_directions(head_dim):
    square = np.geomspace(1e-3, 100, 60)
    for m in {2, head_dim // 2, head_dim}:
        sizes = {"num_directions": m, "head_dim": head_dim}
        exact = log_coupled_error(square, kind="positive", projection="orthogonal", **sizes)
        gain = 2 * (m - 1) / (head_dim + 2) * np.expm1(-square / 2) ** 2 / np.expm1(square)
        bound = log_positive_error(square, num_directions=m) + np.log1p(-gain)
        assert np.all(exact <= bound + 1e-12) and np.all(gain > 0)


@pytest.mark.parametrize(
    ("head_dim", "square", "orthogonal", "simplex"),
    [(16, 0.25, 0.259, 0.0218), (16, 8.0, 2970, 2968), (64, 1.0, 1.26, 0.293), (64, 4.0, 47.1, 43.8)],
)
def test_simplex_blocks_are_below_orthogonal_ones_by_the_published_amount(
    head_dim, square, orthogonal, simplex
):
    sizes = {"kind": "positive", "num_directions": head_dim, "head_dim": head_dim}
    errors = [log_coupled_error(square, projection=name, **sizes) for name in COUPLINGS]
    # Three digits are published.
    np.testing.assert_allclose(head_dim * np.exp(errors), [orthogonal, simplex], rtol=5e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_a_number_from_zero_to_lengths_that_overflow(kind):
    squares = np.array([0.0, 1e-300, 1e-12, 1.0, 600.0, 2000.0])
    errors = [independent_error(kind, squares, 1)]
    for projection in COUPLINGS:
        for head_dim in (2, 7, 64):
            sizes = {"num_directions": 2, "head_dim": head_dim}
            errors.append(
                log_coupled_error(squares[[0, 2, 3, 4, 5]], kind=kind, projection=projection, **sizes)
            )
    for error in errors:
        assert error[0] == -np.inf and np.isfinite(error[1:]).all()


def test_the_utility_is_the_ratio_of_both_errors_and_turns_round_where_published_curves_do():
    angles = np.array([np.pi / 4, np.pi / 2, 2 * np.pi / 3, 3 * np.pi / 4])
    for norm in (0.5, 1.0, 2.0):
        cosine = np.cos(angles)
        direct = (
            -4 * norm**2 * cosine
            + 2 * np.log1p(-np.exp(-2 * norm**2 * (1 - cosine)))
            - np.log(2 * -np.expm1(-2 * norm**2 * (1 + cosine)))
        )
        np.testing.assert_allclose(log_utility(norm, angles), direct, rtol=1e-12)
    np.testing.assert_allclose(np.exp(log_utility(1.0, angles)), [0.0060, 0.432, 5.28, 17.8], rtol=6e-3)


@pytest.mark.parametrize("head_dim", [4, 64])
@pytest.mark.parametrize("sum_square", [1.0, 8.0, 32.0])
def test_oprf_has_the_stated_error_and_its_best_exponent_no_better_neighbour(head_dim, sum_square):
    z = 2 * vector_pair(head_dim, sum_square, 0.0)[0]
    a = optimal_parameter(sum_square / head_dim)
    # Where the estimate and its square have their mass, both narrower than N(0, I).
    b, u = np.sqrt(1 - 4 * a), 1 - 8 * a
    proposals = ((0.0, 1.0), (1 / b, b**2), (2 * b / u, u))
    omega, weights = importance_draws(z, 100_000, seed=6, proposals=proposals)
    exponents = 2 * a * (omega**2).sum(axis=1) + b * (omega @ z) - sum_square / 2
    estimates = (1 - 4 * a) ** (head_dim / 2) * np.exp(exponents)
    assert_mean(weights * estimates, 1.0)
    error = log_oprf_error(z, a=np.full(head_dim, a))
    assert_mean(weights * (estimates - 1) ** 2, np.exp(error))
    for neighbour in (a - 1e-3, a + 1e-3):
        assert log_oprf_error(z, a=np.full(head_dim, neighbour)) > error


def test_oprf_with_exponents_for_each_axis_has_the_stated_error_and_with_zero_is_the_positive_map():
    generator = np.random.default_rng(3)
    z, a = generator.standard_normal(4) / 2, np.array([-0.3, -0.05, 0.02, 0.05])
    omega = generator.standard_normal((400_000, 4))
    logs = np.log(1 - 4 * a) / 2 + 2 * a * omega**2 + np.sqrt(1 - 4 * a) * omega * z - z**2 / 2
    estimates = np.exp(logs.sum(axis=1))
    assert_mean(estimates, 1.0)
    assert_mean((estimates - 1) ** 2, np.exp(log_oprf_error(z, a=a)))
    positive = log_positive_error(z @ z, num_directions=8)
    assert log_oprf_error(z, a=np.zeros(4), num_directions=8) == pytest.approx(positive, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_fits_that_calibrations_are_compared_with_minimise_their_objective(seed):
    generator = np.random.default_rng(seed)
    scales = np.arange(1, 7) ** -0.5
    x, y = generator.standard_normal((2, 40, 6)) * np.stack([scales, scales[::-1]])[:, None] + 0.2
    full, oprf = fitted_full(x, y), fitted_oprf(x, y)
    assert objective(full, x, y) <= objective(oprf, x, y) + 1e-9
    for member, steps in ((oprf, np.ones((1, 6))), (full, np.eye(6))):
        for step in np.concatenate([steps, -steps]) * 1e-3:
            neighbour = replace(member, parameters=member.parameters + step)
            assert objective(neighbour, x, y) > objective(member, x, y)
    turn = generator.standard_normal((6, 6)) * 1e-2
    turned = replace(full, basis=full.basis @ np.linalg.qr(np.eye(6) + turn - turn.T)[0])
    assert objective(turned, x, y) > objective(full, x, y)


@pytest.mark.parametrize(
    ("kind", "estimate", "a"),
    [
        ("positive", lambda w, z: np.exp(w * z - z**2 / 2), None),
        ("hyperbolic", lambda w, z: np.exp(-(z**2) / 2) * np.cosh(w * z), None),
        ("trigonometric", lambda w, z: np.exp(z**2 / 2) * np.cos(w * z), None),
        (
            "positive",
            lambda w, z: np.sqrt(1.4) * np.exp(-0.2 * w**2 + np.sqrt(1.4) * w * z - z**2 / 2),
            np.array([-0.1]),
        ),
    ],
)
def test_moments_of_a_direction_are_their_integrals(kind, estimate, a):
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    z = 0.8
    integrals = [(weights * estimate(nodes, z) ** k).sum() / weights.sum() for k in (1, 2, 3, 4)]
    moments = [log_moment(k, kind, z**2, z**2, a=a) for k in (1, 2, 3, 4)]
    np.testing.assert_allclose(np.exp(moments), integrals, rtol=1e-10)
    kurtosis = (weights * (estimate(nodes, z) - 1) ** 4).sum() / weights.sum() / (integrals[1] - 1) ** 2
    error = standard_error(kind, z**2, z**2, a=a, num_directions=8, draws=100)
    assert error == pytest.approx(math.sqrt((2 + (kurtosis - 3) / 8) / 100), rel=1e-8)


def test_the_standard_error_is_infinite_where_no_number_holds_it_and_zero_where_nothing_varies():
    assert standard_error("positive", 400.0, 0.0, num_directions=64, draws=1000) == math.inf
    assert standard_error("positive", 0.0, 4.0, num_directions=64, draws=1000) == 0.0


def coupled(**changes):
    arguments = {"kind": "positive", "projection": "simplex", "num_directions": 1, "head_dim": 4}
    return lambda: log_coupled_error(1.0, **{**arguments, **changes})


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (lambda: log_positive_error(-1.0), OptionError, "square must be finite and at least 0"),
        (lambda: log_positive_error(np.inf), OptionError, "square must be finite"),
        (lambda: log_positive_error(1.0, num_directions=0), OptionError, "whole number of at least 1, not 0"),
        (lambda: log_oprf_error([1.0], a=0.125), OptionError, r"a must be below 1/8, not 0\.125"),
        (coupled(head_dim=1), OptionError, "head_dim must be at least 2 for simplex directions"),
        (coupled(kind="positiv"), UnknownNameError, "'positive'"),
        (coupled(projection="simplexes"), UnknownNameError, "'simplex'"),
    ],
)
def test_wrong_arguments_are_refused(request_, error, message):
    with pytest.raises(error, match=message):
        request_()
