"""Crossovers: found where they are, marked where they are guessed, with intervals that hold."""

from dataclasses import replace

import numpy as np
import pytest

from efficient_attn.analysis.crossover import _crossing, crossovers
from efficient_attn.analysis.curves import curves
from efficient_attn.report.sentences import bench_sentences
from efficient_attn.sweep.records import Case, Record

LENGTHS = (256, 512, 1024, 2048, 4096)
SHARED = {"num_heads": 2, "head_dim": 8, "dtype": "float32", "device": "cpu", "threads": 1}


def records(at, *, noise=0.0, seed=0, lengths=LENGTHS, samples=40):
    """Exact attention in n² and `window` in n, equal at `at` tokens."""
    generator = np.random.default_rng(seed)
    made = []
    for tokens in lengths:
        for label, seconds in (("exact", tokens**2), ("window", tokens * at)):
            case = Case(kind="time", backend=label, label=label, tokens=tokens, **SHARED)
            times_s = 1e-9 * seconds * np.exp(generator.normal(0, noise, size=samples))
            made.append(Record(case=case, times_s=tuple(map(float, times_s))))
    return made


def found(made):
    return crossovers(curves(made, "time_s"))


@pytest.mark.parametrize("at", [300, 700, 1024, 4000])
def test_a_crossover_of_two_powers_is_exact_between_any_two_lengths(at):
    (crossover,) = found(records(at))
    assert crossover.tokens == pytest.approx(at) and not crossover.extrapolated
    assert crossover.low == pytest.approx(at) and crossover.high == pytest.approx(at)


def test_of_several_crossings_the_last_one_counts():
    assert _crossing(np.arange(4.0), np.array([1.0, -1.0, 1.0, -1.0])) == 2.5
    assert _crossing(np.arange(3.0), np.array([1.0, -1.0, 1.0])) == np.inf


def test_beyond_the_longest_length_it_is_marked_and_far_beyond_it_is_not_told():
    (crossover,) = found(records(10_000))
    assert crossover.extrapolated and crossover.tokens == pytest.approx(10_000)
    assert found(records(8 * 4096 + 1000)) == []


def test_what_is_faster_everywhere_or_gains_nothing_has_none():
    assert found(records(100)) == []
    slower = [r for r in records(700) if r.case.label == "exact"]
    same = [replace(r, case=replace(r.case, backend="f", label="f")) for r in slower]
    assert found([*slower, *same]) == []


def test_intervals_hold_the_true_crossover_about_as_often_as_they_say():
    runs = 200
    covered = 0
    for seed in range(runs):
        (crossover,) = found(records(700, noise=0.1, seed=seed))
        covered += (crossover.low or 0) <= 700 <= (crossover.high or np.inf)
    # 95 % is promised; resampled medians of 40 samples may be somewhat short or long of it, and 200 runs
    # scatter by three standard errors of √(0.95·0.05/200).
    assert covered / runs >= 0.95 - 0.03 - 3 * (0.95 * 0.05 / runs) ** 0.5


def test_an_interval_that_nothing_bounds_is_open():
    (crossover,) = found(records(20_000, noise=0.5, samples=12))
    assert (
        crossover.high is None
        and "or more, extrapolated" in bench_sentences(records(20_000, noise=0.5, samples=12))[-1]
    )


def test_the_sentence_tells_the_number_its_interval_and_that_it_was_extrapolated():
    told = bench_sentences(records(700))
    assert "Estimated crossover with fused exact attention: window at 700 tokens (700 to 700)." in told
    told = bench_sentences(records(10_000))
    assert told[-1].endswith("window at 10000 tokens (10000 to 10000, extrapolated).")
    assert not any("crossover" in sentence for sentence in bench_sentences(records(100)))
