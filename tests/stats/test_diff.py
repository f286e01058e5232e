"""Two runs compared: the verdict on each quantity, and how often equal times get the right one."""

import math
from functools import partial

import numpy as np
import pytest
from synthetic_records import case

from efficient_attn.measure.record import replace
from efficient_attn.runs.registry import any_record
from efficient_attn.stats.diff import compare_runs

Record = any_record()


def timed(generator, *, shift=0.0, rounds=4, factor=1.0):
    """Five calls in each round, which scatter by 5 %, and a shift of the whole run."""
    logs = 0.05 * generator.standard_normal(5 * rounds) + shift * generator.standard_normal()
    times_s = tuple(1e-3 * factor * np.exp(logs))
    return Record(case=case("time", "b", 64), times_s=times_s, round_sizes=(5,) * rounds)


def memory(peak_bytes=1000):
    return Record(case=case("memory", "b", 64), peak_bytes=peak_bytes)


def drawn(kind, quantity, *draws, **fields):
    """A quantity of which every draw is recorded."""
    values = {quantity: float(np.mean(draws)), f"{quantity}_draws": draws}
    return Record(case=case(kind, "b", 64), **values, **fields)


errors = partial(drawn, "error", "output_relative_error")
losses = partial(drawn, "swap", "loss_difference")
perplexities = partial(drawn, "swap", "perplexity", texts=3)


def accuracies(*values):
    return [
        Record(case=case("recall", "b", 64, seed=seed), accuracy=value, answers=10**6)
        for seed, value in enumerate(values)
    ]


def change_of(old, new, quantity=None, **options):
    """The only change, or the change of a quantity; sides are records or lists of records."""
    sides = ([side] if isinstance(side, Record) else side for side in (old, new))
    changes = compare_runs(*map(tuple, sides), **options).changes
    (change,) = (change for change in changes if quantity in (None, change.quantity))
    return change


FIRST, SECOND = np.random.default_rng(0).lognormal(-2, 0.1, (2, 16))
TEXTS = np.array([5.0, 20.0, 80.0])
SEEDS = np.repeat(TEXTS, 2) * np.tile([0.8, 1.2], 3)
CONSTANT = Record(case=case("time", "b", 64), times_s=(1e-3,) * 20, round_sizes=(5,) * 4)
THREE = replace(CONSTANT, round_sizes=(5, 5, 10))
CHANCE = "no evidence of change"
STATUSES = [("ok", "oom", "regression"), ("crash", "ok", "improvement")]
STATUSES += [("oom", "timeout", "unchanged"), ("ok", "skipped", CHANCE)]
# Scatter of runs, factor on times, rounds, and the share of regressions.
SHARES = [(0.0, 1.0, 4, 0, 0.025), (0.03, 1.0, 8, 0, 0.025), (0.0, 1.2, 8, 0.95, 1)]

# Both sides, the quantity where a record has several, and the verdict.
VERDICTS = {
    "bytes, one more": (memory(), memory(1001), None, "regression"),
    "bytes, from zero": (memory(0), memory(1), None, "regression"),
    "draws, equal": (errors(*FIRST), errors(*FIRST), None, "unchanged"),
    "draws, by chance": (errors(*FIRST[-4:]), errors(*SECOND[-4:]), None, CHANCE),
    "draws, all larger": (errors(*FIRST), errors(*1.2 * FIRST), None, "regression"),
    # A single draw is reproduced by its seed.
    "draws, single": (errors(0.1), errors(0.2), None, "regression"),
    "draws, signed": (losses(-0.5, -0.4, -0.6), losses(-0.1, 0.1, -0.2), "loss_difference", "regression"),
    "rounding": (errors(1e-7), errors(3e-7), None, "unchanged"),
    "times, constant": (CONSTANT, CONSTANT, None, "unchanged"),
    "times, the shift of a run": (CONSTANT, replace(CONSTANT, times_s=(1.07e-3,) * 20), None, CHANCE),
    "times, three rounds": (THREE, replace(THREE, times_s=(2e-3,) * 20), None, CHANCE),
    # Three texts of a single seed are all 10 % worse, though they differ by more from each other.
    "texts": (perplexities(*TEXTS), perplexities(*1.1 * TEXTS), "perplexity", "regression"),
    "texts, two seeds": (perplexities(*SEEDS), perplexities(*1.1 * SEEDS), "perplexity", CHANCE),
    # A training that learns from one seed in three, whatever the number of answers.
    "seeds, by chance": (accuracies(0.99, 0.1, 0.99), accuracies(0.1, 0.99, 0.1), "accuracy", CHANCE),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_each_quantity_is_compared_by_its_scatter(name):
    old, new, quantity, verdict = VERDICTS[name]
    assert change_of(old, new, quantity).verdict == verdict


def test_what_is_no_number_is_not_compared():
    strange = Record(case=case("time", "b", 64), times_s=(0.0, None, 1e300, 1e-320))
    for old, new in ((strange, strange), (errors(0.1, math.inf), errors(0.1, 0.1))):
        assert compare_runs((old,), (new,)).changes == ()


def test_thresholds_of_quantities_and_kinds_decide():
    faster = replace(CONSTANT, times_s=(0.9e-3,) * 20)
    assert change_of(faster, CONSTANT, thresholds={"time": 0.2}).verdict == "unchanged"
    assert change_of(faster, CONSTANT, thresholds={"time": 0.2, "time_s": 0.1}).verdict == "regression"
    assert change_of(memory(), memory(1010), thresholds={"memory": 0.01}).verdict == "unchanged"


@pytest.mark.parametrize(("old", "new", "verdict"), STATUSES)
def test_a_case_that_stopped_working_is_a_regression(old, new, verdict):
    sides = (replace(memory(), status=status, reason="why") for status in (old, new))
    change = change_of(*sides)
    assert change.verdict == verdict and change.remark == f"{old} → {new}: why"


def test_cases_are_matched_whatever_their_label_and_those_of_a_single_side_are_named():
    first, second, third = (replace(memory(), case=case("memory", "b", tokens)) for tokens in (1, 2, 3))
    renamed = replace(second, case=replace(second.case, label="c"))
    # The last of equal cases counts.
    comparison = compare_runs((first, second), (replace(second, peak_bytes=9000), renamed, third))
    assert [change.verdict for change in comparison.changes] == ["unchanged"]
    assert (comparison.missing, comparison.added) == (("b, 1 tokens, memory",), ("b, 3 tokens, memory",))


@pytest.mark.parametrize(("shift", "factor", "rounds", "least", "most"), SHARES)
def test_equal_times_are_rarely_a_regression_and_a_fifth_more_surely_is(shift, factor, rounds, least, most):
    generator, runs = np.random.default_rng(0), 100
    options = {"shift": shift, "rounds": rounds}
    pairs = [(timed(generator, **options), timed(generator, factor=factor, **options)) for _ in range(runs)]
    share = sum(change_of(*pair).verdict == "regression" for pair in pairs) / runs
    error = 3 * math.sqrt(0.025 * 0.975 / runs)
    assert least <= share <= most + error
