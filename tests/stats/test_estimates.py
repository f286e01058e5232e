"""Student's t, and coverage of intervals of medians, times and ratios."""

import math
import time

import numpy as np
import pytest
from scipy import stats
from simulate_intervals import MODELS, of_model, time_coverage
from synthetic_records import timed

from efficient_attn.measure.record import replace
from efficient_attn.stats import estimates
from efficient_attn.stats.estimates import call_time, curves, middle, time_ratio

SHIFT = stats.norm.ppf(0.975) * 0.03


def fewest(share, runs):
    """Fewer intervals than this hold the truth once in ten thousand if they cover this share."""
    return int(stats.binom.ppf(1e-4, runs, share))


@pytest.mark.parametrize("count", [6, 7, 20, 1_000_000])
def test_the_interval_of_a_median_is_the_closest_with_at_least_95_percent(count):
    samples, start = np.arange(float(count)), time.process_time()
    _, low, high, _ = middle(samples)
    assert time.process_time() - start < 1
    outside = int(low)
    assert high == count - 1 - outside
    assert 2 * stats.binom.cdf(outside, count, 0.5) <= 0.05 < 2 * stats.binom.cdf(outside + 1, count, 0.5)
    # Few samples have their range.
    assert middle([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0, 3)


def test_a_time_is_the_median_over_rounds_with_the_interval_of_rounds_and_not_of_calls():
    # A thousand calls of a round are one sample.
    once = timed("exact", 100, [1.0, 1.1, 1.2, 1.3])
    often = replace(once, times_s=tuple(np.repeat(once.times_s, 250).tolist()), round_sizes=(250,) * 4)
    assert call_time(often)[:3] == pytest.approx(call_time(once)[:3])
    median, low, high, samples = call_time(often)
    assert median == pytest.approx(1.15) and samples == 1000 and low * high == pytest.approx(median**2)
    # Student's interval for independent rounds, widened as far as a correlation of 0.7 takes.
    student = stats.t.ppf(0.975, 3) * np.log(once.times_s).std(ddof=1) / 2
    correlations = 0.7 ** np.abs(np.subtract.outer(np.arange(4), np.arange(4)))
    of_mean, of_samples = correlations.mean(), (4 - 4 * correlations.mean()) / 3
    assert np.log(high / median) == pytest.approx(student * np.sqrt(4 * of_mean / of_samples))


@pytest.mark.parametrize("sizes", [None, (6,), (2, 2, 2), (3, 3, 3), (1,) * 5, (1, 1, 3, -1, 2), (True,) * 6])
def test_a_time_without_four_valid_rounds_has_no_interval(sizes):
    record = replace(timed("exact", 100, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), round_sizes=sizes)
    assert call_time(record) == (3.5, None, None, 6)
    (curve,) = curves([record], "time_s")
    assert curve.points[0].low is curve.points[0].high is None


def test_the_ratio_of_two_times_is_taken_round_by_round():
    times_s = [1.0, 5.0, 2.0, 3.0, 1.5]
    fast, slow = timed("window", 100, times_s), timed("exact", 100, [2 * time_s for time_s in times_s])
    assert time_ratio(fast, slow) == pytest.approx((2, 2, 2, 5))
    # Times of two runs have a shift each.
    shift = np.exp(np.sqrt(2) * SHIFT)
    assert time_ratio(fast, slow, between_runs=True)[:3] == pytest.approx((2, 2 / shift, 2 * shift))
    # An interrupted run lacks the last rounds.
    short = replace(fast, times_s=fast.times_s[:4], round_sizes=(1,) * 4)
    assert time_ratio(short, slow) == pytest.approx((2, 2, 2, 4))
    # A failed round is left out by its number.
    gap = replace(timed("exact", 100, [2.0, 4.0, 6.0, 3.0]), round_numbers=(0, 2, 3, 4))
    assert time_ratio(fast, gap) == pytest.approx((2, 2, 2, 4))
    assert time_ratio(timed("window", 100, times_s[:3]), slow)[1:3] == (None, None)


def test_intervals_between_two_runs_hold_the_shift_of_a_run():
    """Every case is shifted by 3 % in a run. No number of rounds shows it."""
    coverage = time_coverage(of_model(case_and_run=0.03), rounds=32, runs=150)
    assert coverage["between runs"].held >= fewest(0.95, 150) > coverage["median"].held


def test_of_equal_cases_the_last_record_counts():
    (curve,) = curves([timed("exact", 100, [1.0]), timed("exact", 100, [2.0])], "time_s")
    assert [point.value for point in curve.points] == [2.0]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [4, 10])
@pytest.mark.parametrize("noise", MODELS)
def test_intervals_of_times_hold_under_every_noise(noise, rounds):
    """At least 90 % of nominal 95 %, as far as they are printed."""
    coverage = time_coverage(MODELS[noise], rounds=rounds, runs=500)
    for name in coverage:
        assert coverage[name].held >= fewest(0.9, coverage[name].printed), (name, str(coverage[name]))
        # Fifty give a coverage of 95 % a standard error of 3 %; where noise is large, most stay unclear.
        assert coverage[name].printed > 50


@pytest.mark.parametrize("freedom", [1, 2.5, 6, 40, 999.0, math.inf])
def test_tails_and_quantiles_are_those_of_student(freedom):
    for value in (-3.0, 0.0, 0.5, 3.0, 8.0):
        tail = stats.t.sf(value, freedom)
        assert estimates.upper_tail(value, freedom) == pytest.approx(tail, rel=1e-8)
    assert estimates.quantile(0.001, freedom) == pytest.approx(stats.t.isf(0.001, freedom), rel=1e-6)


@pytest.mark.parametrize("count", [2, 4, 9, 60])
@pytest.mark.parametrize("value", [0.0, 0.05, 0.7, 0.98])
def test_correlated_samples_have_the_variances_of_their_correlation_matrix(count, value):
    samples = np.random.default_rng(0).standard_normal(count)
    matrix = value ** np.abs(np.subtract.outer(np.arange(count), np.arange(count)))
    centred = (np.eye(count) - 1 / count) @ matrix
    # The sample variance has the mean tr(HC) / (n − 1).
    factor = np.sqrt(matrix.mean() * count * (count - 1) / np.trace(centred))
    independent = stats.t.ppf(0.975, count - 1) * stats.sem(samples)
    assert estimates.half_width(samples, value) == pytest.approx(factor * independent, rel=1e-6)
