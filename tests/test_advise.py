"""The advice without a model: attention alone on the shipped activations."""

import itertools
import random
import re

import pytest
from planned import points_of

import efficient_attn as ea
from efficient_attn.errors import OptionError
from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION
from efficient_attn.studies import find
from efficient_attn.studies.advise.model import best_layers
from efficient_attn.studies.advise.outcomes import in_ranges
from efficient_attn.studies.advise.view import _by_shape
from efficient_attn.studies.bench.plan import MAX_ERROR
from efficient_attn.studies.results import Results

SHORT = (64, 96, 128, 160)


@pytest.fixture(autouse=True)
def hurried(monkeypatch, short_decoder, unisolated):
    """Short calls at short lengths, timed as briefly as possible, and a short decoder."""
    monkeypatch.setattr("efficient_attn.studies.engine._ROUND_S", 0.0)
    monkeypatch.setattr("efficient_attn.studies.advise.attention.PROBE", SHORT)
    monkeypatch.setattr("efficient_attn.studies.advise.attention.DRAWS", 1)
    monkeypatch.setattr("efficient_attn.measure.isolation.DEFAULT_ISOLATION", "none")


def advise(*backends, **changes):
    given = {"seq_lens": (512, 1024), **changes}
    return ea.advise(backends=list(backends), **given)


def kinds(results):
    """{(kind, label, tokens)} of the records that were measured."""
    return {(one.case.kind, one.case.label, one.case.tokens) for one in results.records if one.status == "ok"}


def test_it_measures_predicts_and_concludes_over_lengths():
    given = {"window": {"window": [3, 257, 129]}}
    results = advise("exact", "window", options=given, seq_lens=(512, 1024), max_error=0.5)
    found, labels = kinds(results), [f"window(window={size})" for size in given["window"]["window"]]
    assert {("error", labels[1], 512), ("error", labels[1], 96), ("time", "exact", 1024)} <= found
    encoder, decoder = _by_shape(results.records)
    assert {one.case.causal for one in decoder} == {True} and len({one.case.causal for one in encoder}) == 1
    # Times and predictions are those of the heads of the model.
    heads = {(one.case.num_heads, one.case.num_kv_heads) for one in decoder if one.case.kind != "error"}
    assert heads == {(9, 3)}
    predicted = [one for one in encoder if one.case.kind == "prediction"]
    assert {(one.case.label, one.case.tokens) for one in predicted} == set(
        itertools.product(labels[1:], (512, 1024))
    )
    for one in predicted:
        assert 0 < one.predicted_speed_low <= one.predicted_speed <= one.predicted_speed_high
    # The nearest backends are timed first. What is no nearer than the mean of the values is not timed, nor,
    # at length, what is predicted to be slower than exact attention.
    slower = {(one.case.label, one.case.tokens) for one in predicted if one.predicted_speed_high < 1}
    for tokens in (SHORT[-1], 1024):
        timed = [one.case.label for one in encoder if (one.case.kind, one.case.tokens) == ("time", tokens)]
        assert timed == ["exact", *(label for label in labels[1:] if (label, tokens) not in slower)]
    sentence, causal = results.sentences()
    for part in ("12 heads of 32", "at 512 tokens (encoder)", "50 %", f"{labels[1]} (error 0."):
        assert part in sentence
    assert "nothing but exact is within" in sentence
    # A window of the whole sequence is exact.
    assert (
        "9 heads of 64" in causal and "causal), at 96 tokens (causal decoder): within 50 % of exact" in causal
    )
    shorter = [
        replace(one, case=replace(one.case, tokens=tokens))
        for one, tokens in itertools.product(decoder, (48, 72))
        if one.case.kind == "error"
    ]
    assert "at 48, 72 and 96 tokens (causal decoder):" in " ".join(
        Results([*results.records, *shorter], environment=results.environment).sentences()
    )
    wide = Results(results.records, environment={**results.environment, MAX_ERROR: 2.0})
    assert f"within 200 % of exact on every layer: {labels[1]} (error" in wide.sentences()[0]


def test_backends_that_are_slower_by_prediction_are_not_timed_at_long_lengths(monkeypatch):
    from efficient_attn.measure import worker

    own = worker.measure

    def fixed(case, **arguments):
        made = own(case, **arguments)
        if case.kind != "time":
            return made
        factor = 100.0 if case.label == "window" else 1.0
        return Record(case=case, times_s=(factor * 1e-6 * case.tokens,), round_sizes=(1,))

    monkeypatch.setattr(worker, "measure", fixed)
    found = kinds(advise("exact", "window"))
    assert ("time", "window", SHORT[-1]) in found
    assert ("prediction", "window", 1024) in found
    assert ("time", "window", 1024) not in found
    assert ("time", "exact", 1024) in found


def test_errors_at_shorter_lengths_are_those_of_the_causal_model(short_decoder):
    points = points_of(find("advise").plan(backends=["window"], seq_lens=(64, 128)))
    found = {(one.case.inputs, one.case.tokens) for one in points if one.case.kind == "error"}
    assert found == {
        *((f"encoder(layer={layer})", 512) for layer in (0, 1, 5)),
        ("decoder(layer=19)", short_decoder),
        ("decoder(layer=19)", 64),
    }


WITHOUT, WITH = "has no effect without a model", "has no effect with this model"
REFUSED = [
    (None, {"max_error": 0.0}, "max_error is a finite number"),
    (None, {"texts": ["a"]}, f"texts {WITHOUT}"),
    (None, {"min_cosine": 0.99}, f"min_cosine {WITHOUT}"),
    (None, {"max_kl": 0.05}, f"max_kl {WITHOUT}"),
    (None, {"name": "m"}, f"name {WITHOUT}"),
    ("models.py:make_same", {"seq_lens": (512, 2048, 8192)}, f"seq_lens {WITH}"),
    ("models.py:make_same", {"max_kl": 0.05}, f"max_kl {WITH}"),
    ("models.py:make_same", {"texts": {"a": "b"}}, f"texts {WITH}"),
    ("models.py:make_same", {"dtype": "float32"}, f"dtype {WITH}, which"),
    ("models.py:make_same", {"device": "auto"}, f"device {WITH}, which"),
    ("models.py:make_same", {"min_cosine": 99.0}, "min_cosine is a number from 0 to 1, not 99.0"),
    ("models.py:make_same", {"max_kl": float("nan")}, "max_kl is a number from 0 to 1000, not nan"),
    ("models.py:make_same", {"max_error": 0.1}, f"max_error {WITH}; .*--min-cosine.*--max-kl"),
]


@pytest.mark.parametrize(("model", "options", "message"), REFUSED)
def test_options_without_effect_and_limits_out_of_range_are_refused(model, options, message, called_models):
    with pytest.raises(OptionError, match=message):
        ea.advise(model, **options)


SIZES = {"num_heads": 4, "head_dim": 8, "dtype": "float32", "device": "cpu", "threads": 1}


def record(kind, backend, tokens, status="ok", *, values=None, **changes):
    made = Case(kind=kind, backend=backend, label=backend, tokens=tokens, **{**SIZES, **changes})
    return Record(case=made, status=status, **(values or {}) if status == "ok" else {"reason": "why not"})


def of_attention(backend, tokens, source, errors, status="ok"):
    return [
        record(
            "error",
            backend,
            tokens,
            status,
            values={"output_relative_error": error},
            inputs=f"{source}(layer={layer})",
            layer=layer,
            of="output",
        )
        for layer, error in enumerate(errors)
    ]


def timed(backend, tokens, times_s, **changes):
    values = {"times_s": tuple(times_s), "round_sizes": (1,) * len(times_s)}
    return record("time", backend, tokens, values=values, **changes)


@pytest.mark.parametrize("failed", [("encoder", 512), ("stitched", 2048)])
def test_a_backend_that_failed_somewhere_is_not_within_the_limit_everywhere(failed):
    times = [timed(name, 1024, (time_s,) * 4) for name, time_s in (("exact", 1.0), ("window", 0.5))]
    errors = [
        one
        for backend, error in (("window", 0.05), ("linformer", 0.06))
        for source, tokens in (("encoder", 512), ("stitched", 2048))
        for one in of_attention(backend, tokens, source, (error, error))
    ]
    broken = ("window", *failed, 1)
    kept = [
        record("error", "window", failed[1], "oom", of="output", layer=1, inputs=one.case.inputs)
        if (one.case.backend, one.case.inputs.partition("(")[0], one.case.tokens, one.case.layer) == broken
        else one
        for one in errors
    ]
    environment = {"study": "advise", "candidates": ["exact", "window", "linformer"]}
    (sentence,) = Results([*errors, *times], environment=environment).sentences()
    assert "on every layer: window (error" in sentence
    (sentence,) = Results([*kept, *times], environment=environment).sentences()
    assert "on every layer: linformer (error" in sentence
    (sentence,) = Results(times, environment=environment).sentences()
    assert "at no length: no error was measured." in sentence and "nothing but exact" not in sentence


TARGET = {"study": "advise", "target": {"quantity": "mean_pool_distance", "limit": 0.1}}
ATTACHED = '{"format": 1, "layers": {}}'


def of_model(tokens, own, plan=(), *, layers='{"0": "window"}', attached=ATTACHED, loss=0.05):
    """All records at one length; `plan` is empty if there is none."""
    shared, held_out = {"of": "model", "inputs": "m on t"}, {"of": "model", "inputs": "m on t, held out"}
    decision = {
        "mean_pool_distance": loss if plan else None,
        "chosen_layers": layers if plan else "{}",
        "attached_layers": attached,
        "predicted_speed": 2.0,
        "calibrated_on": "the first text",
    }
    made = [
        timed(OWN, tokens, own, **shared),
        *bound(tokens, own, [time_s / 3 for time_s in own]),
        record("swap", "window", tokens, values={"mean_pool_distance": 0.05}, **shared),
        record("swap", "plan", tokens, values=decision, options={"layers": layers}, **held_out),
    ]
    if not plan:
        return made
    of_plan = timed("plan", tokens, plan, options={"layers": layers}, **held_out)
    return [*made, timed(OWN, tokens, own, **held_out), of_plan]


def bound(tokens, own, mean):
    """Times of a model with its own attention, and with the mean of the values."""
    shared = {"of": "model", "inputs": "m on t"}
    times = [timed(OWN, tokens, own, **shared), timed(UNIFORM_ATTENTION, tokens, mean, **shared)]
    return [replace(one, case=replace(one.case, kind="bound")) for one in times]


FASTER, SLOWER, OPEN = (0.5,) * 4, (2.0,) * 4, (0.5, 0.9, 0.4, 3.0)
EXACT = (1.0, 1.1, 0.9, 1.0)


@pytest.mark.parametrize(
    ("times", "begins"),
    [
        ((FASTER, FASTER, FASTER), "Faster from 512 tokens"),
        ((SLOWER, FASTER, FASTER), "Faster from 2048 tokens"),
        ((FASTER, SLOWER, FASTER), "Faster from 8192 tokens"),
        ((FASTER, SLOWER, ()), "Faster at 512 tokens only"),
        ((FASTER, SLOWER, OPEN), "Faster at 512 tokens only"),
        (((), SLOWER, ()), "Nothing is faster on this machine: stay with exact"),
        (((), OPEN, ()), "Nothing is known to be faster"),
        ((FASTER[:2], (), ()), "Nothing is known to be faster"),
    ],
)
def test_faster_not_faster_and_undecided_are_three_outcomes_of_a_length(times, begins):
    parts = list(zip((512, 2048, 8192), times, strict=True))
    results = Results(
        [one for tokens, plan in parts for one in of_model(tokens, EXACT, plan)], environment=TARGET
    )
    sentence = results.sentences()[0]
    assert sentence.startswith(f"{begins} (cosine, mean pool 0.9000).")
    outcomes = {
        FASTER: "2.00x (1.43 to 2.80) as fast, cosine",
        SLOWER: "0.5x (0.357 to 0.701) as fast, cosine",
        OPEN: "undecided: ",
        (): "no plan; attention takes 67% of the time, so at most 3.00x; nearest: window in all layers",
        FASTER[:2]: "undecided: 2.10x as fast",
    }
    for tokens, plan in parts:
        assert f"At {tokens} tokens {outcomes[plan]}" in sentence
    assert ("layers.json" in results.files()) == begins.startswith("Faster")
    assert all("; efficient_attn.calibrate(model, **batch)" in code for code in results.sentences()[1:])


def test_a_length_without_a_decision_is_undecided():
    whole = of_model(512, EXACT)
    for records in (whole[:3], [record("swap", "exact", 512, "skipped", of="model", inputs="m on t")]):
        (sentence,) = Results(records, environment=TARGET).sentences()
        assert sentence.startswith("Nothing is known to be faster")
        assert "At 512 tokens not measured to the end" in sentence


def test_a_bound_that_is_not_clearly_above_one_ends_a_length_and_is_said_with_its_interval():
    records = [*bound(512, EXACT, (0.5, 1.1, 0.7, 1.2)), record("swap", UNIFORM_ATTENTION, 512, of="model")]
    (sentence,) = Results(records, environment=TARGET).sentences()
    assert sentence.startswith("Nothing is known to be faster")
    shown = r"no attention is clearly faster; attention takes 1\d% of the time, so at most 1.1\dx \(0"
    assert re.search(shown, sentence)


def test_times_of_another_plan_decide_nothing():
    *records, last = of_model(512, EXACT, FASTER)
    other = replace(last, case=replace(last.case, options={"layers": '{"0": "linformer"}'}))
    (sentence,) = Results([*records, other], environment=TARGET).sentences()
    assert "At 512 tokens not timed, cosine, mean pool 0.9500" in sentence


def test_the_choice_of_layers_gains_most_within_the_limit():
    draw = random.Random(0)
    for _ in range(20):
        losses = {layer: {name: draw.random() for name in "abc"} for layer in range(4)}
        gains_s = {name: draw.random() for name in "ab"}
        limit = draw.random() * 2
        chosen = best_layers(losses, gains_s, limit)
        spent = sum(losses[layer][name] for layer, name in chosen.items())
        assert spent <= limit and "c" not in chosen.values()
        gained = sum(gains_s[name] for name in chosen.values())
        # Losses are rounded up to parts of the limit.
        assert gained >= best_by_trial(losses, gains_s, 0.97 * limit)


def best_by_trial(losses, gains_s, limit):
    best = 0.0
    for names in itertools.product((None, *gains_s), repeat=len(losses)):
        kept = [(layer, name) for layer, name in zip(losses, names, strict=True) if name]
        if sum(losses[layer][name] for layer, name in kept) <= limit:
            best = max(best, sum(gains_s[name] for _, name in kept))
    return best


def test_layers_are_shown_as_ranges():
    assert (
        in_ranges({0: "window", 2: "window", 3: "window", 1: "linformer"})
        == "window in layers 0, 2–3 and linformer in layer 1"
    )
    assert in_ranges({}) == ""
