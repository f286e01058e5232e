"""Several runs on a side of `diff`, rounds that are alike, and how often it is wrong under noise models."""

import math
from dataclasses import replace

import numpy as np
import pytest
from made_records import compare
from simulate_diff import MODELS, autoregression, level, power, run, standard_error

import efficient_attn as ea
from efficient_attn.errors import OptionError
from efficient_attn.runner.record import Record
from efficient_attn.stats import significance
from efficient_attn.stats.diff import FALSE_ALARMS, compare_runs

SHIFTS = ("runs shift by 5 %", "cases shift by 5 % in each run")
COMPARISONS = 200


def runs(generator, model, count, **options):
    return [run(generator, MODELS[model], **options) for _ in range(count)]


def test_with_several_runs_the_run_is_the_unit():
    generator = np.random.default_rng(0)
    old, new = runs(generator, SHIFTS[0], 3, cases=1), runs(generator, SHIFTS[0], 4, cases=1)
    (change,) = compare_runs(old, new).changes
    means = [
        np.array([np.mean(np.log(np.reshape(one.times_s, (4, -1))), axis=None) for (one,) in side])
        for side in (old, new)
    ]
    assert change.over == "runs"
    # Each run's value is a robust mean of its calls: alike, but for what trimming calls of 5 % changes.
    assert change.ratio == pytest.approx(math.exp(means[1].mean() - means[0].mean()), rel=0.02)
    # More rounds of the same calls show nothing new.
    often = [
        [replace(one, times_s=one.times_s * 3, round_sizes=one.round_sizes * 3) for one in run_]
        for run_ in old
    ]
    assert compare_runs(often, new).changes[0].p == pytest.approx(change.p)


def test_a_shift_of_the_only_run_is_a_regression_and_one_of_several_is_not():
    generator = np.random.default_rng(1)
    old, new = (
        run(generator, MODELS["independent calls"], cases=1),
        run(generator, MODELS["independent calls"], cases=1, slower=1.2),
    )
    assert compare(old, new).changes[0].verdict == "regression"
    # The same two runs among others that show how much runs differ.
    slow = run(generator, MODELS["independent calls"], cases=1, slower=1.2)
    assert compare_runs([old, slow], [new, old]).changes[0].verdict == "unchanged"
    assert compare_runs([old, slow, old], [new, new, old]).changes[0].verdict == "unclear"


def test_one_run_is_compared_with_several_by_their_scatter():
    generator = np.random.default_rng(2)
    old = runs(generator, "independent calls", 5, cases=1)
    same, slower = (runs(generator, "independent calls", 1, cases=1, slower=factor) for factor in (1.0, 1.3))
    assert compare_runs(old, same).changes[0].verdict == "unchanged"
    assert compare_runs(old, slower).changes[0].verdict == "regression"


def test_the_model_of_the_test_is_said_with_its_figures():
    generator = np.random.default_rng(3)
    old, new = (ea.Results(run(generator, MODELS["independent calls"])) for _ in range(2))
    told = " ".join(ea.diff(old, new).sentences())
    assert "hold for independent rounds" in told and "diff OLD OLD -- NEW NEW" in told
    told = " ".join(ea.diff([old, new], [new, old, old]).sentences())
    assert "is the run: 2 old, 3 new" in told and "independent rounds" not in told
    assert ea.diff([old, new], [new]).as_dict()["runs"] == [2, 1]
    with pytest.raises(OptionError, match="new has no run; name at least one"):
        ea.diff(old, [])


def test_numbers_that_differ_between_the_runs_of_a_side_are_tested_over_runs():
    generator = np.random.default_rng(4)

    def side(*peaks):
        (timed,) = run(generator, MODELS["independent calls"], cases=1)
        about = replace(timed.case, kind="memory")
        return [[Record(case=about, peak_bytes=peak, memory_method="m")] for peak in peaks]

    assert compare_runs(side(100, 100), side(101, 101)).changes[0].verdict == "regression"
    assert compare_runs(side(100, 140), side(130, 120)).changes[0].verdict == "unclear"


@pytest.mark.parametrize("count", [3, 4, 20])
def test_the_variance_of_a_mean_of_alike_rounds_is_that_of_the_autoregression(count):
    generator, value, draws = np.random.default_rng(5), 0.7, 20_000
    noise = autoregression(generator, (draws, count), value)
    factor, share = significance.correlated(count, value)
    true, naive = noise.mean(axis=1).var(), (noise.var(axis=1, ddof=1) / count).mean()
    # Both are means of squares: their standard error is a few √(2 / draws).
    assert true / naive == pytest.approx(factor**2, rel=6 * math.sqrt(2 / draws * (1 + count / 10)))
    assert 0 < share <= 1 and significance.correlated(count, 0.0) == (1.0, 1.0)


def test_a_correlation_of_rounds_is_seen_in_many_cases_and_not_in_a_few():
    generator, count = np.random.default_rng(6), 4000
    series = list(autoregression(generator, (count, 8), 0.7))
    # Shares scatter by 0.3, the estimate by 1.6 times as much, and it is two standard errors higher.
    standard = 0.5 / math.sqrt(count)
    assert abs(significance.correlation(series) - 0.7 - 2 * standard) <= 4 * standard
    assert significance.correlation(series[:2]) == 0.0
    found = [significance.correlation([generator.standard_normal(4) for _ in range(60)]) for _ in range(400)]
    assert sum(one > 0 for one in found) / 400 <= 0.2 + 3 * standard_error(0.2, 400)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_several_runs_on_a_side_keep_the_level_under_every_noise_model(name):
    most = FALSE_ALARMS + 3 * standard_error(FALSE_ALARMS, COMPARISONS)
    assert level(MODELS[name], COMPARISONS, runs=3) <= most


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in SHIFTS])
def test_one_run_on_a_side_keeps_the_level_where_runs_do_not_shift(name):
    most = FALSE_ALARMS + 3 * standard_error(FALSE_ALARMS, COMPARISONS)
    assert level(MODELS[name], COMPARISONS) <= most


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"runs": 1, "rounds": 4}, {"runs": 1, "rounds": 8}, {"runs": 3, "rounds": 4}]
)
def test_ten_percent_more_time_is_found_in_calls_that_scatter_by_five(options):
    comparisons = 1000
    found = power(MODELS["independent calls"], comparisons, cases=1, **options)
    assert found >= 0.95 + 3 * standard_error(0.95, comparisons)
