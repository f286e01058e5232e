"""Crossovers: found where they are, marked where they are guessed, and told with speeds in a sentence."""

import numpy as np
import pytest
from scipy.stats import binom

from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.measure.variants import CEILING
from efficient_attn.stats.curves import curves
from efficient_attn.studies.bench.crossover import _crossing, _Lag, _near_zero, crossovers
from efficient_attn.studies.bench.tables import crossover_cells, tables
from efficient_attn.studies.bench.view import sentences

LENGTHS = (256, 512, 1024, 2048, 4096)
SHARED = {"num_heads": 2, "head_dim": 8, "dtype": "float32", "device": "cpu", "threads": 1}


def records(at, *, noise=0.0, seed=0, lengths=LENGTHS, samples=40, around=0):
    """Exact attention in n² and `window` in n, equal at `at` tokens; both in a block of so much per token."""
    generator = np.random.default_rng(seed)
    made = []
    for tokens in lengths:
        for label, seconds in (("exact", tokens**2 + around * tokens), ("window", tokens * (at + around))):
            case = Case(kind="time", backend=label, label=label, tokens=tokens, **SHARED)
            times_s = 1e-9 * seconds * np.exp(generator.normal(0, noise, size=samples))
            rounds = (samples // 4,) * 4
            made.append(Record(case=case, times_s=tuple(map(float, times_s)), round_sizes=rounds))
    return made


def found(made):
    return crossovers(curves(made, "time_s"))


def cell(made, label="window"):
    return crossover_cells(curves(made, "time_s"))[label]


@pytest.mark.parametrize("around", [0, 3000])
@pytest.mark.parametrize("at", [300, 1024, 9000])
def test_a_crossover_is_exact_between_any_two_lengths_and_beyond_alone_and_in_a_block(at, around):
    (crossover,) = found(records(at, around=around))
    assert crossover.tokens == pytest.approx(at) and crossover.extrapolated == (at > 4096)
    # Steady rounds leave the shift of both times between runs.
    assert (crossover.low or 0) < at < (crossover.high or np.inf)


def test_of_several_crossings_the_last_one_counts():
    assert _crossing(np.arange(4.0), [1.0, -1.0, 1.0, -1.0]) == 2.5
    lags = [[1.0, -1.0, 1.0], [1.0, 1.0, -1.0], [-1.0, -1.0, -1.0], [2.0, 2.0, 1.0]]
    assert [_crossing(np.arange(3.0), one) for one in lags] == [np.inf, 1.5, -np.inf, 3.0]


def test_beyond_the_longest_length_it_is_marked_and_far_beyond_it_is_not_told():
    (crossover,) = found(records(10_000))
    assert crossover.extrapolated and crossover.tokens == pytest.approx(10_000)
    (far,) = found(records(8 * 4096 + 1000))
    assert far.tokens is None and far.never and not far.always


def test_what_is_faster_everywhere_or_gains_nothing_has_none_and_says_where_it_was_looked_for():
    (faster,) = found(records(100))
    assert faster.tokens is None and faster.always and faster.lengths == LENGTHS
    slower = [r for r in records(700) if r.case.label == "exact"]
    same = [replace(r, case=replace(r.case, backend="f", label="f")) for r in slower]
    (none,) = found([*slower, *same])
    assert none.tokens is None and not none.always and not none.never
    one_length = [r for r in records(700) if r.case.tokens == 512]
    assert found(one_length) == []


def test_only_what_was_measured_under_one_setting_is_compared():
    alone, block = (
        [replace(r, case=replace(r.case, of=of)) for r in records(at)]
        for of, at in (("attention", 700), ("block", 1500))
    )
    told = {one.label: one.tokens for one in found([*alone, *block])}
    assert told == {"window, attention": pytest.approx(700), "window, block": pytest.approx(1500)}


@pytest.mark.parametrize("at", [700, 8000])
def test_intervals_hold_the_true_crossover_where_only_calls_scatter(at):
    runs = 200
    covered = 0
    for seed in range(runs):
        (crossover,) = found(records(at, noise=0.1, seed=seed, around=1000))
        assert crossover.extrapolated == (at > 4096)
        covered += (crossover.low or 0) <= at <= (crossover.high or np.inf)
    # At 95 % coverage fewer than this happens once in ten thousand.
    assert covered >= binom.ppf(1e-4, runs, 0.95)


def test_a_round_that_was_slow_for_both_moves_no_crossover():
    made = records(700)
    slow = [
        replace(one, times_s=tuple(time_s * (3 if number // 10 == 1 else 1) for number, time_s in calls))
        for one in made
        if (calls := list(enumerate(one.times_s)))
    ]
    (crossover,) = found(slow)
    assert crossover.tokens == pytest.approx(700)
    # Where both were slow in different rounds, nothing cancels and the interval is wide.
    apart = [
        replace(one, times_s=one.times_s[::-1])
        if one.case.label == "window" and one.case.tokens == 512
        else one
        for one in slow
    ]
    assert found(apart)[0].low is None


def test_too_few_rounds_or_unknown_ones_leave_the_crossover_unclear():
    for sizes in (None, (40,), (20, 10, 10), (41, 1, 1, 1)):
        made = [replace(one, round_sizes=sizes) for one in records(700)]
        (crossover,) = found(made)
        assert crossover.tokens is None and cell(made) == "unclear"
        assert "at least 4 are needed" in tables(made, {})[0].notes[0]


def test_an_interval_that_nothing_bounds_is_open_or_the_crossover_is_unclear():
    made = records(20_000, noise=0.05, samples=12)
    (crossover,) = found(made)
    assert crossover.high is None and crossover.tokens is not None
    assert "or more, extrapolated)" in cell(made)
    assert cell(records(700, noise=2.0, samples=12)) == "unclear"


def test_the_interval_between_two_lengths_is_where_the_line_is_within_its_own_interval_of_zero():
    generator = np.random.default_rng(0)
    along = np.linspace(0, 1, 20_001)
    for _ in range(300):
        (here, there), (h, k) = generator.normal(size=2), generator.exponential(size=2)
        line, half = (1 - along) * here + along * there, np.hypot((1 - along) * h, along * k)
        inside = along[np.abs(line) <= half]
        edges = _near_zero(_Lag(here, h), _Lag(there, k), 1.0)
        assert bool(edges) == bool(len(inside))
        if edges:
            assert (min(edges), max(edges)) == pytest.approx((inside[0], inside[-1]), abs=1e-4)


WHERE = "exact = 1, on this machine (2 heads of 8, float32, 1 CPU thread)"


@pytest.mark.parametrize(
    ("at", "lengths", "speed", "start"),
    [
        (700, LENGTHS, "5.85x at 4096 tokens", "700 (660 to 740)"),
        (10_000, LENGTHS, "0.41x at 4096 tokens", "10000 (7900 to 15000, extrapolated)"),
        (100, LENGTHS, "41.0x at 4096 tokens", "all from 256"),
        (40_000, LENGTHS, "0.102x at 4096 tokens", "none up to 4096"),
        (900, (16384,), "18.2x at 16384 tokens", None),
    ],
)
def test_table_and_sentence_have_the_speed_at_the_longest_length_and_the_crossover(at, lengths, speed, start):
    made = records(at, lengths=lengths)
    (table,) = tables(made, {})
    if start is not None:
        assert [row[table.columns.index("faster from")] for row in table.rows] == ["", start]
        assert "beyond as far as 8 times the last" in table.notes[1]
    told = speed if start is None else f"{speed}, faster from: {start}"
    assert sentences(made, {}) == [f"Speed, {WHERE}: window {told}."]


def test_what_is_unusual_about_the_runs_is_said_and_settings_are_never_mixed():
    changes = {"causal": True, "backward": True, "batch": 4, "num_heads": 1}
    unusual = [replace(one, case=replace(one.case, **changes)) for one in records(700)]
    _, text = sentences([*records(700), *unusual], {})
    assert "(1 head of 8, float32, 1 CPU thread, batch 4, causal, forward and backward)" in text
    assert sentences([one for one in records(700) if one.case.label == "exact"] + unusual[1::2], {}) == []


@pytest.mark.parametrize(("own", "its"), [(1e150, 1e-290), (1e-290, 1e150)])
def test_a_ratio_that_no_float_can_hold_is_not_told(own, its):
    seconds = {"window": own, "exact": its}
    made = [replace(one, times_s=(seconds[one.case.label],) * 40) for one in records(700)]
    assert sentences(made, {}) == []


def test_the_ceiling_of_a_block_has_a_row_and_no_sentence():
    made = [replace(one, case=replace(one.case, of="block")) for one in records(700)]
    ceiling = [
        replace(one, case=replace(one.case, backend=CEILING, label=CEILING), times_s=(1e-6,) * 40)
        for one in made
        if one.case.label == "exact"
    ]
    table, *_ = tables([*made, *ceiling], {})
    assert CEILING in {row[0] for row in table.rows} and table.title == "Time per call of the block, ms"
    (text,) = sentences([*made, *ceiling], {})
    assert text.startswith("Speed of the block") and CEILING not in text
