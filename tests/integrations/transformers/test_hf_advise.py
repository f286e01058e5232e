"""The advice for a model: tiny, random, made here; its times are given."""

import json
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_advice import TIMES_S, advise, plans
from integrations.hf_models import TOKENS, gemma3, gpt2, mistral, saved, texts

from efficient_attn.errors import DataError, OptionError, UnsupportedError
from efficient_attn.integrations.transformers import attach
from efficient_attn.measure.error import cosine_distance
from efficient_attn.measure.record import Record, replace
from efficient_attn.stats.predicted_time import Predicted
from efficient_attn.studies import find
from efficient_attn.studies.advise.outcomes import LAYERS
from efficient_attn.studies.advise.plan import LOSSLESS, SLIDING
from efficient_attn.studies.progress import Durations
from efficient_attn.studies.swap import measure

pytestmark = pytest.mark.usefixtures("given_times")


def test_the_plan_is_within_the_target_faster_and_told_with_its_layers(advised):
    (sentence, code) = advised.sentences()
    assert sentence.startswith(
        f"Faster from {TOKENS} tokens (cosine, mean pool 0.9000). At {TOKENS} tokens 2.00x"
    )
    assert "window(window=" in sentence and "in layers 0–2" in sentence
    assert f'attach(model, "{LAYERS}")' in code
    # Slower backends are not tried layer by layer.
    alone = {one.case.label for one in advised.records if one.case.layer is not None}
    assert alone == {"window(window=5)", "window(window=15)"}
    # The texts of the choice do not verify.
    inputs = {one.case.inputs for one in advised.records if one.case.label in ("plan", "plan 1")}
    assert len(inputs) == 2 and any(name.endswith(", held out") for name in inputs)


def test_the_fastest_by_prediction_is_tried_first(encoder, monkeypatch):
    speeds = {"linformer(rank=12)": 3.0, "window(window=15)": 2.0, "window(window=5)": 1.5}
    unknown = Predicted(None, None, None)
    predicted = {label: Predicted(value, value, value) for label, value in speeds.items()}
    models = {
        label: SimpleNamespace(speed=lambda exact, tokens, label=label: predicted.get(label, unknown))
        for label in ("exact", *speeds)
    }
    monkeypatch.setattr("efficient_attn.studies.advise.model.time_models", lambda *arguments: models)
    monkeypatch.setattr("efficient_attn.studies.advise.model.PROBE", (1,))
    results = advise(encoder, min_cosine=0.9)
    cases = [one.case for one in results.records if one.case.kind == "swap" and one.case.layer is None]
    assert [case.label for case in cases if case.label in speeds] == list(speeds)


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


def test_the_attached_plan_reproduces_the_verified_cosine(encoder, advised, tmp_path):
    (tmp_path / LAYERS).write_text(advised.files()[LAYERS])
    (plan,) = (one for one in advised.records if one.case.label == "plan" and one.case.kind == "swap")
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    # Every second text verifies.
    held_out = list(texts(4).values())[1::2]
    own = transformers.AutoModel.from_pretrained(encoder).eval()
    model = attach(transformers.AutoModel.from_pretrained(encoder).eval(), tmp_path / LAYERS)
    distances = []
    for text in held_out:
        ids = tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            exact, changed = (one(input_ids=ids).last_hidden_state[0].double() for one in (own, model))
        distances.append(cosine_distance(changed.mean(dim=0), exact.mean(dim=0)))
    assert sum(distances) / len(distances) == pytest.approx(plan.mean_pool_distance, abs=1e-6)


def test_without_a_plan_exact_attention_stays_and_the_reason_is_given(encoder):
    results = advise(encoder, min_cosine=1.0)
    (sentence,) = results.sentences()
    assert sentence.startswith("Nothing is faster on this machine: stay with exact (cosine, mean pool 1.0")
    assert "no plan; attention takes 75% of the time, so at most 4.00x; nearest: " in sentence
    assert LAYERS not in results.files()


def test_a_causal_model_is_judged_by_its_next_tokens(decoder):
    results = advise(decoder, backends=["window"], options={"window": {"window": [5, 15]}}, max_kl=10.0)
    (sentence, _) = results.sentences()
    assert "divergence of the next token, nats" in sentence and "2.00x as fast" in sentence


def test_lengths_that_model_or_texts_lack_are_named(encoder):
    results = advise(encoder, seq_lens=(TOKENS, 36, 60, 100), min_cosine=0.9)
    text = " ".join(results.notes)
    assert "Not measured at 60 tokens: 0 of 4 texts are that long" in text
    assert "Not measured at 100 tokens: the model has 64 positions" in text
    assert "At 36 tokens 2.00x as fast" in results.sentences()[0]
    with pytest.raises(DataError, match="No length can be measured"):
        advise(encoder, seq_lens=(60,))


def test_a_plan_keeps_the_random_features_that_its_layers_had_alone(encoder):
    own = {"performer-positive": {"seed": [7]}}
    results = advise(encoder, min_cosine=0.0, backends=list(own), options=own)
    distances = {
        (one.case.label, one.case.inputs): one.mean_pool_distance
        for one in results.records
        if one.case.kind == "swap" and one.case.layer is None
    }
    (inputs,) = {inputs for _, inputs in distances if not inputs.endswith("held out")}
    label = "performer-positive(seed=7)"
    assert plans(results)["plan 1"] == json.dumps(dict.fromkeys(map(str, range(3)), label))
    assert distances["plan 1", inputs] == distances[label, inputs]


def test_a_backend_without_a_name_is_planned_as_a_mapping_and_a_failure_of_a_plan_is_a_record(
    encoder, monkeypatch
):
    def mine(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    monkeypatch.setitem(TIMES_S, "mine", 0.4)
    results = advise(encoder, min_cosine=0.1, backends=[mine], options=None)
    assert LAYERS not in results.files()
    sentence, code = results.sentences()
    assert "with mine in layers 0–2" in sentence and "attach(model, {layer: (backend, options), …})" in code

    def broken(*arguments, **named):
        raise RuntimeError("no memory for this plan")

    monkeypatch.setattr("efficient_attn.studies.swap.model.TextSubject.plan", broken)
    results = advise(encoder, min_cosine=0.9)
    failed = [one.case.label for one in results.records if "no memory for this plan" in (one.reason or "")]
    assert failed == ["plan 1"] and not results.files()
    assert "At 24 tokens not measured to the end" in results.sentences()[0]


def test_the_target_of_another_kind_of_model_is_refused(encoder, decoder):
    # A value that is the default as well.
    with pytest.raises(OptionError, match=r"max_kl .*; its target is min_cosine \(--min-cosine\)"):
        advise(encoder, max_kl=0.05)
    with pytest.raises(OptionError, match=r"min_cosine .*; its target is max_kl \(--max-kl\)"):
        advise(decoder, min_cosine=0.99)


def test_a_target_below_all_losses_divides_by_nothing(decoder):
    (sentence,) = advise(decoder, max_kl=1e-320, backends=["performer-positive"], options=None).sentences()
    assert "stay with exact" in sentence


def test_equal_texts_are_not_held_out_from_themselves(encoder):
    (text, other, *_) = texts(4).values()
    with pytest.raises(DataError, match="1 of 2 texts are that long and differ"):
        advise(encoder, texts=[text, f"{text} {other}"])


def test_a_failed_backend_is_measured_once(encoder, monkeypatch):
    real = measure.distance

    def failing(case, *arguments, **named):
        if case.backend == "linformer":
            return Record(case=case, status="error", reason="broken")
        return real(case, *arguments, **named)

    monkeypatch.setattr(measure, "distance", failing)
    results = advise(encoder, min_cosine=0.9)
    assert [one.case.kind for one in results.records if one.case.backend == "linformer"] == ["swap"]


def test_a_uniform_window_and_score_matrices_are_no_candidates_for_a_plan(decoder):
    plan = find("advise").plan(decoder, texts=texts(4), seq_lens=(TOKENS,))
    candidates = plan.about["candidates"]
    assert "window" in candidates and not any("global_tokens" in name for name in candidates)
    assert "exact-dense" not in candidates
    asked = find("advise").plan(
        decoder, ["window"], texts=texts(4), seq_lens=(TOKENS,), options={"window": {"global_tokens": [4]}}
    )
    assert "window(global_tokens=4)" in asked.about["candidates"]


def test_a_causal_model_without_a_head_is_refused(tmp_path):
    folder = saved(gpt2().transformer, tmp_path / "body")
    with pytest.raises(UnsupportedError, match="an encoder, or a decoder with a language-model head"):
        advise(folder)


@pytest.mark.parametrize(("make", "layers"), [(gemma3, "0–1"), (mistral, "0–2")])
def test_sliding_layers_are_windows_first_and_a_plan_that_loses_nothing(make, layers, tmp_path):
    folder = saved(make(), tmp_path / "model")
    results = advise(folder, backends=["performer-positive"], options=None, max_kl=1e-9)
    swaps = [one for one in results.records if one.case.kind == "swap"]
    assert swaps[0] is results.records[0] and swaps[0].case.label == LOSSLESS
    assert 0 <= swaps[0].next_token_kl < 1e-9
    (sentence, _) = results.sentences()
    assert (
        f"2.00x as fast, divergence of the next token, nats 0, with sliding window in layers {layers}"
        in sentence
    )
    assert "windows in its sliding layers alone 2.50x" in sentence
    ids = torch.arange(20)[None]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    (tmp_path / LAYERS).write_text(results.files()[LAYERS])
    with torch.no_grad():
        exact = model(ids).logits
        torch.testing.assert_close(attach(model, tmp_path / LAYERS)(ids).logits, exact)


def test_further_gains_are_those_over_windows_in_sliding_layers(tmp_path, monkeypatch):
    folder = saved(gemma3(), tmp_path / "model")
    monkeypatch.setitem(TIMES_S, "window", 0.6)
    results = advise(folder, backends=["performer-positive"], options=None, max_kl=100.0)
    plan = {"0": SLIDING, "1": SLIDING, "2": "performer-positive"}
    assert plans(results) == {label: json.dumps(plan) for label in ("plan 1", "plan")}
    # A budget that ends before any of that leaves the windows.
    real, backend = Durations.next_s, "performer-positive"

    def late(self, point):
        return 1e9 if point.case.backend == backend and not point.rounds else real(self, point)

    with monkeypatch.context() as patched:
        patched.setattr(Durations, "next_s", late)
        short = advise(folder, backends=["performer-positive"], options=None, max_kl=100.0, budget_s=60.0)
    assert "1.67x as fast, divergence of the next token, nats 0, with sliding window" in short.sentences()[0]
    # Slower than the windows, if faster than the model.
    monkeypatch.setitem(TIMES_S, "performer-positive", 0.8)
    results = advise(folder, backends=["performer-positive"], options=None, max_kl=100.0)
    assert plans(results) == {"plan": json.dumps({"0": SLIDING, "1": SLIDING})}


def test_windows_that_compute_otherwise_are_in_no_plan(tmp_path, monkeypatch):
    real = measure.distance

    def unequal(case, *arguments, **named):
        record = real(case, *arguments, **named)
        return replace(record, next_token_kl=1e-3) if case.label == LOSSLESS else record

    monkeypatch.setattr(measure, "distance", unequal)
    folder = saved(gemma3(), tmp_path / "model")
    results = advise(folder, backends=["performer-positive"], options=None, max_kl=100.0)
    assert plans(results) == {label: json.dumps({"2": "performer-positive"}) for label in ("plan 1", "plan")}
