"""The statistics that say whether two runs differ: against SciPy, and against their own laws."""

import math

import numpy as np
import pytest
import scipy.stats
from stats.simulate_diff import autoregression, standard_error

from efficient_attn.stats import significance


@pytest.mark.parametrize("seed", range(5))
def test_the_statistics_are_those_of_scipy(seed):
    generator = np.random.default_rng(seed)
    old, new = (
        generator.integers(0, 20, 25).astype(float),
        generator.integers(2, 24, 31 + seed).astype(float),
    )
    student = scipy.stats.ttest_ind(new, old)
    assert significance.student_statistic(old, new)[::2] == pytest.approx((student.statistic, student.df))
    parts = np.split(old, [4, 4, 7, 11])
    middles = [scipy.stats.trim_mean(part, 0.25) for part in parts if len(part)]
    assert significance.interquartile_means(old, [len(part) for part in parts]) == pytest.approx(middles)
    welch = scipy.stats.ttest_ind(new, old, equal_var=False)
    statistic = significance.two_sample_statistic(old, new)
    assert statistic[::2] == pytest.approx((welch.statistic, welch.df))


@pytest.mark.parametrize("freedom", [1, 2.5, 6, 40, 999.0, math.inf])
def test_tails_and_quantiles_are_those_of_student(freedom):
    for value in (-3.0, 0.0, 0.5, 3.0, 8.0):
        tail = scipy.stats.t.sf(value, freedom)
        assert significance.upper_tail(value, freedom) == pytest.approx(tail, rel=1e-8)
    assert significance.quantile(0.001, freedom) == pytest.approx(scipy.stats.t.isf(0.001, freedom), rel=1e-6)


def test_student_with_a_known_ratio_of_variances_has_all_degrees_of_freedom():
    generator = np.random.default_rng(0)
    draws = [(generator.standard_normal(4), 3 * generator.standard_normal(4)) for _ in range(4000)]
    values = [significance.student_statistic(old, new, 9.0)[0] for old, new in draws]
    assert scipy.stats.kstest(values, scipy.stats.t(6).cdf).pvalue > 1e-3


def test_a_run_that_is_noisier_in_all_cases_is_told_from_chance():
    generator = np.random.default_rng(0)
    equal = [(generator.standard_normal(4), generator.standard_normal(4)) for _ in range(400)]
    assert significance.noise_ratio(equal[:1]) == 1.0
    taken_for_unequal = sum(significance.noise_ratio(equal[at : at + 20]) != 1 for at in range(0, 400, 20))
    assert taken_for_unequal <= 1 + 3 * math.sqrt(20 * 0.05 * 0.95)
    # The logarithm of a variance of 3 degrees of freedom scatters by √ψ'(3/2) = 0.97.
    ratio = significance.noise_ratio([(old, 3 * new) for old, new in equal])
    assert abs(math.log(ratio / 9)) < 3 * 0.97 * math.sqrt(2 / 400)


def test_holm_adjusts_as_written_down_in_1979():
    # 3 · 0.01, 2 · 0.02 and 1 · 0.03, which may not be less than what came before it.
    assert significance.holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])


@pytest.mark.parametrize("count", [2, 4, 9, 60])
@pytest.mark.parametrize("value", [0.05, 0.7, 0.98])
def test_correlated_rounds_have_the_variances_of_their_correlation_matrix(count, value):
    matrix = value ** np.abs(np.subtract.outer(np.arange(count), np.arange(count)))
    centred = (np.eye(count) - 1 / count) @ matrix
    # The sample variance has mean tr(HC) / (n − 1) and variance 2 tr(HCHC) / (n − 1)².
    freedom = np.trace(centred) ** 2 / np.trace(centred @ centred)
    factor = np.sqrt(matrix.mean() * count * (count - 1) / np.trace(centred))
    assert significance.correlated(count, 0.0) == (1.0, 1.0)
    assert significance.correlated(count, value) == pytest.approx((factor, freedom / (count - 1)), rel=1e-9)


def test_a_correlation_of_rounds_is_seen_in_many_cases_and_not_in_a_few():
    generator, count = np.random.default_rng(6), 4000
    series = list(autoregression(generator, (count, 8), 0.7))
    # Shares scatter by 0.3, the estimate by 1.6 times as much, and it is two standard errors higher.
    standard = 0.5 / math.sqrt(count)
    assert abs(significance.correlation(series) - 0.7 - 2 * standard) <= 4 * standard
    assert significance.correlation(series[:2]) == 0.0
    independent = [[generator.standard_normal(4) for _ in range(60)] for _ in range(400)]
    seen = sum(significance.correlation(rounds) > 0 for rounds in independent)
    assert seen / 400 <= 0.2 + 3 * standard_error(0.2, 400)
