"""The advice without a model: attention alone on the shipped activations."""

import itertools
import random

import pytest
from study_points import points_of, study
from synthetic_records import case, timed

import efficient_attn as ea
from efficient_attn.measure import worker
from efficient_attn.measure.record import replace
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION
from efficient_attn.runs.results import Results
from efficient_attn.stats.estimates import grouped
from efficient_attn.studies.advise.model import best_layers
from efficient_attn.studies.advise.record import AdviseRecord
from efficient_attn.studies.advise.view import SHAPE

# Studies declare the quantities of their records.
Record = AdviseRecord

SHORT = (64, 96, 128, 160)


@pytest.fixture(autouse=True)
def hurried(monkeypatch, short_decoder, unisolated):
    """Short calls at short lengths, timed as briefly as possible, and a short decoder."""
    monkeypatch.setattr("efficient_attn.runs.engine._ROUND_S", 0.0)
    monkeypatch.setattr("efficient_attn.studies.advise.attention.PROBE", SHORT)
    monkeypatch.setattr("efficient_attn.studies.advise.attention.DRAWS", 1)


def kinds(results):
    """{(kind, label, tokens)} of the records that were measured."""
    return {(one.case.kind, one.case.label, one.case.tokens) for one in results.records if one.status == "ok"}


def test_it_measures_predicts_and_concludes_over_lengths():
    given = {"window": {"window": [3, 257, 129]}}
    request = {"backends": ["exact", "window"], "options": given, "seq_lens": (256, 512), "rounds": 1}
    results = ea.advise(**request, max_error=0.5)
    found, labels = kinds(results), [f"window(window={size})" for size in given["window"]["window"]]
    assert {("error", labels[1], 512), ("error", labels[1], 96), ("time", "exact", 512)} <= found
    encoder, decoder = grouped(results.records, *SHAPE)
    assert {one.case.causal for one in decoder} == {True} and len({one.case.causal for one in encoder}) == 1
    # Times and predictions are those of the heads of the model.
    heads = {(one.case.num_heads, one.case.num_kv_heads) for one in decoder if one.case.kind != "error"}
    assert heads == {(9, 3)}
    predicted = [one for one in encoder if one.case.kind == "prediction"]
    assert {(one.case.label, one.case.tokens) for one in predicted} == set(
        itertools.product(labels[1:], (256, 512))
    )
    for one in predicted:
        assert 0 < one.predicted_speed_low <= one.predicted_speed <= one.predicted_speed_high
    # The nearest backends are timed first. What is no nearer than the mean of the values is not timed, nor,
    # at length, what is predicted to be slower than exact attention.
    slower = {(one.case.label, one.case.tokens) for one in predicted if one.predicted_speed_high < 1}
    for tokens in (SHORT[-1], 512):
        times = [one.case.label for one in encoder if (one.case.kind, one.case.tokens) == ("time", tokens)]
        assert times == ["exact", *(label for label in labels[1:] if (label, tokens) not in slower)]
    # The first model is answered before the second is begun.
    order = list(results.records)
    assert order.index(next(one for one in encoder if one.case.kind == "time")) < order.index(decoder[0])
    sentence, causal = results.sentences()
    assert f"no backend is within 50 % of exact on every layer; nearest: {labels[1]} (error " in sentence
    # A window of the whole sequence is exact.
    assert "is within 50 % of exact on every layer" in causal
    wide = Results(results.records, environment={**results.environment, "options": {"max_error": 2.0}})
    assert f"within 200 % of exact on every layer with {labels[1]} (error " in wide.sentences()[0]


def test_backends_that_are_slower_by_prediction_are_not_timed_at_long_lengths(monkeypatch):
    own = worker.measure

    def fixed(case, **arguments):
        if case.kind != "time":
            return own(case, **arguments)
        factor = 100.0 if case.label == "window" else 1.0
        return Record(case=case, times_s=(factor * 1e-6 * case.tokens,), round_sizes=(1,))

    monkeypatch.setattr(worker, "measure", fixed)
    monkeypatch.setattr("efficient_attn.studies.advise.attention.SOURCES", ("decoder",))
    found = kinds(ea.advise(backends=["exact", "window"], seq_lens=(512, 1024), rounds=1))
    assert {("time", "window", SHORT[-1]), ("prediction", "window", 1024), ("time", "exact", 1024)} <= found
    assert ("time", "window", 1024) not in found


def test_errors_at_shorter_lengths_are_those_of_the_causal_model(short_decoder):
    points = points_of(study("advise", backends=["window"], seq_lens=(64, 128)))
    found = {(one.case.inputs, one.case.tokens) for one in points if one.case.kind == "error"}
    assert found == {
        *((f"encoder(layer={layer})", 512) for layer in (0, 1, 5)),
        ("decoder(layer=19)", short_decoder),
        ("decoder(layer=19)", 64),
    }


def error(backend, tokens, source, layer, value):
    place = case("error", backend, tokens, inputs=f"{source}(layer={layer})", layer=layer, of="output")
    return Record(case=place, output_relative_error=value)


@pytest.mark.parametrize("failed", [("encoder", 512), ("stitched", 2048)])
def test_a_backend_that_failed_somewhere_is_not_within_the_limit_everywhere(failed):
    times = [timed(name, 1024, (time_s,) * 4) for name, time_s in (("exact", 1.0), ("window", 0.5))]
    places = {
        (backend, tokens, source, layer): error(backend, tokens, source, layer, value)
        for backend, value in (("window", 0.05), ("linformer", 0.06))
        for source, tokens in (("encoder", 512), ("stitched", 2048))
        for layer in (0, 1)
    }
    source, tokens = failed
    place = ("window", tokens, source, 1)
    broken = Record(case=places[place].case, status="oom", reason="why not")
    for errors, told in (
        (places, "on every layer with window (error 0.05, speed 2.0× at 1024 tokens), linformer"),
        ({**places, place: broken}, "on every layer with linformer (error 0.06)."),
        ({}, "): nothing measured."),
    ):
        environment = {"study": "advise", "settled": {"candidates": ["exact", "window", "linformer"]}}
        (sentence,) = Results([*errors.values(), *times], environment=environment).sentences()
        assert told in sentence


@pytest.mark.parametrize(
    ("value", "status", "known"), [(0.074, "skipped", False), (0.2, "skipped", True), (0.074, "oom", True)]
)
def test_of_a_backend_skipped_at_a_length_it_is_unknown_whether_it_is_within_the_limit(value, status, known):
    names = (("exact", 1e-7), (UNIFORM_ATTENTION, 0.5), ("window", value))
    errors = [error(name, tokens, "decoder", 19, value) for tokens in (2048, 512) for name, value in names]
    errors[-1] = Record(case=errors[-1].case, status=status, reason="needs 9 s (raise it with --budget)")
    environment = {"study": "advise", "settled": {"candidates": ["exact", "window"]}}
    (sentence,) = Results([*errors, timed("exact", 1024, (1.0,) * 4)], environment=environment).sentences()
    assert ("is not known (skipped at 512)" in sentence) != known
    assert f"nearest: window (error {value:.2g})." in sentence


def test_without_a_timed_call_no_speed_is_shown():
    errors = [error(name, 512, "encoder", 0, value) for name, value in (("exact", 1e-7), ("window", 0.3))]
    skipped = Record(case=timed("exact", 8192, (1.0,)).case, status="skipped", reason="budget")
    (table,) = Results([*errors, skipped], environment={"study": "advise"}).tables()
    assert "speed, exact 1×" in table.columns and {row[2] for row in table.rows} == {"–"}


def test_a_budget_that_ends_with_times_of_exact_attention_alone_draws_what_can_be_compared():
    alone = timed("exact", 256, (1.0,) * 4, causal=True)
    errors = [error(name, 512, "encoder", 0, value) for name, value in (("exact", 1e-7), ("window", 0.3))]
    for records, plots in (([alone], []), ([*errors, timed("exact", 1024, (1.0,) * 4), alone], ["advise"])):
        results = Results(records, environment={"study": "advise"})
        assert list(results.plots()) == plots and all(row for row in results.tables())


TARGET = {"study": "advise", "settled": {"target": {"quantity": "mean_pool_distance", "limit": 0.1}}}
OF_MODEL, HELD_OUT = {"of": "model", "inputs": "m on t"}, {"of": "model", "inputs": "m on t, held out"}
FASTER, SLOWER, OPEN = (0.5,) * 4, (2.0,) * 4, (0.5, 0.9, 0.4, 3.0)
EXACT, OTHER = (1.0, 1.1, 0.9, 1.0), '{"0": "linformer"}'


def of_model(tokens, plan=(), *, layers='{"0": "window"}'):
    """All records at one length; `plan` is empty if there is none."""
    decision = {"attached_layers": '{"format": 1, "layers": {}}', "predicted_speed": 2.0}
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
        (((), SLOWER, ()), "Nothing is faster on this machine: stay with exact"),
        (((), OPEN, ()), "Undecided"),
        ((FASTER[:2], (), ()), "Undecided"),
    ],
)
def test_faster_not_faster_and_undecided_are_three_outcomes_of_a_length(times, begins):
    parts = list(zip((512, 2048, 8192), times, strict=True))
    results = Results([one for part in parts for one in of_model(*part)], environment=TARGET)
    sentence = results.sentences()[0]
    assert sentence.startswith(f"{begins} (cosine, mean pool 0.9000).")
    outcomes = {
        FASTER: "2.0 ± 0.7 times faster, with window in layers 0",
        SLOWER: "2.0 ± 0.7 times slower, with window in layers 0",
        OPEN: "undecided, ",
        (): "no plan; attention takes 67 % of the time, so at most 3.0×",
        FASTER[:2]: "undecided: 2 times faster",
    }
    for tokens, plan in parts:
        assert f"At {tokens} tokens {outcomes[plan]}" in sentence
    assert ("layers.json" in results.files()) == begins.startswith("Faster")


@pytest.mark.parametrize(
    ("records", "told"),
    [
        (of_model(512)[:3], "At 512 tokens not measured to the end"),
        ([swap("exact", status="skipped", reason="why not")], "At 512 tokens not measured to the end"),
        # Other layers were timed than those that were chosen.
        ([*of_model(512, FASTER)[:-1], *of_model(512, FASTER, layers=OTHER)[-1:]], "At 512 tokens not timed"),
        # A bound that is not clearly above one ends a length.
        (
            [*bound(512, (0.5, 1.1, 0.7, 1.2)), swap(UNIFORM_ATTENTION)],
            "no attention makes the model clearly faster; attention takes 12 % of the time",
        ),
    ],
)
def test_a_length_without_a_decision_is_undecided_for_a_reason(records, told):
    (sentence,) = Results(records, environment=TARGET).sentences()
    assert sentence.startswith("Undecided") and told in sentence


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
