"""Student's t against SciPy, and the width of an interval for correlated rounds."""

import math

import numpy as np
import pytest
import scipy.stats

from efficient_attn.stats import estimates


@pytest.mark.parametrize("freedom", [1, 2.5, 6, 40, 999.0, math.inf])
def test_tails_and_quantiles_are_those_of_student(freedom):
    for value in (-3.0, 0.0, 0.5, 3.0, 8.0):
        tail = scipy.stats.t.sf(value, freedom)
        assert estimates.upper_tail(value, freedom) == pytest.approx(tail, rel=1e-8)
    assert estimates.quantile(0.001, freedom) == pytest.approx(scipy.stats.t.isf(0.001, freedom), rel=1e-6)


@pytest.mark.parametrize("count", [2, 4, 9, 60])
@pytest.mark.parametrize("value", [0.0, 0.05, 0.7, 0.98])
def test_correlated_samples_have_the_variances_of_their_correlation_matrix(count, value):
    samples = np.random.default_rng(0).standard_normal(count)
    matrix = value ** np.abs(np.subtract.outer(np.arange(count), np.arange(count)))
    centred = (np.eye(count) - 1 / count) @ matrix
    # The sample variance has the mean tr(HC) / (n − 1).
    factor = np.sqrt(matrix.mean() * count * (count - 1) / np.trace(centred))
    independent = scipy.stats.t.ppf(0.975, count - 1) * scipy.stats.sem(samples)
    assert estimates.half_width(samples, value) == pytest.approx(factor * independent, rel=1e-6)
