"""Curves from records, and the power with which a cost grows with the tokens."""

import numpy as np
import pytest
from made_records import case, timed

from efficient_attn.measure.record import Record
from efficient_attn.report.text import show_growth
from efficient_attn.stats.estimates import curves


def growth(costs, noise=0.0):
    """The growth of times in four rounds, whose logarithms scatter by the noise."""
    scatter = np.exp(noise * np.array([-1.0, 1.0, -1.0, 1.0]))
    records = [timed("exact", tokens, (cost * scatter).tolist()) for tokens, cost in costs.items()]
    (curve,) = curves(records, "time_s")
    return curve.growth


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_the_power_is_that_of_the_three_longest_lengths_and_within_its_interval(power):
    fit = growth({256: 7.0, 1024: 2.0, 2048: 9.0, 4096: 2.0 * 4**power})
    assert fit.median == pytest.approx(power)
    # Both times have a shift of 3 % from run to run, 6 % with 95 %.
    assert fit.high - fit.median == pytest.approx(np.hypot(0.0588, 0.0588) / np.log(4), abs=1e-4)
    assert fit.low + fit.high == pytest.approx(2 * fit.median)


@pytest.mark.parametrize(
    ("costs", "noise", "shown"),
    [
        ({256: 1.0}, 0.0, ""),
        ({256: 1.0, 512: 2.0}, 0.0, "n^1.00 (0.88 to 1.12)"),
        ({256: 1.0, 512: 2.0}, 0.2, "unclear"),
    ],
)
def test_growth_needs_two_lengths_and_a_narrow_interval(costs, noise, shown):
    assert show_growth(growth(costs, noise)) == shown


def test_bytes_grow_without_an_interval_and_constant_or_missing_ones_show_it():
    def shown(*peaks):
        records = [
            Record(case=case("memory", "exact", 256 << number), peak_bytes=peak)
            for number, peak in enumerate(peaks)
        ]
        return show_growth(curves(records, "peak_bytes")[0].growth)

    assert [shown(4, 8, 32), shown(8, 8), shown(0, 8)] == ["n^1.50", "n^0.00", ""]


def test_the_growth_of_a_curve_is_of_medians_and_not_of_the_fastest_calls():
    """The fastest calls grow as n², the medians as n."""
    records = [timed("exact", n, [1e-9 * n**2, *[1e-3 * n] * 6]) for n in (256, 512)]
    (curve,) = curves(records, "time_s")
    assert curve.growth.median == pytest.approx(1, abs=0.01)


def test_of_equal_cases_the_last_record_counts():
    (curve,) = curves([timed("exact", 100, [1.0]), timed("exact", 100, [2.0])], "time_s")
    assert [point.value for point in curve.points] == [2.0]
