"""Errors of orthogonal, simplex and fixed-length directions against measurement and integration."""

from functools import lru_cache

import numpy as np
import pytest
from scipy.special import hyp0f1, hyp1f1, roots_jacobi, roots_legendre
from theory_draws import assert_mean, block_projections, simplex_directions, vector_pair

from efficient_attn.errors import OptionError
from efficient_attn.theory import couplings, regularised
from efficient_attn.theory.confluent import decaying_confluent, log_bessel, log_confluent, pair_excess
from efficient_attn.theory.dense_exponential import log_oprf_error, optimal_parameter
from efficient_attn.theory.kernel import log_positive_error

HEAD_DIMS = [4, 8, 16, 64]
# One draw of directions for each replicate; few directions need more of them for the same standard error.
NUMBERS = 2_000_000


def positive(along, square):
    return np.exp(np.sqrt(square) * along - square / 2)


def hyperbolic(along, square):
    return np.cosh(np.sqrt(square) * along) * np.exp(-square / 2)


def trigonometric(along, square):
    return np.cos(np.sqrt(square) * along) * np.exp(square / 2)


def squared_errors(features, along, square):
    return (features(along, square).mean(axis=1) - 1) ** 2


def measured(features, directions, square, num_directions, seed=0):
    along = block_projections(directions, num_directions, NUMBERS // num_directions, seed)
    return squared_errors(features, along, square)


@lru_cache(maxsize=1)
def block(coupling, head_dim):
    """Projections of a whole block, which serve every norm and every kind of features in turn."""
    directions = np.eye(head_dim) if coupling == "orthogonal" else simplex_directions(head_dim)
    return block_projections(directions, head_dim, NUMBERS // head_dim, seed=0)


@pytest.mark.parametrize("features", [positive, hyperbolic, trigonometric])
@pytest.mark.parametrize("norm", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex"])
@pytest.mark.parametrize("head_dim", [3, *HEAD_DIMS])
def test_one_block_has_the_exact_error(features, norm, coupling, head_dim):
    formula = getattr(couplings, f"log_{coupling}_{features.__name__}_error")
    expected = np.exp(formula(norm**2, num_directions=head_dim, head_dim=head_dim))
    assert_mean(squared_errors(features, block(coupling, head_dim), norm**2), expected)


@pytest.mark.parametrize("features", [positive, trigonometric])
@pytest.mark.parametrize("blocks", [0.5, 1.5, 3.0])
def test_partial_and_several_blocks_have_the_exact_error(features, blocks):
    head_dim, square = 16, 0.8
    num_directions = int(blocks * head_dim)
    formula = getattr(couplings, f"log_orthogonal_{features.__name__}_error")
    expected = np.exp(formula(square, num_directions=num_directions, head_dim=head_dim))
    assert_mean(measured(features, np.eye(head_dim), square, num_directions), expected)


def test_trigonometric_errors_hold_for_distant_pairs_where_nothing_overflows():
    for square in (4.0, 16.0, 64.0):
        expected = couplings.log_orthogonal_trigonometric_error(square, num_directions=8, head_dim=8)
        assert_mean(measured(trigonometric, np.eye(8), square, 8), np.exp(expected))


def test_vectors_and_drawn_orthogonal_matrices_have_the_error_that_the_norm_alone_predicts():
    x, y = vector_pair(4, 0.8, 1.5)
    generator = np.random.default_rng(5)
    q, r = np.linalg.qr(generator.standard_normal((100_000, 4, 4)))
    omega = q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None, :]
    omega = omega.swapaxes(1, 2) * np.sqrt(generator.chisquare(4, (100_000, 4, 1)))
    estimates = np.exp(omega @ x - x @ x / 2 + omega @ y - y @ y / 2).mean(axis=1)
    log_error = couplings.log_orthogonal_positive_error(0.8, num_directions=4, head_dim=4)
    assert_mean((estimates * np.exp(-x @ y) - 1) ** 2, np.exp(log_error))


@pytest.mark.parametrize("coupling", ["orthogonal", "simplex"])
def test_oprf_adds_the_same_for_every_pair_whatever_its_parameter(coupling):
    head_dim, square, num_directions, num_draws = 8, 1.0, 8, 100_000
    a = float(optimal_parameter(square / head_dim))
    directions = np.eye(head_dim) if coupling == "orthogonal" else simplex_directions(head_dim)
    generator = np.random.default_rng(2)
    unit = generator.standard_normal((num_draws, head_dim))
    cosines = unit / np.linalg.norm(unit, axis=1, keepdims=True) @ directions.T
    lengths = generator.chisquare(head_dim, (num_draws, num_directions))
    along = np.sqrt(lengths * square) * cosines
    exponents = 2 * a * lengths + np.sqrt(1 - 4 * a) * along - square / 2
    estimates = (1 - 4 * a) ** (head_dim / 2) * np.exp(exponents)
    excess = getattr(couplings, f"{coupling}_pair_excess")(square, head_dim=head_dim)
    one = log_oprf_error(square, head_dim=head_dim, a=a)
    expected = couplings.log_coupled_error(one, excess, num_directions=num_directions, head_dim=head_dim)
    assert_mean((estimates.mean(axis=1) - 1) ** 2, np.exp(expected))


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


@pytest.mark.parametrize("head_dim", [4, 5, 16, 64])
@pytest.mark.parametrize("square", [1.0, 8.0, 32.0])
def test_pairs_have_the_moment_of_its_definition_up_to_long_vectors(head_dim, square):
    orthogonal = 1 + couplings.orthogonal_pair_excess(square, head_dim=head_dim)
    simplex = 1 + couplings.simplex_pair_excess(square, head_dim=head_dim)
    cosine = -1 / (head_dim - 1)
    # Gauss rules of this order leave nothing but rounding: that of exponents up to a hundred, and that of 1
    # + excess.
    rounding = {"rtol": 1e-11, "atol": 1e-14}
    np.testing.assert_allclose(orthogonal, integrated_pair_moment(square, head_dim, 0.0), **rounding)
    np.testing.assert_allclose(simplex, integrated_pair_moment(square, head_dim, cosine), **rounding)


@pytest.mark.parametrize("head_dim", [1, 2, 3, 8, 33, 64])
def test_series_agree_with_scipy(head_dim):
    w = np.array([0.0, 1e-3, 0.5, 2.0, 10.0, 40.0])
    half = head_dim / 2
    np.testing.assert_allclose(log_confluent(w, head_dim), np.log(hyp1f1(head_dim, half, w)), atol=1e-12)
    np.testing.assert_allclose(log_bessel(w, head_dim), np.log(hyp0f1(half, w)), atol=1e-12)
    np.testing.assert_allclose(
        decaying_confluent(w, head_dim), np.exp(-w) * hyp1f1(-half, half, w), atol=1e-13
    )


@pytest.mark.parametrize("head_dim", [3, 64])
def test_what_a_pair_adds_keeps_its_digits_near_zero_and_is_continuous(head_dim):
    w = np.array([1e-8, -1e-8])
    np.testing.assert_allclose(pair_excess(w, head_dim), -2 * w**2 / (head_dim + 2), rtol=1e-6)
    for edge in (1.0, -1.0):
        below, above = pair_excess(edge * np.array([1 - 1e-12, 1 + 1e-12]), head_dim)
        assert above == pytest.approx(below, rel=1e-10)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_exact_error_is_below_the_bound_of_theorem_2_which_is_below_independent_directions(head_dim):
    square = np.geomspace(1e-3, 100, 60)
    for num_directions in {2, head_dim // 2, head_dim}:
        arguments = {"num_directions": num_directions, "head_dim": head_dim}
        exact = couplings.log_orthogonal_positive_error(square, **arguments)
        bound = couplings.log_orthogonal_bound(square, **arguments)
        rounding = 1e-12
        assert np.all(exact <= bound + rounding)
        assert np.all(bound <= log_positive_error(square, num_directions=num_directions) + rounding)


@pytest.mark.parametrize(
    ("head_dim", "square", "orthogonal", "simplex"),
    [(16, 0.25, 0.259, 0.0218), (16, 8.0, 2970, 2968), (64, 1.0, 1.26, 0.293), (64, 4.0, 47.1, 43.8)],
)
def test_simplex_blocks_are_below_orthogonal_ones_by_the_known_amount(head_dim, square, orthogonal, simplex):
    arguments = {"num_directions": head_dim, "head_dim": head_dim}
    found = [
        couplings.log_orthogonal_positive_error(square, **arguments),
        couplings.log_simplex_positive_error(square, **arguments),
    ]
    # Three digits are known.
    np.testing.assert_allclose(head_dim * np.exp(found), [orthogonal, simplex], rtol=5e-3)


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("head_dim", [3, 16, 64])
def test_fixed_lengths_have_the_stated_bias_and_error(orthogonal, head_dim):
    square, num_draws = 2.0, 10_000
    # One rotation of a block of unit vectors, or a unit vector for each direction.
    shape = (num_draws, head_dim) if orthogonal else (num_draws, head_dim, head_dim)
    unit = np.random.default_rng(4).standard_normal(shape)
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    cosines = unit if orthogonal else unit[..., 0]
    estimates = np.exp(np.sqrt(head_dim * square) * cosines - square / 2).mean(axis=1)
    log_ratio = regularised.log_regularised_ratio(square, head_dim=head_dim)
    arguments = {"num_directions": head_dim, "head_dim": head_dim, "orthogonal": orthogonal}
    assert_mean(estimates, np.exp(log_ratio))
    assert_mean((estimates - 1) ** 2, np.exp(regularised.log_regularised_error(square, **arguments)))


def test_fixed_lengths_are_biased_low_by_the_known_amounts():
    norms = np.array([1.0, 2.0, 3.0])
    for head_dim, known in ((16, [0.987, 0.837, 0.479]), (64, [0.996, 0.945, 0.769])):
        found = np.exp(regularised.log_regularised_ratio(norms**2, head_dim=head_dim))
        np.testing.assert_allclose(found, known, atol=5e-4)


@pytest.mark.parametrize("features", ["positive", "hyperbolic", "trigonometric"])
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex"])
@pytest.mark.parametrize("head_dim", [2, 7, 64])
def test_every_coupled_error_is_a_number_from_zero_to_lengths_that_overflow(features, coupling, head_dim):
    formula = getattr(couplings, f"log_{coupling}_{features}_error")
    found = formula(np.array([0.0, 1e-12, 1.0, 600.0, 2000.0]), num_directions=2, head_dim=head_dim)
    assert found[0] == -np.inf
    assert np.isfinite(found[1:]).all()


def test_wrong_arguments_are_named():
    with pytest.raises(OptionError, match="num_directions must be at most head_dim=4 for the bound, not 5"):
        couplings.log_orthogonal_bound(1.0, num_directions=5, head_dim=4)
    with pytest.raises(OptionError, match="head_dim must be at least 2 for simplex directions"):
        couplings.log_simplex_positive_error(1.0, num_directions=1, head_dim=1)
