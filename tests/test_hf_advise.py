"""The advice for a model: tiny, random, made here; its times are given."""

import json
import signal

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5", reason="the extra [hf] is not installed")

from hf_models import bert, gpt2, saved, texts

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError, UnsupportedError
from efficient_attn.integrations.transformers import attach, load
from efficient_attn.measure.outputs import cosine_distance
from efficient_attn.runner.record import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES, OWN
from efficient_attn.stats.predicted_time import Predicted
from efficient_attn.studies.advise.findings import Findings
from efficient_attn.studies.advise.model_view import LAYERS
from efficient_attn.studies.swap import measure

TOKENS = 24

# Seconds of one forward pass, by backend.
TIMES_S = {OWN: 1.0, "exact": 1.0, MEAN_OF_VALUES: 0.25, "window": 0.4, "linformer": 1.6, "plan": 0.5}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return saved(bert(), tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return saved(gpt2(), tmp_path_factory.mktemp("decoder"))


@pytest.fixture(autouse=True)
def given_times(monkeypatch):
    """Times of the model as in TIMES_S on an idle machine; no calls of attention alone, so no prediction."""

    def time(case, variant, subject, *, seconds):
        return Record(case=case, times_s=(TIMES_S[case.backend],), round_sizes=(1,))

    monkeypatch.setattr(measure, "cost", time)
    monkeypatch.setattr("efficient_attn.studies.advise.conversion.PROBE", ())
    monkeypatch.setattr("efficient_attn.studies.run.between", lambda *moments, **named: {})


def advise(model, **changes):
    given = {
        "backends": ["window", "linformer"],
        "options": {"window": {"window": [5, 15]}, "linformer": {"rank": [12]}},
        "texts": texts(4),
        "seq_lens": (TOKENS,),
        **changes,
    }
    return ea.advise(model, **given)


def labels(results, kind):
    return {one.case.label for one in results.records if one.case.kind == kind and one.status == "ok"}


def test_the_plan_is_within_the_target_faster_and_told_with_its_layers(encoder):
    results = advise(encoder, min_cosine=0.9)
    (sentence, code) = results.sentences()
    assert sentence.startswith(f"From {TOKENS} tokens: 2.00x as fast at {TOKENS} tokens, cosine, mean pool")
    assert "window(window=" in sentence and "in layers 0–2" in sentence
    assert f'attach(model, "{LAYERS}")' in code


def test_the_fastest_by_prediction_is_tried_first(encoder, monkeypatch):
    speeds = {"linformer(rank=12)": 3.0, "window(window=15)": 2.0, "window(window=5)": 1.5}
    predicted = {label: Predicted(value, value, value) for label, value in speeds.items()}
    monkeypatch.setattr(Findings, "speed", lambda self, label, tokens: predicted.get(label))
    results = advise(encoder, min_cosine=0.9)
    cases = [one.case for one in results.records if one.case.kind == "swap" and one.case.layer is None]
    assert [case.label for case in cases if case.label in speeds] == list(speeds)


def test_slower_backends_are_not_tried_layer_by_layer(encoder):
    results = advise(encoder, min_cosine=0.9)
    alone = {one.case.label for one in results.records if one.case.layer is not None}
    assert alone == {"window(window=5)", "window(window=15)"}


def test_layers_that_lose_too_much_stay_exact(encoder):
    whole = advise(encoder, min_cosine=0.0)
    alone = {
        (one.case.label, one.case.layer): one.mean_pool_distance
        for one in whole.records
        if one.case.layer is not None
    }
    wide = sorted(value for (label, _), value in alone.items() if label == "window(window=15)")
    # Room for two of the three layers with the wider window.
    limit = 1.02 * (wide[0] + wide[1])
    results = advise(encoder, min_cosine=1 - limit, backends=["window"], options={"window": {"window": [15]}})
    (plan,) = (one for one in results.records if one.case.label == "plan" and one.case.kind == "swap")
    assert 1 <= len(json.loads(plan.chosen_layers)) <= 2


def test_the_attached_plan_reproduces_the_verified_cosine(encoder, tmp_path):
    results = advise(encoder, min_cosine=0.9, out=tmp_path / "run")
    (plan,) = (one for one in results.records if one.case.label == "plan" and one.case.kind == "swap")
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    # Every second text verifies.
    held_out = list(texts(4).values())[1::2]
    own = transformers.AutoModel.from_pretrained(encoder).eval()
    model = attach(transformers.AutoModel.from_pretrained(encoder).eval(), tmp_path / "run" / LAYERS)
    loaded = load(encoder, plan=tmp_path / "run" / LAYERS).eval()
    distances = []
    for text in held_out:
        ids = tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            exact, changed = (one(input_ids=ids).last_hidden_state[0].double() for one in (own, model))
            logits, wanted = loaded(input_ids=ids), model(input_ids=ids)
        distances.append(cosine_distance(changed.mean(dim=0), exact.mean(dim=0)))
        hidden = loaded.base_model(input_ids=ids).last_hidden_state
        torch.testing.assert_close(hidden, wanted.last_hidden_state, rtol=1e-5, atol=1e-5)
        assert logits is not None
    assert sum(distances) / len(distances) == pytest.approx(plan.mean_pool_distance, abs=1e-6)


def test_without_a_plan_exact_attention_stays_and_the_reason_is_given(encoder):
    results = advise(encoder, min_cosine=1.0)
    (sentence,) = results.sentences()
    assert sentence.startswith(f"Nothing is faster on this machine up to {TOKENS} tokens at cosine")
    assert "attention takes 75% of the time" in sentence and "more than 4.00x as fast" in sentence
    assert "nearest: " in sentence and LAYERS not in results.files()


def test_under_load_the_plan_is_named_and_its_speed_left_open(encoder, monkeypatch):
    monkeypatch.setattr("efficient_attn.studies.run.between", lambda *moments, **named: {"others_share": 0.5})
    results = advise(encoder, min_cosine=0.9)
    (sentence, _) = results.sentences()
    assert (
        sentence.startswith("Within the target: at 24 tokens")
        and "could not tell on this machine" in sentence
    )
    assert "as fast" not in sentence and LAYERS in results.files()
    (sentence,) = advise(encoder, min_cosine=1.0).sentences()
    assert sentence.startswith("No plan up to 24 tokens") and "could not tell on this machine" in sentence


def test_a_causal_model_is_judged_by_its_next_tokens(decoder):
    results = advise(decoder, backends=["window"], options={"window": {"window": [5, 15]}}, max_kl=10.0)
    (sentence, _) = results.sentences()
    assert "divergence of the next token, nats" in sentence and "2.00x as fast" in sentence


def test_the_texts_of_the_choice_do_not_verify(encoder):
    results = advise(encoder, min_cosine=0.9)
    inputs = {one.case.inputs for one in results.records if one.case.label in ("plan", "plan 1")}
    assert len(inputs) == 2 and any(one.endswith(", held out") for one in inputs)


def test_lengths_that_model_or_texts_lack_are_named(encoder):
    results = advise(encoder, seq_lens=(TOKENS, 36, 60, 100), min_cosine=0.9)
    text = " ".join(results.notes)
    assert "Not measured at 60 tokens: 0 of 4 texts are that long" in text
    assert "Not measured at 100 tokens: the model has 64 positions" in text
    assert "Lengths measured: 24, 36." in results.sentences()[0]
    with pytest.raises(DataError, match="No length can be measured"):
        advise(encoder, seq_lens=(60,))


def test_an_interrupted_advice_resumes_and_ends_as_if_never_interrupted(encoder, tmp_path, monkeypatch):
    whole = advise(encoder, min_cosine=0.9)
    real, calls = measure.distance, []

    def interrupted(*arguments, **named):
        calls.append(1)
        if len(calls) == 6:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(measure, "distance", interrupted)
        stopped = advise(encoder, min_cosine=0.9, out=tmp_path)
    assert stopped.interrupted and stopped.notes[0].startswith("Not tried: ")
    ended = advise(encoder, min_cosine=0.9, out=tmp_path, resume=True)
    for kind in ("swap", "time"):
        assert labels(ended, kind) == labels(whole, kind)
    assert ended.sentences() == whole.sentences()
    assert ended.files() == whole.files()


def test_a_plan_of_another_model_or_none_is_refused(encoder, tmp_path):
    file = tmp_path / "layers.json"
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    for text, message in (
        ("{", "Cannot read the plan"),
        ('{"format": 7}', "not a plan of format 1"),
        ('{"format": 1, "layers": {}}', "belong to another model"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            attach(model, file)
    with pytest.raises(DataError, match="Cannot read the plan"):
        attach(model, tmp_path / "missing.json")
    with pytest.raises(OptionError, match=r"window=…: the file .* names the backend of every layer itself"):
        attach(model, tmp_path / "layers.json", window=5)


def test_a_causal_model_without_a_head_is_refused(tmp_path):
    folder = saved(gpt2().transformer, tmp_path / "body")
    with pytest.raises(UnsupportedError, match="an encoder, or a decoder with a language-model head"):
        advise(folder)
