"""Growth, medians, gains: numbers from records."""

import time
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from efficient_attn.runner.records import Case, Record
from efficient_attn.stats.curves import curves
from efficient_attn.stats.estimates import call_time, middle, time_ratio
from efficient_attn.stats.growth import exact_growth, growth
from efficient_attn.studies.bench.crossover import gains
from efficient_attn.studies.bench.tables import tables

LENGTHS = np.array([256, 512, 1024, 2048, 4096])


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("fixed", [0.0, 1e-3, 1e-1])
def test_the_power_of_the_part_that_grows_is_recovered_beside_a_fixed_part(power, fixed):
    fit = growth(LENGTHS, fixed + 1e-6 * LENGTHS**power)
    assert fit.power == pytest.approx(power, abs=0.01)
    assert fit.fixed == pytest.approx(fixed, rel=0.05, abs=1e-5)
    assert fit.fixed + fit.factor * LENGTHS**fit.power == pytest.approx(
        fixed + 1e-6 * LENGTHS**power, rel=0.01
    )


def test_no_part_of_a_fit_is_negative():
    # Steeper than every power that is tried, and falling.
    for costs in (1e-12 * LENGTHS**5.0, 1 / LENGTHS):
        fit = growth(LENGTHS, costs)
        assert fit.fixed >= 0 and fit.factor >= 0 and fit.fixed + fit.factor > 0


def test_a_power_is_clear_if_its_interval_tells_linear_from_quadratic():
    fit = growth(LENGTHS, 1e-6 * LENGTHS**1.5)
    assert fit._replace(low=1.1, high=2.0).clear and not fit._replace(low=1.0, high=2.1).clear


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_powers_are_found_within_3_hundredths_and_their_intervals_hold_them_as_often_as_they_say(power):
    """A thousand runs with noise of 1 %, nothing fixed; intervals of 95 % hold fewer once in 400 times."""
    generator, runs = np.random.default_rng(0), 1000
    noisy = 1e-6 * LENGTHS**power * np.exp(generator.normal(0, 0.01, size=(runs, len(LENGTHS))))
    fits = [growth(LENGTHS, costs) for costs in noisy]
    assert abs(np.mean([fit.power for fit in fits]) - power) < 0.03
    assert sum(fit.low <= power <= fit.high for fit in fits) >= 930


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_intervals_of_powers_hold_the_true_one_as_often_as_they_say(power):
    generator = np.random.default_rng(0)
    true = 1e-2 + 1e-6 * LENGTHS**power
    runs = 300
    fits = [growth(LENGTHS, true * np.exp(generator.normal(0, 0.01, size=5))) for _ in range(runs)]
    covered = sum(fit.low <= power <= fit.high for fit in fits)
    # At 95 % coverage fewer than this happens once in ten thousand.
    assert covered >= stats.binom.ppf(1e-4, runs, 0.95)


def test_too_few_lengths_give_no_power_and_three_give_no_interval():
    assert growth([256, 512], [1.0, 2.0]) is None
    assert growth([256, 512, 512], [1.0, 2.0, 2.0]) is None
    three = growth([256, 512, 1024], [1.0, 2.0, 4.0])
    assert three.power == pytest.approx(1, abs=0.01) and three.low is None and not three.clear


def test_a_cost_that_does_not_change_does_not_grow():
    flat = growth(LENGTHS, np.full(5, 3.0))
    assert flat.power == 0 and flat.clear


def test_noise_that_hides_the_power_is_called_unclear():
    assert not growth(LENGTHS, [5, 1, 7, 2, 6]).clear


def test_exact_costs_are_fitted_from_where_one_curve_meets_them():
    # A workspace that stops growing at 512 tokens, beside an output that grows for ever.
    costs = [2048 * n + 40_000 * min(n, 512) for n in LENGTHS]
    assert exact_growth(LENGTHS, costs).power == pytest.approx(1, abs=0.01)
    assert growth(LENGTHS, costs).power < 0.8


@pytest.mark.parametrize("count", [6, 7, 9, 20, 300, 64_000, 1_000_000])
def test_the_interval_of_a_median_is_the_closest_with_at_least_95_percent(count):
    _, low, high, _ = middle(range(count))
    outside = int(low)
    assert high == count - 1 - outside
    assert 2 * stats.binom.cdf(outside, count, 0.5) <= 0.05 < 2 * stats.binom.cdf(outside + 1, count, 0.5)


def test_the_interval_of_a_median_takes_time_that_hardly_grows_with_the_samples():
    samples = np.arange(1_000_000.0)
    start = time.process_time()
    middle(samples)
    # Sorted already; 5 s for 64 000 samples when the binomial law was summed in whole numbers.
    assert time.process_time() - start < 1


def test_few_samples_have_an_interval_from_the_smallest_to_the_largest():
    assert middle([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0, 3)


def record(label, tokens, times_s, **changes):
    case = Case(
        kind="time",
        backend=label,
        label=label,
        num_heads=1,
        head_dim=8,
        tokens=tokens,
        dtype="float32",
        device="cpu",
        threads=1,
        **changes,
    )
    return Record(case=case, times_s=tuple(times_s), round_sizes=(1,) * len(times_s))


def test_a_time_is_the_median_over_rounds_with_the_interval_of_rounds_and_not_of_calls():
    # A thousand calls of a round are one sample.
    once = record("exact", 100, [1.0, 1.1, 1.2, 1.3])
    often = replace(once, times_s=tuple(np.repeat(once.times_s, 250).tolist()), round_sizes=(250,) * 4)
    assert call_time(often)[:3] == pytest.approx(call_time(once)[:3])
    median, low, high, samples = call_time(often)
    assert median == pytest.approx(1.15) and samples == 1000 and low * high == pytest.approx(median**2)
    # Student's interval for independent rounds, widened as far as a correlation of 0.7 takes.
    logs = np.log(once.times_s)
    student = stats.t.ppf(0.975, 3) * logs.std(ddof=1) / 2
    correlations = 0.7 ** np.abs(np.subtract.outer(np.arange(4), np.arange(4)))
    of_mean, of_samples = correlations.mean(), (4 - 4 * correlations.mean()) / 3
    rounds = student * np.sqrt(4 * of_mean / of_samples)
    # No round shows the shift of 3 % from run to run.
    assert np.log(high / median) == pytest.approx(np.hypot(rounds, stats.norm.ppf(0.975) * 0.03))


@pytest.mark.parametrize("sizes", [None, (6,), (2, 2, 2), (3, 3, 3), (1,) * 5, (1, 1, 3, -1, 2), (True,) * 6])
def test_a_time_without_four_known_rounds_has_no_interval(sizes):
    one = replace(record("exact", 100, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), round_sizes=sizes)
    assert call_time(one) == (3.5, None, None, 6)
    (curve,) = curves([one], "time_s")
    assert curve.points[0].low is curve.points[0].high is None


def test_the_ratio_of_two_times_is_taken_round_by_round():
    rounds = [1.0, 5.0, 2.0, 3.0, 1.5]
    own, its = record("window", 100, rounds), record("exact", 100, [2 * time_s for time_s in rounds])
    # Both times have the shift of a run.
    shift = np.exp(np.sqrt(2) * stats.norm.ppf(0.975) * 0.03)
    assert time_ratio(own, its)[:3] == pytest.approx((2, 2 / shift, 2 * shift))
    # A run that was cut short lacks the last rounds.
    short = replace(own, times_s=own.times_s[:4], round_sizes=(1,) * 4)
    assert time_ratio(short, its)[:3] == pytest.approx((2, 2 / shift, 2 * shift))
    assert time_ratio(record("window", 100, rounds[:3]), its)[1:3] == (None, None)


def test_a_gain_is_the_ratio_at_the_longest_common_length():
    records = [record("exact", n, [n / 1000] * 6) for n in (100, 200, 400)]
    records += [record("fast", n, [0.15] * 6) for n in (100, 200)]
    records += [record("unclear", n, [0.01, *[0.39] * 4, 0.5]) for n in (100, 200, 400, 800)]
    fast, unclear = gains(curves(records, "time_s"))
    assert (fast.label, fast.tokens, unclear.tokens) == ("fast", 200, 400)
    assert fast.ratio.median == pytest.approx(0.2 / 0.15) and unclear.ratio.side_of_one == 0


def test_the_fit_is_of_the_medians_that_are_shown_and_not_of_the_fastest_calls():
    """The fastest calls grow as n², the medians as n."""
    made = [record("exact", n, [1e-9 * n**2, *[1e-3 * n] * 6]) for n in LENGTHS.tolist()]
    (curve,) = curves(made, "time_s")
    assert curve.growth.power == pytest.approx(1, abs=0.01)
    assert tables(made, {})[0].rows[0][-1] == "n^1.00"


def test_three_lengths_or_an_interval_that_is_cut_off_give_no_power():
    """Minima of 5.0, 7.5 and 20.0 ms and medians of 32.7, 26.1 and 28.0 ms are no n^2.3."""
    times = ((5.0, 32.7), (7.5, 26.1), (20.0, 28.0))
    lengths = LENGTHS.tolist()
    three = [
        record("exact", n, [low, *[middle] * 6]) for n, (low, middle) in zip(lengths, times, strict=False)
    ]
    # One step at the last length: all powers from 3 on explain it.
    step = [record("exact", n, [y] * 7) for n, y in zip(lengths, (1, 1, 1, 1, 50), strict=True)]
    for made in (three, step):
        assert tables(made, {})[0].rows[0][-1] == "unclear"


def test_runs_that_differ_become_curves_with_what_differs_in_their_names():
    both = [record("exact", 100, [1.0]), record("exact", 100, [2.0], causal=True)]
    assert [curve.label for curve in curves(both, "time_s")] == ["exact", "exact, causal"]


def test_exact_comes_first_and_numbers_in_names_count_as_numbers():
    labels = ["linformer(rank=128)", "exact-dense", "exact", "linformer(rank=64)"]
    found = curves([record(label, 100, [1.0]) for label in labels], "time_s")
    assert [c.label for c in found] == ["exact", "exact-dense", "linformer(rank=64)", "linformer(rank=128)"]


def test_of_equal_cases_the_last_record_counts():
    (curve,) = curves([record("exact", 100, [1.0]), record("exact", 100, [2.0])], "time_s")
    assert [point.value for point in curve.points] == [2.0]
