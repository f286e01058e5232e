"""Curves from records, and the power with which a cost grows with the tokens."""

import numpy as np
import pytest
from made_records import timed
from scipy import stats

from efficient_attn.stats.curves import curves, exact_growth, growth

LENGTHS = np.array([256, 512, 1024, 2048, 4096])


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("fixed", [0.0, 1e-1])
def test_the_power_of_the_growing_part_is_recovered_beside_a_fixed_part(power, fixed):
    costs = fixed + 1e-6 * LENGTHS**power
    fit = growth(LENGTHS, costs)
    assert fit.power == pytest.approx(power, abs=0.01)
    assert fit.fixed == pytest.approx(fixed, rel=0.05, abs=1e-5)
    assert fit.fixed + fit.factor * LENGTHS**fit.power == pytest.approx(costs, rel=0.01)


def test_no_part_of_a_fit_is_negative():
    for costs in (1e-12 * LENGTHS**5.0, 1 / LENGTHS):
        fit = growth(LENGTHS, costs)
        assert fit.fixed >= 0 and fit.factor >= 0 and fit.fixed + fit.factor > 0


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("fixed", [0.0, 1e-2])
def test_powers_are_recovered_and_their_intervals_hold_them_as_often_as_they_say(power, fixed):
    generator, runs = np.random.default_rng(0), 600
    costs = (fixed + 1e-6 * LENGTHS**power) * np.exp(generator.normal(0, 0.01, size=(runs, len(LENGTHS))))
    fits = [growth(LENGTHS, cost) for cost in costs]
    # At 95 % coverage fewer than this happens once in ten thousand.
    assert sum(fit.low <= power <= fit.high for fit in fits) >= stats.binom.ppf(1e-4, runs, 0.95)
    assert fixed or abs(np.mean([fit.power for fit in fits]) - power) < 0.03


@pytest.mark.parametrize(
    ("lengths", "costs", "power", "clear"),
    [
        ([256, 512], [1.0, 2.0], None, None),
        ([256, 512, 512], [1.0, 2.0, 2.0], None, None),
        # Three lengths always fit.
        ([256, 512, 1024], [1.0, 2.0, 4.0], 1, False),
        (LENGTHS, [3.0] * 5, 0, True),
        (LENGTHS, 1e-6 * LENGTHS**1.5, 1.5, True),
        # Noise that hides the power, and a step at the end, which all powers from 3 on explain.
        (LENGTHS, [5, 1, 7, 2, 6], ..., False),
        (LENGTHS, [1, 1, 1, 1, 50], ..., False),
    ],
)
def test_a_power_needs_three_lengths_and_is_clear_from_four_if_its_interval_is_narrow(
    lengths, costs, power, clear
):
    fit = growth(lengths, costs)
    assert (fit is None) == (power is None)
    if fit is not None:
        assert fit.clear == clear and (power is ... or fit.power == pytest.approx(power, abs=0.01))


def test_the_widest_clear_interval_tells_linear_from_quadratic():
    fit = growth(LENGTHS, 1e-6 * LENGTHS**1.5)
    assert fit._replace(low=1.1, high=2.0).clear and not fit._replace(low=1.0, high=2.1).clear


def test_exact_costs_are_fitted_from_where_a_curve_meets_them():
    # A workspace that stops growing at 512 tokens, beside an output that grows for ever.
    costs = [2048 * n + 40_000 * min(n, 512) for n in LENGTHS]
    assert exact_growth(LENGTHS, costs).power == pytest.approx(1, abs=0.01)
    assert growth(LENGTHS, costs).power < 0.8


def test_the_fit_of_a_curve_is_of_medians_and_not_of_the_fastest_calls():
    """The fastest calls grow as n², the medians as n."""
    records = [timed("exact", n, [1e-9 * n**2, *[1e-3 * n] * 6]) for n in LENGTHS.tolist()]
    (curve,) = curves(records, "time_s")
    assert curve.growth.power == pytest.approx(1, abs=0.01)


def test_of_equal_cases_the_last_record_counts():
    (curve,) = curves([timed("exact", 100, [1.0]), timed("exact", 100, [2.0])], "time_s")
    assert [point.value for point in curve.points] == [2.0]
