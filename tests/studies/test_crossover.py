"""Crossovers: found where they are, marked where they are guessed, and told with speeds in a sentence."""

import re

import numpy as np
import pytest
from synthetic_records import case

from efficient_attn.measure.record import Record, replace
from efficient_attn.measure.variants import CEILING
from efficient_attn.runs.study import Run, Settled
from efficient_attn.stats.estimates import Typical, curves, speed_ups
from efficient_attn.stats.predicted_time import crossover as crossover_of
from efficient_attn.studies.bench.tables import crossover_cells, tables
from efficient_attn.studies.bench.view import sentences

# A run without background load.
UNDISTURBED = Run(Settled())
LENGTHS = (256, 512, 1024, 2048, 4096)


def records(at, *, noise=0.0, lengths=LENGTHS, samples=40, around=0):
    """Exact attention in n² and `window` in n, equal at `at` tokens; both in a block of so much per token."""
    generator = np.random.default_rng(0)
    made = []
    for tokens in lengths:
        for label, seconds in (("exact", tokens**2 + around * tokens), ("window", tokens * (at + around))):
            times_s = 1e-9 * seconds * np.exp(generator.normal(0, noise, size=samples))
            measured = {"times_s": tuple(map(float, times_s)), "round_sizes": (samples // 4,) * 4}
            made.append(Record(case=case("time", label, tokens), **measured))
    return made


def crossover(records):
    (speed_up,) = speed_ups(curves(records, "time_s"))
    return crossover_of(speed_up.ratios)


def cells(records):
    return crossover_cells(speed_ups(curves(records, "time_s")))


@pytest.mark.parametrize(("around", "error"), [(0, 1e-6), (3000, 0.04)])
@pytest.mark.parametrize("at", [300, 1024, 3000])
def test_a_crossover_between_lengths_is_that_of_power_laws_and_close_in_a_block(at, around, error):
    tokens, low, high = crossover(records(at, around=around))
    assert tokens == pytest.approx(at, rel=error)
    # Steady rounds leave the shift of both times between runs.
    assert low < at < (high or np.inf)


@pytest.mark.parametrize(
    ("values", "place"),
    [([-1, 1, -1, 1], 2.5), ([-1, 1, -1], None), ([-1, -1, 1], 1.5), ([1, 1, 1], 0), ([-3, -2, 0], None)],
)
def test_of_several_crossings_the_last_one_counts(values, place):
    speeds = {2**n: Typical(*3 * [2.0**value], samples=4) for n, value in enumerate(values)}
    assert crossover_of(speeds).value == (None if place is None else pytest.approx(2**place))


def test_only_what_was_measured_under_one_setting_is_compared():
    alone, block = (
        [replace(r, case=replace(r.case, of=of)) for r in records(at)]
        for of, at in (("attention", 700), ("block", 1500))
    )
    rows = speed_ups(curves([*alone, *block], "time_s"))
    shown = {row.label: crossover_of(row.ratios).value for row in rows}
    assert shown == {"window, attention": pytest.approx(700), "window, block": pytest.approx(1500)}


def test_a_round_that_was_slow_for_both_moves_no_crossover():
    slow = [
        replace(r, times_s=tuple(time_s * (3 if number // 10 == 1 else 1) for number, time_s in calls))
        for r in records(700)
        if (calls := list(enumerate(r.times_s)))
    ]
    assert crossover(slow)[0] == pytest.approx(700)
    # Where both were slow in different rounds, nothing cancels and the interval is wide.
    apart = [
        replace(r, times_s=r.times_s[::-1]) if r.case.label == "window" and r.case.tokens == 512 else r
        for r in slow
    ]
    assert cells(apart) == {"window": "700\t300 to 970"}


@pytest.mark.parametrize("sizes", [None, (40,), (20, 10, 10), (41, 1, 1, 1)])
def test_too_few_rounds_or_unknown_ones_leave_the_crossover_unclear(sizes):
    few = [replace(r, round_sizes=sizes) for r in records(700)]
    assert cells(few) == {"window": "?"}
    assert "at least 4, --rounds" in tables(few)[0].notes[0]


def test_an_interval_that_nothing_bounds_is_open_or_the_crossover_is_unclear():
    assert re.fullmatch(r">4096\t\d+ or more", cells(records(4200, noise=0.05, samples=12))["window"])
    exact = [r for r in records(700) if r.case.label == "exact"]
    same = [replace(r, case=replace(r.case, backend="f", label="f")) for r in exact]
    assert cells([*exact, *same]) == {"f": ">4096\tbelow 256 or more"}


WHERE = "(2 heads of 8, float32, 2 CPU threads)"


@pytest.mark.parametrize(
    ("at", "speed", "start"),
    [(700, "5.9×", "700\t640 to 760"), (10_000, "0.41×", ">4096"), (100, "41×", "≤256")],
)
def test_table_and_sentence_have_the_speed_at_the_longest_length_and_the_crossover(at, speed, start):
    (table,) = tables(records(at))
    assert [row[table.columns.index("faster from, tokens")] for row in table.rows] == ["", start]
    told = f"Speed at 4096 tokens {WHERE}, exact 1×: window {speed}."
    assert sentences(records(at), 0.1, UNDISTURBED) == [told]
    # A single length has a speed and no crossover.
    alone = records(at, lengths=LENGTHS[-1:])
    assert "faster from, tokens" not in tables(alone)[0].columns
    assert sentences(alone, 0.1, UNDISTURBED) == sentences(records(at), 0.1, UNDISTURBED)


def test_what_is_unusual_about_the_runs_is_said_and_settings_are_never_mixed():
    changes = {"causal": True, "backward": True, "batch": 4, "num_heads": 1}
    unusual = [replace(one, case=replace(one.case, **changes)) for one in records(700)]
    _, text = sentences([*records(700), *unusual], 0.1, UNDISTURBED)
    assert "(1 head of 8, float32, 2 CPU threads, batch 4, causal, forward and backward)" in text
    exact = [one for one in records(700) if one.case.label == "exact"]
    assert sentences(exact + unusual[1::2], 0.1, UNDISTURBED) == []


@pytest.mark.parametrize(("own", "its"), [(1e150, 1e-290), (1e-290, 1e150)])
def test_a_ratio_that_no_float_can_hold_is_not_told(own, its):
    seconds = {"window": own, "exact": its}
    made = [replace(one, times_s=(seconds[one.case.label],) * 40) for one in records(700)]
    assert sentences(made, 0.1, UNDISTURBED) == []


def test_the_ceiling_of_a_block_has_a_row_and_no_sentence():
    made = [replace(one, case=replace(one.case, of="block")) for one in records(700)]
    ceiling = [
        replace(one, case=replace(one.case, backend=CEILING, label=CEILING), times_s=(1e-6,) * 40)
        for one in made
        if one.case.label == "exact"
    ]
    table, *_ = tables([*made, *ceiling])
    assert CEILING in {row[0] for row in table.rows} and table.title == "Time per call of the block, ms"
    (text,) = sentences([*made, *ceiling], 0.1, UNDISTURBED)
    assert text.startswith("Speed of the block") and CEILING not in text
