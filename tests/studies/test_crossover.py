"""Crossovers of measured speeds, with doubts, in cells and sentences."""

import re

import numpy as np
import pytest
from synthetic_records import case

from efficient_attn.measure.record import Record, replace
from efficient_attn.measure.variants import CEILING
from efficient_attn.runs.study import Run, Settled
from efficient_attn.stats.estimates import Typical, curves
from efficient_attn.stats.predicted_time import crossover as crossover_of
from efficient_attn.stats.speeds import speed_ups
from efficient_attn.studies.bench import Bench
from efficient_attn.studies.bench import tables as views

UNDISTURBED = Run(Settled())
LENGTHS = (256, 512, 1024, 2048, 4096)


def records(at, *, noise=0.0, lengths=LENGTHS, samples=40, around=0):
    """Exact attention in n² and `window` in n, equal at `at` tokens; both in a block of so much per token."""
    generator = np.random.default_rng(0)
    drawn = []
    for tokens in lengths:
        for label, seconds in (("exact", tokens**2 + around * tokens), ("window", tokens * (at + around))):
            times_s = 1e-9 * seconds * np.exp(generator.normal(0, noise, size=samples))
            measured = {"times_s": tuple(map(float, times_s)), "round_sizes": (samples // 4,) * 4}
            drawn.append(Record(case=case("time", label, tokens), **measured))
    return drawn


def tables(records):
    return Bench().view("tables", records, UNDISTURBED)


def crossover(records):
    (speed_up,) = speed_ups(curves(records, "time_s"))
    return crossover_of(speed_up.ratios)


def cells(records):
    rows = speed_ups(curves(records, "time_s"))
    return {row.label: views.crossover_cell(row.ratios) for row in rows if len(row.ratios) > 1}


@pytest.mark.parametrize(("around", "error"), [(0, 1e-6), (3000, 0.04)])
@pytest.mark.parametrize("at", [300, 1024, 3000])
def test_a_crossover_between_lengths_is_that_of_power_laws_and_close_in_a_block(at, around, error):
    tokens, low, high = crossover(records(at, around=around))
    assert tokens == pytest.approx(at, rel=error)
    # Rounds without noise have intervals without width.
    assert low == high == tokens


@pytest.mark.parametrize(
    ("values", "place"),
    [([-1, 1, -1, 1], 2.5), ([-1, 1, -1], None), ([-1, -1, 1], 1.5), ([1, 1, 1], 0), ([-3, -2, 0], None)],
)
def test_of_several_crossings_the_last_one_counts(values, place):
    speeds = {2**n: Typical(*3 * [2.0**value], samples=4) for n, value in enumerate(values)}
    assert crossover_of(speeds)[0] == (None if place is None else pytest.approx(2**place))


def test_only_what_was_measured_under_one_setting_is_compared():
    alone, block = (
        [replace(r, case=replace(r.case, of=of)) for r in records(at)]
        for of, at in (("attention", 700), ("block", 1500))
    )
    rows = speed_ups(curves([*alone, *block], "time_s"))
    shown = {row.label: crossover_of(row.ratios)[0] for row in rows}
    assert shown == {"window, attention": pytest.approx(700), "window, block": pytest.approx(1500)}


def test_a_round_that_was_slow_for_both_moves_no_crossover():
    factors = np.repeat((1, 3, 1, 1), 10)
    slow = [replace(r, times_s=tuple(np.multiply(r.times_s, factors).tolist())) for r in records(700)]
    assert crossover(slow)[0] == pytest.approx(700)
    # Where both were slow in different rounds, nothing cancels and the interval is wide.
    place = next(n for n, r in enumerate(slow) if (r.case.label, r.case.tokens) == ("window", 512))
    apart = [*slow]
    apart[place] = replace(slow[place], times_s=slow[place].times_s[::-1])
    assert cells(apart) == {"window": "700\t280 to 980"}


@pytest.mark.parametrize("sizes", [None, (40,), (20, 10, 10), (41, 1, 1, 1)])
def test_too_few_rounds_or_unknown_ones_leave_the_crossover_unclear(sizes):
    few = [replace(r, round_sizes=sizes) for r in records(700)]
    assert cells(few) == {"window": "?"}
    (table, *_), (sentence, last) = tables(few), Bench().view("sentences", few, UNDISTURBED)
    assert table.rows[1][1] == "5.9×?" and "window (5.9×? at 4096 tokens)" in sentence
    assert table.notes[1].startswith("?: ") and last == "No crossover decided yet."


def test_an_interval_that_nothing_bounds_is_open_or_the_crossover_is_unclear():
    assert re.fullmatch(r">4096\?\t\d+ or more", cells(records(4200, noise=0.05, samples=12))["window"])
    exact = [r for r in records(700) if r.case.label == "exact"]
    same = [replace(r, case=replace(r.case, backend="f", label="f")) for r in exact]
    # Equal times are decided, and no length is faster.
    assert cells([*exact, *same]) == {"f": ">4096"}


def test_an_interval_may_reach_below_the_lengths_and_end_within_them():
    speeds = {256: Typical(1.02, 0.9, 1.2, 8), 512: Typical(2.0, 1.9, 2.1, 8)}
    assert views.crossover_cell(speeds).startswith("≤256?\tbelow 256 to ")
    assert views.crossover_cell({**speeds, 256: Typical(1.2, 1.1, 1.3, 8)}) == "≤256"


WHERE = "2 heads of 8, float32, 2 CPU threads"


@pytest.mark.parametrize(
    ("at", "speed", "start"),
    [(700, "5.85×", "700\t700 to 700"), (10_000, "0.41×", ">4096"), (100, "41.0×", "≤256")],
)
def test_table_and_sentence_have_the_speed_at_the_longest_length_and_the_crossover(at, speed, start):
    table, *_ = tables(records(at))
    assert [row[table.columns.index("faster from, tokens")] for row in table.rows] == ["", start]
    clause = f", faster from {at}" if at == 700 else ""
    (text,) = Bench().view("sentences", records(at), UNDISTURBED)
    assert text == f"{WHERE}: window ({speed} at 4096 tokens{clause})."
    # A single length has a speed and no crossover.
    alone = records(at, lengths=LENGTHS[-1:])
    assert "faster from, tokens" not in tables(alone)[0].columns
    assert Bench().view("sentences", alone, UNDISTURBED) == [f"{WHERE}: window ({speed} at 4096 tokens)."]


def test_what_is_unusual_about_the_runs_is_said_and_settings_are_never_mixed():
    changes = {"causal": True, "backward": True, "batch": 4, "num_heads": 1}
    unusual = [replace(record, case=replace(record.case, **changes)) for record in records(700)]
    _, text = Bench().view("sentences", [*records(700), *unusual], UNDISTURBED)
    place = "1 head of 8, float32, 2 CPU threads, batch 4, causal, forward and backward"
    assert text.startswith(f"{place}: window (5.85×")
    exact = [record for record in records(700) if record.case.label == "exact"]
    assert Bench().view("sentences", exact + unusual[1::2], UNDISTURBED) == []


@pytest.mark.parametrize(("window_s", "exact_s"), [(1e150, 1e-290), (1e-290, 1e150)])
def test_a_ratio_that_no_float_can_hold_is_not_told(window_s, exact_s):
    seconds = {"window": window_s, "exact": exact_s}
    extreme = [replace(record, times_s=(seconds[record.case.label],) * 40) for record in records(700)]
    assert Bench().view("sentences", extreme, UNDISTURBED) == []


def test_the_ceiling_of_a_block_has_a_row_and_no_sentence():
    blocks = [replace(record, case=replace(record.case, of="block")) for record in records(700)]
    ceiling = [
        replace(record, case=replace(record.case, backend=CEILING, label=CEILING), times_s=(1e-6,) * 40)
        for record in blocks
        if record.case.label == "exact"
    ]
    table, times, *_ = tables([*blocks, *ceiling])
    assert CEILING in {row[0] for row in table.rows} and times.title.endswith("; time per call, ms")
    (text,) = Bench().view("sentences", [*blocks, *ceiling], UNDISTURBED)
    assert text.startswith(f"Block: {WHERE}: window") and CEILING not in text
