"""Advice on a model: outcomes of lengths, and the choice of backends and layers."""

import itertools
import random

import pytest
from synthetic_records import case, timed

from efficient_attn.measure.record import replace
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION
from efficient_attn.runs.results import Results
from efficient_attn.studies.advise.model import best_layers
from efficient_attn.studies.advise.record import AdviseRecord as Record

TARGET = {"study": "advise", "settled": {"target": {"quantity": "mean_pool_distance", "limit": 0.1}}}
OF_MODEL, HELD_OUT = {"of": "model", "inputs": "m on t"}, {"of": "model", "inputs": "m on t, held out"}
FASTER, SLOWER, OPEN = (0.5,) * 4, (2.0,) * 4, (0.5, 0.9, 0.4, 3.0)
EXACT, OTHER = (1.0, 1.1, 0.9, 1.0), '{"0": "linformer"}'


def of_model(tokens, plan=(), *, layers='{"0": "window"}'):
    """All records at one length; `plan` is empty if there is none."""
    decision = {"attached_layers": '{"format": 1, "layers": {}}'}
    decision |= {"chosen_layers": layers, "mean_pool_distance": 0.05} if plan else {"chosen_layers": "{}"}
    made = [
        timed(OWN, tokens, EXACT, **OF_MODEL),
        *bound(tokens, [time_s / 3 for time_s in EXACT]),
        Record(case=case("swap", "window", tokens, **OF_MODEL), mean_pool_distance=0.05),
        Record(case=case("swap", "plan", tokens, options={"layers": layers}, **HELD_OUT), **decision),
    ]
    if not plan:
        return made
    of_plan = timed("plan", tokens, plan, options={"layers": layers}, **HELD_OUT)
    return [*made, timed(OWN, tokens, EXACT, **HELD_OUT), of_plan]


def bound(tokens, mean):
    """Times of a model with its own attention, and with the mean of the values."""
    times = [timed(OWN, tokens, EXACT, **OF_MODEL), timed(UNIFORM_ATTENTION, tokens, mean, **OF_MODEL)]
    return [replace(one, case=replace(one.case, kind="bound")) for one in times]


def swap(label, **fields):
    return Record(case=case("swap", label, 512, **OF_MODEL), **fields)


@pytest.mark.parametrize(
    ("times", "begins"),
    [
        ((FASTER, FASTER, FASTER), "Faster from 512 tokens"),
        ((FASTER, SLOWER, FASTER), "Faster from 8192 tokens"),
        ((FASTER, SLOWER, OPEN), "Faster at 512 tokens only"),
        (((), SLOWER, ()), "Keep exact attention: no plan gains enough on this machine"),
        (((), OPEN, ()), "Undecided"),
        ((FASTER[:2], (), ()), "Undecided"),
    ],
)
def test_faster_not_faster_and_undecided_are_three_outcomes_of_a_length(times, begins):
    parts = list(zip((512, 2048, 8192), times, strict=True))
    results = Results([one for part in parts for one in of_model(*part)], environment=TARGET)
    sentence = results.sentences()[0]
    assert sentence.startswith(f"{begins} (target: mean pool cosine 0.9000).")
    outcomes = {
        FASTER: "2.0 times faster (1.1 to 3.5), with window in layers 0",
        SLOWER: "2.0 times slower (1.2 to 3.5), with window in layers 0",
        OPEN: "~1.6× the speed (interval beyond ×3), not settled, with window in layers 0",
        (): "no plan meets the target; attention takes 67 % of the time, so it gains at most 3.00×",
        FASTER[:2]: "~2.10× the speed, not settled",
    }
    for tokens, plan in parts:
        assert f"At {tokens} tokens: {outcomes[plan]}" in sentence
    # A verified plan is given unless it is shown to be slower.
    given = any(plan not in ((), SLOWER) for plan in times)
    assert ("layers.json" in results.files()) == given == (len(results.sentences()) == 2)
    open_ = given and not begins.startswith("Faster")
    assert ("within the target and not shown to be faster: ea.attach" in results.sentences()[-1]) == open_


@pytest.mark.parametrize(
    ("records", "told"),
    [
        (of_model(512)[:3], "At 512 tokens: the measurement is incomplete"),
        ([swap("exact", status="skipped", reason="why not")], "At 512 tokens: the measurement is incomplete"),
        # Other layers were timed than those that were chosen.
        ([*of_model(512, FASTER)[:-1], *of_model(512, FASTER, layers=OTHER)[-1:]], "the plan was not timed"),
    ],
)
def test_a_length_without_a_decision_is_undecided_for_a_reason(records, told):
    sentence, *_ = Results(records, environment=TARGET).sentences()
    assert sentence.startswith("Undecided") and told in sentence


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ((0.95, 1.04, 0.86, 0.95), "less than 1.1×, 1.05 ± 0.03 times faster: window in layers 0"),
        ((1.0, 1.1, 0.91, 1.0), "less than 1.1×, as fast within 10 % (0.96 to 1.04×): window"),
        ((0.8, 0.88, 0.72, 0.8), "1.25 ± 0 times faster, with window"),
    ],
)
def test_a_plan_that_gains_less_than_a_tenth_is_not_given(times, told):
    results = Results(of_model(512, times), environment=TARGET)
    begins = "the best plan gains " * told.startswith("less")
    assert f"At 512 tokens: {begins}{told}" in results.sentences()[0]
    assert ("layers.json" in results.files()) == told.startswith("1.25")


def test_the_speed_of_heads_that_were_not_timed_is_predicted_from_the_bound():
    layers = '{"0": "window in key heads 0"}'
    plan = Record(
        case=case("swap", "plan", 4096, options={"window": 2048, "layers": layers}, **HELD_OUT),
        **{**FINITE, "copy_recall": 1.0, "copy_recall_exact": 1.0, "copy_recall_error": 0.0},
        **{"streaming_heads": 4, "key_heads": 6, "chosen_layers": layers},
        attached_layers='{"layers": {}}',
    )
    records = [plan, *bound(4096, [time_s / 3 for time_s in EXACT])]
    target = {"quantity": "next_token_kl", "limit": 0.01, "max_loss": 0.01, "min_recall": 0.98}
    results = Results(records, environment={"study": "advise", "settled": {"target": target}})
    # 2/3 of the time is attention, and 4 of 6 heads save (1 − 1/2)² of theirs: 1 / (1 − 1/9).
    assert "~1.1× the speed, predicted, with a sliding window" in results.sentences()[0]
    assert "layers.json" in results.files()


FINITE = {"next_token_kl": 1e-3, "loss_difference": 0.0, "loss_difference_error": 0.0}


@pytest.mark.parametrize(
    ("loss", "missed"),
    [
        ({}, "loss, recall)"),
        ({"next_token_kl": 1e-3}, "loss, recall)"),
        (FINITE, "(recall); attention takes"),
    ],
)
def test_a_plan_of_heads_without_a_finite_loss_or_recall_misses_the_target(loss, missed):
    heads = {"streaming_heads": 2, "key_heads": 6, "chosen_layers": '{"0": "window in key heads 0, 1"}'}
    plan = Record(case=case("swap", "plan", 512, **HELD_OUT), **heads, **loss)
    drawn = Record(case=case("swap", "random heads", 512, **HELD_OUT), **heads)
    target = {"quantity": "next_token_kl", "limit": 0.01, "max_loss": 0.01, "min_recall": 0.98}
    records = [plan, drawn, Record(case=case("planted", "plan", 512, **HELD_OUT), retrieval=0.5)]
    records += bound(512, [time_s / 3 for time_s in EXACT])
    (sentence,) = Results(records, environment={"study": "advise", "settled": {"target": target}}).sentences()
    assert "misses the target on held-out inputs (" in sentence and missed in sentence


def test_the_backend_and_the_layers_that_gain_most_within_the_limit_are_chosen():
    draw = random.Random(0)
    for _ in range(20):
        losses = {layer: {name: draw.random() for name in "abc"} for layer in range(4)}
        gains_s, limit = {name: draw.random() for name in "ab"}, draw.random() * 2
        chosen = best_layers(losses, {"a": 9.0, "b": 9.0}, gains_s, limit)
        assert sum(losses[layer][name] for layer, name in chosen.items()) <= limit
        most = max(
            gain_s * len(layers)
            for name, gain_s in gains_s.items()
            for count in range(5)
            for layers in itertools.combinations(losses, count)
            if sum(losses[layer][name] for layer in layers) <= limit
        )
        assert sum(gains_s[name] for name in chosen.values()) == pytest.approx(most)
        whole = best_layers(losses, {"a": 0.0, "b": limit + 1}, {"a": 9.0, "b": 1.0}, limit)
        assert whole == dict.fromkeys(losses, "a")
