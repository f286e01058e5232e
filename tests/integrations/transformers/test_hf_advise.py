"""The advice for a model, whole or ended early and resumed: tiny, random, made here; its times are given."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from hf_advice import TIMES_S, advise, plans
from hf_models import TOKENS, gemma3, gpt2, mistral, saved, texts
from study_points import study

from efficient_attn.errors import DataError, OptionError, UnsupportedError
from efficient_attn.integrations.transformers import attach
from efficient_attn.measure.record import replace
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION
from efficient_attn.runs.progress import Durations
from efficient_attn.runs.results import read
from efficient_attn.studies.advise.names import LOSSLESS, SLIDING
from efficient_attn.studies.advise.outcomes import LAYERS
from efficient_attn.studies.swap import measure

pytestmark = pytest.mark.usefixtures("given_times")

# Random features alone, as far from the model as they are.
FEATURES = {"backends": ["performer-positive"], "options": None}
# The smaller window is the nearer one.
WINDOWS = {"backends": ["window"], "options": {"window": {"window": [15, 5]}}, "min_cosine": 1 - 2.2e-5}


def swaps(results):
    return [record for record in results.records if record.case.kind == "swap"]


def predict_long(patch, chosen):
    """Predict long durations for points of chosen cases and rounds, so that a budget skips them."""
    next_s = Durations.next_s

    def predicted_s(self, point):
        return 1e9 if chosen(point.case, point.rounds) else next_s(self, point)

    patch.setattr(Durations, "next_s", predicted_s)


def test_the_plan_is_within_the_target_faster_and_told_with_its_layers(advised):
    (sentence, code) = advised.sentences()
    assert sentence.startswith("Faster from 24 tokens (target: mean pool cosine 0.9000). At 24 tokens: 2.0")
    assert "window(window=" in sentence and "in layers 0–2" in sentence
    assert f'ea.attach(model, "{LAYERS}")' in code
    # The texts of the choice do not verify.
    inputs = {record.case.inputs for record in advised.records if record.case.label in ("plan", "plan 1")}
    assert len(inputs) == 2 and any(name.endswith(", held out") for name in inputs)


def test_errors_come_before_times_and_only_backends_with_a_layer_within_the_limit_are_timed(
    encoder, monkeypatch
):
    real = measure.distance

    def distant(case, *arguments, **named):
        record = real(case, *arguments, **named)
        return replace(record, mean_pool_distance=1.0) if case.label == "linformer(rank=12)" else record

    monkeypatch.setattr(measure, "distance", distant)
    records = advise(encoder, min_cosine=0.9).records
    errors = [number for number, record in enumerate(records) if record.case.layer is not None]
    times = [number for number, record in enumerate(records) if record.case.kind == "time"]
    assert max(errors) < min(times)
    labels = ({records[number].case.label for number in numbers} for numbers in (errors, times))
    windows = {"window(window=5)", "window(window=15)"}
    assert [*labels] == [{*windows, "linformer(rank=12)"}, {*windows, OWN, "plan"}]


def test_a_bound_below_1_3_ends_a_length(encoder, monkeypatch):
    monkeypatch.setitem(TIMES_S, UNIFORM_ATTENTION, 0.78)
    results = advise(encoder, min_cosine=0.9)
    assert {record.case.label for record in results.records} == {OWN, UNIFORM_ATTENTION}
    (sentence,) = results.sentences()
    # The rest of the time, 0.78, grows with the tokens, and attention, 0.22, with their square.
    assert sentence.startswith("Keep exact attention: no plan gains enough on this machine")
    assert "little to gain before about 26 tokens; attention takes 22 % of the time" in sentence
    monkeypatch.setitem(TIMES_S, UNIFORM_ATTENTION, 0.76)
    assert len(advise(encoder, min_cosine=0.9).records) > 3


def test_lengths_that_model_or_texts_lack_are_named(encoder):
    plan = study("advise", encoder, ["window"], texts=texts(4), seq_lens=(TOKENS, 36, 60, 100))
    assert list(plan.notes()) == [
        "60 tokens were not measured: 0 of 4 texts are that long and distinct, not two.",
        "100 tokens were not measured: the model has 64 positions.",
    ]


def test_positions_are_compared_before_a_model_is_read(encoder, monkeypatch):
    path = "efficient_attn.integrations.transformers.loading.read_model"
    monkeypatch.setattr(path, lambda *arguments, **named: pytest.fail("read"))
    for name, lengths in (("advise", (65, 100)), ("swap", (TOKENS, 65))):
        with pytest.raises(OptionError, match="seq_len is at most the 64 positions of this model, not 65"):
            study(name, encoder, ["window"], texts=texts(4), seq_lens=lengths).notes()


def test_a_plan_keeps_the_random_features_that_its_layers_had_alone(encoder):
    options = {"performer-positive": {"seed": [7]}}
    results = advise(encoder, min_cosine=0.0, backends=list(options), options=options)
    whole = [record for record in swaps(results) if record.case.layer is None]
    distances = {(record.case.label, record.case.inputs): record.mean_pool_distance for record in whole}
    (inputs,) = {inputs for _, inputs in distances if not inputs.endswith("held out")}
    label = "performer-positive(seed=7)"
    assert plans(results)["plan 1"] == json.dumps(dict.fromkeys(map(str, range(3)), label))
    assert distances["plan 1", inputs] == distances[label, inputs]


def test_a_backend_without_a_name_is_planned_as_a_mapping(encoder, monkeypatch):
    def mine(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    monkeypatch.setitem(TIMES_S, "mine", 0.4)
    results = advise(encoder, min_cosine=0.1, backends=[mine], options=None)
    assert LAYERS not in results.files()
    (sentence,) = results.sentences()
    assert "with mine in layers 0–2" in sentence


def test_a_failed_backend_is_measured_once_and_a_failed_plan_is_a_record(encoder, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no memory for this plan")

    monkeypatch.setattr("efficient_attn.studies.swap.model.TextSubject.plan", broken)
    options = {"window": {"window": [5]}}
    results = advise(encoder, min_cosine=0.9, backends=["window", broken], options=options)
    assert [r.case.kind for r in results.records if r.case.backend == "broken"] == ["swap"]
    failed = [r.case.label for r in results.records if r.case.backend == "plan" and r.status == "error"]
    assert failed == ["plan 1"] and not results.files()
    assert "At 24 tokens: the measurement is incomplete" in results.sentences()[0]


def test_what_cannot_be_advised_is_refused(encoder, tmp_path):
    (text, second, *_) = texts(4).values()
    body = saved(gpt2().transformer, tmp_path / "body")
    for model, changes, error, match in (
        (encoder, {"max_kl": 0.05}, OptionError, r"max_kl has no effect here; use min_cosine"),
        (encoder, {"texts": [text, f"{text} {second}"]}, DataError, "1 of 2 texts are that long and"),
        (body, {}, UnsupportedError, "an encoder, or a decoder with a language-model head"),
    ):
        with pytest.raises(error, match=match):
            advise(model, **changes)


def test_a_uniform_window_and_score_matrices_are_no_candidates_for_a_plan(decoder):
    shared = {"texts": texts(4), "seq_lens": (TOKENS,)}
    candidates = study("advise", decoder, **shared).settled.candidates
    assert "window" in candidates and not any("global_tokens" in name for name in candidates)
    assert "exact-dense" not in candidates
    tokens = {"window": {"global_tokens": [4]}}
    requested = study("advise", decoder, ["window"], options=tokens, **shared)
    assert "window(global_tokens=4)" in requested.settled.candidates


@pytest.mark.parametrize(("make", "layers"), [(gemma3, "0–1"), (mistral, "0–2")])
def test_sliding_layers_are_windows_first_and_a_plan_that_loses_nothing(make, layers, tmp_path):
    folder = saved(make(), tmp_path / "model")
    results = advise(folder, max_kl=1e-9, **FEATURES)
    first = swaps(results)[0]
    assert first is results.records[0] and first.case.label == LOSSLESS
    assert 0 <= first.next_token_kl < 1e-9
    (sentence, _) = results.sentences()
    assert f"2.00 ± 0 times faster, with sliding window in layers {layers}" in sentence
    assert f"; {LOSSLESS} 2.50 ± 0 times faster" in sentence
    ids = torch.arange(20)[None]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    (tmp_path / LAYERS).write_text(results.files()[LAYERS])
    with torch.no_grad():
        exact = model(ids).logits
        torch.testing.assert_close(attach(model, tmp_path / LAYERS)(ids).logits, exact)


def test_further_gains_are_those_over_windows_in_sliding_layers(tmp_path, monkeypatch):
    folder = saved(gemma3(), tmp_path / "model")
    monkeypatch.setitem(TIMES_S, "window", 0.6)
    plan = {"0": SLIDING, "1": SLIDING, "2": "performer-positive"}
    measured = plans(advise(folder, max_kl=100.0, **FEATURES))
    assert measured == {label: json.dumps(plan) for label in ("plan 1", "plan")}
    # Slower than the windows, if faster than the model.
    monkeypatch.setitem(TIMES_S, "performer-positive", 0.8)
    measured = plans(advise(folder, max_kl=100.0, **FEATURES))
    assert measured == {"plan": json.dumps({"0": SLIDING, "1": SLIDING})}


def test_windows_that_compute_otherwise_are_in_no_plan(tmp_path, monkeypatch):
    real = measure.distance

    def unequal(case, *arguments, **named):
        record = real(case, *arguments, **named)
        return replace(record, next_token_kl=1e-3) if case.label == LOSSLESS else record

    monkeypatch.setattr(measure, "distance", unequal)
    measured = plans(advise(saved(gemma3(), tmp_path / "model"), max_kl=100.0, **FEATURES))
    assert measured == {label: json.dumps({"2": "performer-positive"}) for label in ("plan 1", "plan")}


@pytest.mark.slow
def test_a_plan_of_the_layers_within_the_budget_is_made_anew_by_a_resumed_run(encoder, tmp_path, monkeypatch):
    whole, timed = advise(encoder, **WINDOWS), measure.cost

    def interrupted(case, *arguments, **named):
        if case.backend == "plan":
            raise KeyboardInterrupt
        return timed(case, *arguments, **named)

    with monkeypatch.context() as patch:
        predict_long(patch, lambda case, rounds: case.layer is not None and case.label == "window(window=5)")
        stopped = advise(encoder, out=tmp_path, **WINDOWS)
    assert plans(stopped)["plan"] != plans(whole)["plan"]
    (sentence, _) = stopped.sentences()
    assert sentence.startswith("Faster from 24") and "3 points skipped (budget)" in sentence
    with monkeypatch.context() as patch:
        patch.setattr(measure, "cost", interrupted)
        advise(encoder, out=tmp_path, resume=True, budget_s=60.0, **WINDOWS)
    # The folder holds the times of the earlier plan.
    assert "At 24 tokens: the plan was not timed" in read(tmp_path).sentences()[0]
    ended = advise(encoder, out=tmp_path, resume=True, budget_s=60.0, **WINDOWS)
    assert plans(ended) == plans(whole) and ended.sentences() == whole.sentences()
    assert ended.files() == whole.files()


def test_a_plan_without_layers_is_no_decision_where_a_budget_left_layers_out(encoder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        predict_long(patch, lambda case, rounds: case.layer is not None)
        stopped = advise(encoder, out=tmp_path, budget_s=60.0, **WINDOWS)
    (sentence,) = stopped.sentences()
    assert "the measurement is incomplete" in sentence and "keep exact attention" not in sentence
    ended = advise(encoder, out=tmp_path, resume=True, budget_s=60.0, **WINDOWS)
    assert ended.sentences()[0].startswith("Faster from 24")


def test_a_run_is_not_resumed_for_another_target(encoder, tmp_path):
    request = {"backends": ["window"], "options": None, "out": tmp_path}
    advise(encoder, min_cosine=0.9, **request)
    with pytest.raises(DataError, match=r"has min_cosine=0.9, not 0.5; name a new folder"):
        advise(encoder, min_cosine=0.5, resume=True, **request)
