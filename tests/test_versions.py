"""`bench --against`: two versions of a backend in the same rounds, a ratio and one of four verdicts."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from made_records import case

from efficient_attn import bench
from efficient_attn.errors import OptionError
from efficient_attn.runner.records import Record
from efficient_attn.stats.noise_warnings import DURING
from efficient_attn.studies import find
from efficient_attn.studies.bench.plan import AGAINST
from efficient_attn.studies.bench.versions import (
    FASTER,
    NO_DIFFERENCE,
    SLOWER,
    version_sentences,
)
from efficient_attn.studies.reading import read
from efficient_attn.studies.results import Results

OLD = {AGAINST: "old"}
ROUNDS = 16
SMALL = {"seq_lens": (16, 32), "num_heads": 2, "head_dim": 8, "threads": 1}


def records(label, seconds, *, noise=0.01, seed=0, tokens=256, common=0.0, rounds=ROUNDS, **more):
    """Rounds of one call, each with noise of its own and with noise that all versions of a round share."""
    own, shared = random.Random(f"{label} {seed}"), random.Random(seed)
    times_s = tuple(
        seconds * math.exp(noise * own.gauss(0, 1) + common * shared.gauss(0, 1)) for _ in range(rounds)
    )
    return [Record(case=case("time", label, tokens), times_s=times_s, round_sizes=(1,) * rounds, **more)]


def told(made, environment=OLD):
    (sentence,) = version_sentences(made, environment)
    return sentence


@pytest.mark.parametrize(("factor", "verdict"), [(0.9, FASTER), (1.1, SLOWER), (1.0, NO_DIFFERENCE)])
def test_the_verdict_follows_the_interval_of_the_ratio(factor, verdict):
    made = [*records("old", 1e-3), *records("new", factor * 1e-3)]
    sentence = told(made)
    assert sentence.startswith(f"new against old, speed of old = 1: {verdict}: ") and sentence.endswith(
        " at 256 tokens."
    )


def test_noise_that_both_versions_of_a_round_share_hides_nothing():
    made = [*records("old", 1e-3, common=0.5), *records("new", 0.9e-3, common=0.5)]
    assert told(made).startswith("new against old, speed of old = 1: faster: ")


@pytest.mark.parametrize(
    ("changes", "environment", "reason"),
    [
        ({}, {DURING: [{"others_share": 0.5}]}, "other processes took 50%"),
        ({"waited_s": 0.02}, {}, "threads waited for a processor"),
        ({"rounds": 3}, {}, "fewer than 4 rounds; more --rounds would settle it"),
        ({"noise": 0.5}, {}, "more --rounds would settle it"),
    ],
)
def test_times_that_support_no_verdict_are_called_that_with_what_would_settle_it(
    changes, environment, reason
):
    made = [*records("old", 1e-3, **changes), *records("new", 1e-3, **changes)]
    sentence = told(made, OLD | environment)
    assert "could not tell on this machine now (" in sentence and reason in sentence
    assert FASTER not in sentence and NO_DIFFERENCE not in sentence
    assert Results(made, environment=OLD | environment | {"study": "bench"}).sentences()[-1] == sentence


def test_equal_versions_are_called_different_once_in_a_hundred_times_at_most():
    runs = 400
    alarms = sum(
        not told([*records("old", 1e-3, seed=seed), *records("new", 1e-3, seed=seed)]).startswith(
            f"new against old, speed of old = 1: {NO_DIFFERENCE}"
        )
        for seed in range(runs)
    )
    assert alarms <= runs / 100


def test_waiting_that_cannot_explain_a_ratio_leaves_its_verdict_alone():
    """Two threads waited for 10 % of the time; 1.6 times the speed is more than that explains."""
    old = records("old", 1e-3, waited_s=3.2e-3)
    assert told([*old, *records("new", 6e-4)]).startswith("new against old, speed of old = 1: faster: ")
    assert "could not tell" in told([*old, *records("new", 9.5e-4)])


def test_lengths_with_one_verdict_are_named_together():
    made = [
        one for n in (64, 128) for one in (*records("old", 1e-3, tokens=n), *records("new", 8e-4, tokens=n))
    ]
    made += [*records("old", 1e-3, tokens=256), *records("new", 1e-3, tokens=256)]
    sentence = told(made)
    assert sentence.count(FASTER) == 1 and f"; {NO_DIFFERENCE}: " in sentence


@pytest.mark.parametrize("against", [None, 3, "gone", ["old"]])
def test_a_strangers_environment_compares_nothing(against):
    made = [*records("old", 1e-3), *records("new", 1e-3)]
    assert version_sentences(made, {AGAINST: against}) == []


def test_both_versions_are_timed_in_the_same_rounds_and_exact_attention_is_not():
    plan = find("bench").plan(["window"], against="linformer", seq_lens=(16,), threads=1)
    timed = [point for point in plan.points if point.rounds]
    assert [point.case.label for point in timed] == ["linformer", "window"]
    assert {point.rounds for point in timed} == {ROUNDS} and len({point.group for point in timed}) == 1
    assert plan.about == {AGAINST: "linformer"}


@pytest.mark.slow
def test_two_files_of_one_name_are_two_versions(tmp_path, hasty, undrawn):
    for name, factor in (("one", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        text = (
            f"def attend(q, k, v):\n    for _ in range({factor}):\n        out = v.clone()\n    return out\n"
        )
        (tmp_path / name / "own.py").write_text(text)
    own, other = (f"{tmp_path / name / 'own.py'}:attend" for name in ("one", "other"))
    results = bench([own], against=other, **SMALL, out=tmp_path / "run", rounds=4)
    labels = {record.case.label for record in results.records}
    assert labels == {"own.py:attend", "own.py:attend (against)"}
    assert {record.status for record in results.records} == {"ok"}
    again = read(tmp_path / "run")
    assert again.sentences()[-1].startswith("own.py:attend against own.py:attend (against)")
    environment = json.loads(Path(tmp_path / "run" / "environment.json").read_text())
    assert environment[AGAINST] == "own.py:attend (against)"


def test_a_version_needs_another_one():
    with pytest.raises(OptionError, match="against needs a backend"):
        bench(against="window", **SMALL)


def test_rounds_of_a_run_that_was_cut_short_are_paired_from_the_first():
    whole, short = records("old", 1e-3), records("new", 9e-4)
    short = [replace(one, times_s=one.times_s[:6], round_sizes=(1,) * 6) for one in short]
    assert told([*whole, *short]).startswith("new against old, speed of old = 1: faster: ")
