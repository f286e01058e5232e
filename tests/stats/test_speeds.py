"""Speeds within a run: coverage and verdicts over looks, bounded rounds, correlation, finality."""

from itertools import product

import numpy as np
import pytest
from scipy import stats
from simulate_speeds import BACKENDS, FALSE, LENGTHS, MODELS, NOISES, noise, record_pair, shares
from synthetic_records import timed

from efficient_attn.measure.record import replace
from efficient_attn.stats.estimates import CORRELATION, Typical, curves, half_width, round_ratios
from efficient_attn.stats.predicted_time import crossover
from efficient_attn.stats.speeds import LOOKS, decided, open_cases, speed_ups

PAIRS = LENGTHS * BACKENDS


@pytest.mark.parametrize("runs", [2, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_intervals_hold_the_truth_and_verdicts_are_true_at_all_looks_together(model, runs):
    simulated = {key: shares(*key, *MODELS[model], runs=runs) for key in product(FALSE, NOISES)}
    # Speeds over one time of exact attention are not independent: they count as one sample.
    samples = runs * LENGTHS
    for values in (*([value] for value in simulated.values()), simulated.values()):
        count = samples * len(values)
        covered, false, *_ = np.mean([*values], axis=0)
        assert covered >= stats.binom.ppf(1e-5, count, 0.94) / count, simulated
        assert false <= stats.binom.isf(1e-5, count, 0.05) / count, simulated
    most = stats.binom.isf(1e-5, samples, 0.05) / samples
    assert simulated[1.3, 0.05].open_after_eight <= most
    # Rounds of ten times the time leave verdicts possible.
    assert "AR" in model or simulated[1.3, 0.15].open_at_the_end <= most


def test_a_speed_is_faster_slower_the_same_within_10_percent_or_open():
    intervals = {"faster": [(1.001, 1.05)], "slower": [(0.95, 0.999)], "as fast": [(1 / 1.1, 1.1)]}
    intervals["not decided"] = [(0.909, 1.1), (1 / 1.1, 1.1001), (1.0, 1.2), (0.8, 1.0), (None, None)]
    for outcome, (low, high) in ((x, interval) for x, group in intervals.items() for interval in group):
        assert Typical(1.0, low, high, 4).outcome == outcome


def pairs_of(rounds, *, deviation=0.05, correlation=0.0, ratios=1.3):
    """Pairs (record, baseline) of a run, with the true ratio of each."""
    generator = np.random.default_rng(0)
    exact = noise(generator, LENGTHS, deviation, correlation, 0.0)
    backends = noise(generator, PAIRS, deviation, correlation, 0.0) - np.log(np.c_[ratios])
    return [record_pair(number, backends, exact, rounds) for number in range(PAIRS)]


def slowed(record, number):
    """The record with ten times the time in one round."""
    times_s = (time_s * (10 if place == number else 1) for place, time_s in enumerate(record.times_s))
    return replace(record, times_s=tuple(times_s))


def test_a_round_of_ten_times_the_time_among_four_takes_away_neither_verdict_nor_crossover():
    pairs, factors = pairs_of(4, deviation=0.005), []
    for place, (record, exact) in list(enumerate(pairs))[::5]:
        spiked = [*pairs]
        spiked[place] = slowed(record, place % 4), exact
        before, after = (decided(run)[place] for run in (pairs, spiked))
        factors.append(np.log(after.high / after.low) / np.log(before.high / before.low))
        assert after.outcome == "faster"
    # A round that counted in full would widen an interval a hundredfold.
    assert np.median(factors) < 3
    rising = pairs_of(4, deviation=0.005, ratios=np.geomspace(0.5, 2, LENGTHS).repeat(BACKENDS))
    records = {(x.case.label, x.case.tokens): x for pair in rising for x in pair}
    records["exact", 512] = slowed(records["exact", 512], 0)
    for row in speed_ups(curves(records.values(), "time_s")):
        _, low, high = crossover(row.ratios)
        assert 400 < low < np.sqrt(512 * 1024) < high < 1000


def test_three_calm_rounds_make_no_outlier_of_the_fourth_in_a_run_of_more_noise():
    calm = timed("b0", 64, (1.0, 1.001, 0.999, 1.1)), timed("exact", 64, (1.0,) * 4)
    assert decided([calm])[0].outcome == "as fast"
    assert decided([calm, *pairs_of(4)[1:]])[0].outcome == "not decided"


@pytest.mark.parametrize("correlation", [0.0, 0.4, 0.7])
def test_intervals_are_wide_by_the_pooled_correlation_of_twenty_series_and_by_0_7_below(correlation):
    pairs = pairs_of(16, deviation=0.4, correlation=correlation, ratios=1.0)
    possible = np.linspace(0, 0.8, 81)
    for count in (PAIRS, 19):
        halves = np.array([np.log(speed.high / speed.low) / 2 for speed in decided(pairs[:count])])
        logs = [np.log(round_ratios(*pair)) for pair in pairs[:count]]
        widths = [[half_width(series, value, 0.025 / len(LOOKS)) for series in logs] for value in possible]
        pooled = possible[np.argmin(np.median(np.abs(widths - halves), axis=1))]
        low, high = (correlation - 0.1, correlation + 0.15) if count == PAIRS else (CORRELATION, CORRELATION)
        # One standard error is added.
        assert low - 1e-9 < pooled < high + 1e-9


def test_a_decided_speed_keeps_its_interval_whatever_later_rounds_show():
    pairs = [
        (replace(x, times_s=(*x.times_s[:4], *(3 * time_s for time_s in x.times_s[4:]))), exact)
        for x, exact in pairs_of(16)
    ]
    outcomes = set()
    for before, after in zip(decided(pairs_of(4)), decided(pairs), strict=True):
        outcomes.add(before.outcome)
        assert after.samples > 4 if before.outcome == "not decided" else after == before
    assert outcomes == {"faster", "not decided"}


def test_a_case_is_open_while_a_look_leaves_a_speed_open_and_a_baseline_as_long_as_any():
    pairs = pairs_of(4)
    speeds = zip(pairs, decided(pairs), strict=True)
    keys = {x.case.key for pair, speed in speeds if speed.outcome == "not decided" for x in pair}
    assert keys == open_cases([x for pair in pairs for x in pair]) != set()
    assert open_cases([x for pair in pairs_of(3) for x in pair]) == set()
