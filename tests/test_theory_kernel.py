"""Errors of independent directions: closed forms against measurement."""

import numpy as np
import pytest
from theory_draws import assert_mean, importance_draws, vector_pair

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.theory.kernel import (
    log_error_of_one_feature,
    log_generalized_error,
    log_hyperbolic_error,
    log_mean_squared_error,
    log_positive_error,
    log_trigonometric_error,
    log_utility,
)

DIRECTIONS = 8
REPLICATES = 20_000


def trigonometric(x, omega):
    both = np.concatenate([np.cos(omega @ x), np.sin(omega @ x)], axis=-1)
    return np.exp(x @ x / 2) * both / np.sqrt(omega.shape[-2])


def positive(x, omega):
    return np.exp(omega @ x - x @ x / 2) / np.sqrt(omega.shape[-2])


def hyperbolic(x, omega):
    return np.concatenate([positive(x, omega), positive(x, -omega)], axis=-1) / np.sqrt(2)


FORMULAS = {
    trigonometric: lambda sums, differences, m: log_trigonometric_error(differences, num_directions=m),
    positive: lambda sums, differences, m: log_positive_error(sums, num_directions=m),
    hyperbolic: lambda sums, differences, m: log_hyperbolic_error(sums, num_directions=m),
}


@pytest.mark.parametrize("features", FORMULAS)
@pytest.mark.parametrize("head_dim", [4, 8, 16, 64])
@pytest.mark.parametrize("squares", [(0.25, 1.0), (1.0, 3.0)], ids=["short", "long"])
def test_the_error_of_a_whole_feature_map_is_that_of_lemma_2(features, head_dim, squares):
    x, y = vector_pair(head_dim, *squares)
    omega = np.random.default_rng(head_dim).standard_normal((REPLICATES, DIRECTIONS, head_dim))
    estimates = (features(x, omega) * features(y, omega)).sum(axis=-1)
    expected = np.exp(log_mean_squared_error(FORMULAS[features](*squares, DIRECTIONS), x @ y))
    assert_mean((estimates - np.exp(x @ y)) ** 2, expected)


@pytest.mark.parametrize("sum_square", [1.0, 4.0, 8.0, 16.0, 32.0])
@pytest.mark.parametrize("even", [False, True], ids=["positive", "hyperbolic"])
def test_the_error_holds_where_plain_sampling_would_miss_it(sum_square, even):
    z = vector_pair(16, sum_square, 0.0)[0] * 2
    omega, weights = importance_draws(z, 200_000, seed=1)
    along = omega @ z
    ratios = (np.logaddexp(along, -along) - np.log(2) if even else along) - sum_square / 2
    formula = log_hyperbolic_error if even else log_positive_error
    assert_mean(weights * np.exp(ratios), 1.0)
    assert_mean(weights * np.expm1(ratios) ** 2, np.exp(formula(sum_square)))


@pytest.mark.parametrize("square", [0.5, 20.0])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("head_dim", [5, 16])
def test_generalized_features_contain_the_positive_and_the_trigonometric_map(square, sign, head_dim):
    special = {1: log_positive_error, -1: log_trigonometric_error}[sign]
    found = log_generalized_error(square, head_dim=head_dim, a=0, sign=sign)
    np.testing.assert_allclose(found, special(square), rtol=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("a", [-0.1, 0.03, -0.05 + 0.04j])
@pytest.mark.parametrize("head_dim", [5, 8])
def test_generalized_features_have_the_stated_error(sign, a, head_dim):
    x, y = vector_pair(head_dim, 0.5, 0.7)
    omega = np.random.default_rng(3).standard_normal((200_000, head_dim))
    b, c = np.sqrt(complex(sign * (1 - 4 * a))), -(sign + 1) / 2
    exponents = 2 * a * (omega**2).sum(axis=1) + b * (omega @ (x + sign * y)) + c * (x @ x + y @ y)
    estimates = ((1 - 4 * a) ** (head_dim / 2) * np.exp(exponents)).real
    kernel = np.exp(-((x - y) @ (x - y)) / 2)
    log_error = log_generalized_error((x + sign * y) @ (x + sign * y), head_dim=head_dim, a=a, sign=sign)
    assert_mean((estimates - kernel) ** 2, kernel**2 * np.exp(log_error))


def test_hyperbolic_features_are_never_worse_than_positive_ones_at_equal_numbers_of_features():
    square = np.concatenate([[0.0], np.geomspace(1e-8, 1e4, 200)])
    hyperbolic_error = log_error_of_one_feature("hyperbolic", log_hyperbolic_error(square))
    assert np.all(hyperbolic_error <= log_error_of_one_feature("positive", log_positive_error(square)))


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


def test_errors_stay_finite_at_any_length_and_vanish_where_the_estimate_is_exact():
    for formula in (log_trigonometric_error, log_positive_error, log_hyperbolic_error):
        assert formula(0.0) == -np.inf
        assert np.isfinite(formula(np.array([1e-300, 1e6]))).all()


def test_wrong_arguments_are_named():
    with pytest.raises(OptionError, match="sum_square must be finite and at least 0"):
        log_positive_error(-1.0)
    with pytest.raises(OptionError, match="sum_square must be finite"):
        log_positive_error(np.inf)
    with pytest.raises(OptionError, match="num_directions must be a whole number of at least 1, not 0"):
        log_positive_error(1.0, num_directions=0)
    with pytest.raises(OptionError, match="real part below 1/8"):
        log_generalized_error(1.0, head_dim=4, a=0.2)
    with pytest.raises(OptionError, match="sign must be 1 or -1, not 2"):
        log_generalized_error(1.0, head_dim=4, a=0.0, sign=2)
    with pytest.raises(UnknownNameError, match="'positive'"):
        log_error_of_one_feature("positiv", 0.0)
