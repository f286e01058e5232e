"""Two sides of runs compared: verdicts, how often they are wrong, and how surely they are right."""

import math

import numpy as np
import pytest
from made_records import case, compare
from stats.simulate_diff import MODELS, level, power, run, standard_error

from efficient_attn.measure.record import Record, replace
from efficient_attn.stats import significance
from efficient_attn.stats.diff import FALSE_ALARMS, compare_runs
from efficient_attn.stats.scatter import round_means
from efficient_attn.studies import studies

# Studies declare the quantities of their records.
studies()

SHIFTS = ("runs shift by 5 %", "cases shift by 5 % in each run")
# Comparisons of a simulation; so many may be wrong, three standard errors more than in the long run.
COMPARISONS = 200
MOST_ALARMS = FALSE_ALARMS + 3 * standard_error(FALSE_ALARMS, COMPARISONS)


def timed(generator, *, calls=20, cv=0.05, share=0.0, rounds=4, factor=1.0, tokens=64):
    """Calls of a lognormal law; calls of a round have `share` of the variance in common."""
    single = generator.standard_normal(calls)
    sizes = tuple(len(part) for part in np.array_split(single, rounds))
    common = np.repeat(generator.standard_normal(rounds), sizes)
    logs = cv * (math.sqrt(1 - share) * single + math.sqrt(share) * common)
    times_s = tuple(1e-3 * factor * np.exp(logs))
    return Record(case=case("time", "b", tokens), times_s=times_s, round_sizes=sizes)


def memory(peak_bytes=1000, **fields):
    return Record(case=case("memory", "b", 64), peak_bytes=peak_bytes, **fields)


def errors(*draws, **fields):
    mean = {"output_relative_error": float(np.mean(draws)), "output_relative_error_draws": draws}
    return Record(case=case("error", "b", 64, of="output"), **{**mean, **fields})


def swapped(draws, texts):
    mean = float(np.mean(draws))
    return Record(case=case("swap", "b", 64), perplexity=mean, perplexity_draws=tuple(draws), texts=texts)


def accuracies(*values, answers=2048, backend="b"):
    return [
        Record(case=case("recall", backend, 64, seed=seed), accuracy=value, answers=answers)
        for seed, value in enumerate(values)
    ]


def change_of(old, new, quantity=None, **options):
    """The only change, or the change of a quantity; sides are records or lists of records."""
    sides = ([side] if isinstance(side, Record) else side for side in (old, new))
    changes = compare(*sides, **options).changes
    (change,) = (change for change in changes if quantity in (None, change.quantity))
    return change


LOGNORMAL = np.random.default_rng(0).lognormal(-2, 0.1, (2, 16))
TEXTS = np.array([5.0, 20.0, 80.0])
SEEDS = np.repeat(TEXTS, 2) * np.tile([0.8, 1.2], 3)
CONSTANT = Record(case=case("time", "b", 64), times_s=(1e-3,) * 20, round_sizes=(5,) * 4)
STRANGE = Record(case=case("time", "b", 64), times_s=(0.0, None, 1e300, 1e-320))
UNLISTED = errors(0.4, 0.6, unsafe_rows=0.1)

VERDICTS = {
    "bytes, one more": (memory(), memory(1001), None, "regression"),
    "bytes, equal": (memory(), memory(), None, "unchanged"),
    "bytes, from zero": (memory(0), memory(1), None, "regression"),
    "draws, equal": (errors(*LOGNORMAL[0]), errors(*LOGNORMAL[0]), None, "unchanged"),
    "draws, by chance": (errors(*LOGNORMAL[0]), errors(*LOGNORMAL[1]), None, "unchanged"),
    # A single draw is reproduced by its seed.
    "draws, single": (errors(0.1), errors(0.2), None, "regression"),
    "draws, without values": (UNLISTED, replace(UNLISTED, unsafe_rows=0.3), "unsafe_rows", "unclear"),
    "rounding": (errors(1e-7), errors(3e-7), None, "unchanged"),
    "times, constant": (CONSTANT, CONSTANT, None, "unchanged"),
    "times, no numbers": (STRANGE, STRANGE, None, "not comparable"),
    # Three texts of a single seed are all 10 % worse, though they differ by more from each other.
    "texts": (swapped(TEXTS, 3), swapped(1.1 * TEXTS, 3), "perplexity", "regression"),
    "texts, two seeds": (swapped(SEEDS, 3), swapped(1.1 * SEEDS, 3), "perplexity", "unclear"),
    "seeds": (accuracies(0.99, 0.98, 0.97), accuracies(0.11, 0.1, 0.09), "accuracy", "regression"),
    # A training that learns from one seed in three, whatever the number of answers.
    "seeds, by chance": (
        accuracies(0.99, 0.1, 0.99, answers=10**6),
        accuracies(0.1, 0.99, 0.1, answers=10**6),
        "accuracy",
        "unclear",
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_each_quantity_is_compared_by_its_scatter(name):
    old, new, quantity, verdict = VERDICTS[name]
    assert change_of(old, new, quantity).verdict == verdict


def test_thresholds_of_quantities_and_kinds_decide():
    generator = np.random.default_rng(0)
    old, new = (timed(generator, cv=0.001, factor=factor) for factor in (1.0, 1.04))
    change = change_of(old, new)
    assert change.verdict == "unchanged" and change.p < 1e-3
    assert change_of(old, new, thresholds={"time": 0.03}).verdict == "regression"
    assert change_of(memory(), memory(1010), thresholds={"memory": 0.01}).verdict == "unchanged"
    # A mean over draws whose values no record keeps decides where its threshold is set.
    biased = replace(UNLISTED, unsafe_rows=0.3)
    change = change_of(UNLISTED, biased, "unsafe_rows", thresholds={"unsafe_rows": 0.1})
    assert change.verdict == "regression"


def test_seeds_of_a_backend_that_learn_or_fail_make_all_verdicts_careful():
    """Three that learned and three that failed may be chance where a second backend shows such a chance."""
    old = accuracies(0.99, 0.98, 0.97) + accuracies(0.1, 0.99, 0.1, backend="c")
    new = accuracies(0.1, 0.11, 0.1) + accuracies(0.99, 0.1, 0.99, backend="c")
    changes = [change for change in compare(old, new).changes if change.quantity == "accuracy"]
    assert [change.verdict for change in changes] == ["unclear", "unclear"]


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("ok", "oom", "regression"),
        ("crash", "ok", "improvement"),
        ("oom", "timeout", "unchanged"),
        ("ok", "skipped", "unclear"),
    ],
)
def test_a_case_that_stopped_working_is_a_regression(old, new, verdict):
    sides = (replace(memory(), status=status, reason="why") for status in (old, new))
    change = change_of(*sides)
    assert change.verdict == verdict and change.remark == f"{old} → {new}: why"


def test_cases_are_matched_whatever_their_label_and_those_of_a_single_side_are_named():
    first, second, third = (replace(memory(), case=case("memory", "b", tokens)) for tokens in (1, 2, 3))
    renamed = replace(second, case=replace(second.case, label="c"))
    # The last of equal cases counts.
    comparison = compare([first, second], [replace(second, peak_bytes=9000), renamed, third])
    assert [change.verdict for change in comparison.changes] == ["unchanged"]
    assert (comparison.missing, comparison.added) == (("b, 1 tokens, memory",), ("b, 3 tokens, memory",))


def test_a_single_true_regression_is_the_only_change():
    generator = np.random.default_rng(0)
    old, new = (
        [timed(generator, tokens=n, factor=factor if n == 7 else 1) for n in range(1, 31)]
        for factor in (1, 1.5)
    )
    comparison = compare(old, new)
    (change,) = comparison.of("regression")
    assert change.tokens == 7 and change.low < 1.5 < change.high and not comparison.of("improvement")
    back = compare(new, old)
    assert len(back.of("improvement")) == 1 and not back.of("regression")


def test_a_difference_that_waiting_for_a_processor_can_explain_is_not_clear():
    generator = np.random.default_rng(0)
    old, new = timed(generator), timed(generator, factor=1.5)
    for share, verdict in ((0.2, "regression"), (0.5, "unclear")):
        waited = replace(new, waited_s=share * sum(new.times_s))
        assert change_of(old, waited).verdict == verdict
        assert change_of(waited, old).verdict == verdict.replace("regression", "improvement")
        # Waiting in the faster run does not make the slower run slower.
        assert change_of(replace(old, waited_s=waited.waited_s), new).verdict == "regression"


@pytest.mark.parametrize("sizes", [None, (10,), (5, 6), (1.5, None, 3, 4), (-1, 11), (True, 9)])
def test_calls_without_valid_rounds_count_as_a_single_round(sizes):
    record = replace(timed(np.random.default_rng(0), calls=10), round_sizes=sizes)
    assert len(round_means(record)) == 1
    assert len(round_means(replace(record, round_sizes=(1, 0, 7, 2)))) == 3


def test_a_run_that_is_noisier_everywhere_weighs_less_in_every_interval():
    generator = np.random.default_rng(0)
    old, new = ([timed(generator, cv=cv, tokens=n) for n in range(1, 31)] for cv in (0.05, 0.4))
    rounds = [(round_means(before), round_means(after)) for before, after in zip(old, new, strict=True)]
    ratio = significance.noise_ratio(rounds)
    assert ratio > 30
    for change, pair in zip(compare(old, new).changes, rounds, strict=True):
        _, error, freedom = significance.student_statistic(*pair, ratio)
        half_width = error * significance.quantile(0.025, freedom)
        assert math.log(change.high / change.ratio) == pytest.approx(half_width)


def test_the_interval_holds_the_true_ratio_in_95_percent_where_calls_of_a_round_are_alike():
    generator = np.random.default_rng(3)
    fields = {"calls": 40, "share": 0.3}
    pairs = [(timed(generator, **fields), timed(generator, factor=1.2, **fields)) for _ in range(400)]
    inside = sum(change.low <= 1.2 <= change.high for change in (change_of(*pair) for pair in pairs))
    assert abs(inside - 380) <= 3 * math.sqrt(400 * 0.95 * 0.05)


def simulated(seed, model="independent calls", factor=1.0, count=1):
    generator = np.random.default_rng(seed)
    return [run(generator, MODELS[model], cases=1, slower=factor) for _ in range(count)]


def test_with_several_runs_the_run_is_the_unit():
    old, new = simulated(0, SHIFTS[0], count=3), simulated(1, SHIFTS[0], count=4)
    (change,) = compare_runs(old, new).changes
    means = [np.mean([np.log(record.times_s).mean() for (record,) in side]) for side in (old, new)]
    assert change.over == "runs"
    # Each run's value is a robust mean of its calls: alike, but for what trimming calls of 5 % changes.
    assert change.ratio == pytest.approx(math.exp(means[1] - means[0]), rel=0.02)
    # More rounds of the same calls show nothing new.
    often = [[replace(r, times_s=r.times_s * 3, round_sizes=r.round_sizes * 3) for r in side] for side in old]
    assert compare_runs(often, new).changes[0].p == pytest.approx(change.p)


def test_a_shift_of_the_only_run_is_a_regression_and_of_several_runs_only_beyond_their_scatter():
    (old,), (new,), (slow,) = simulated(1), simulated(2, factor=1.2), simulated(3, factor=1.2)

    def verdict(before, after):
        return compare_runs(before, after).changes[0].verdict

    assert verdict([old], [new]) == "regression"
    # The same two runs among others that show how much runs differ.
    assert verdict([old, slow], [new, old]) == "unchanged"
    assert verdict([old, slow, old], [new, new, old]) == "unclear"
    several = simulated(4, count=5)
    assert verdict(several, simulated(5)) == "unchanged"
    assert verdict(several, simulated(6, factor=1.3)) == "regression"


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [((100, 100), (101, 101), "regression"), ((100, 140), (130, 120), "unclear")],
)
def test_numbers_that_differ_between_the_runs_of_a_side_are_tested_over_runs(old, new, verdict):
    sides = ([[memory(peak)] for peak in side] for side in (old, new))
    assert compare_runs(*sides).changes[0].verdict == verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "runs"),
    [(name, 3 if name in SHIFTS else 1) for name in MODELS],
)
def test_equal_code_keeps_the_level_under_every_noise_model(name, runs):
    """Shifts of whole runs, which a single run does not show, need several runs."""
    assert level(MODELS[name], COMPARISONS, runs=runs) <= MOST_ALARMS


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "rounds"), [(1, 4), (3, 4)])
def test_ten_percent_more_time_is_noticed_in_calls_that_scatter_by_five(runs, rounds):
    share = power(MODELS["independent calls"], 1000, cases=1, runs=runs, rounds=rounds)
    assert share >= 0.95 + 3 * standard_error(0.95, 1000)
