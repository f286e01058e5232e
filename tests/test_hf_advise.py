"""The advice for a model: tiny, random, made here; its times are given."""

import json
import signal
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5", reason="the extra [hf] is not installed")

from hf_models import bert, gpt2, saved, texts

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError, UnsupportedError
from efficient_attn.integrations.transformers import attach, load, save
from efficient_attn.measure.outputs import cosine_distance
from efficient_attn.runner.record import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES, OWN
from efficient_attn.stats.predicted_time import Predicted
from efficient_attn.studies import find
from efficient_attn.studies.advise.findings import Findings
from efficient_attn.studies.advise.model_view import LAYERS
from efficient_attn.studies.estimate import Estimate
from efficient_attn.studies.loop import Loop
from efficient_attn.studies.results import read
from efficient_attn.studies.swap import measure

TOKENS = 24

# Seconds of one forward pass, by backend.
TIMES_S = {
    OWN: 1.0,
    "exact": 1.0,
    MEAN_OF_VALUES: 0.25,
    "window": 0.4,
    "linformer": 1.6,
    "plan": 0.5,
    "performer-positive": 0.4,
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return saved(bert(), tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return saved(gpt2(), tmp_path_factory.mktemp("decoder"))


@pytest.fixture(autouse=True)
def given_times(monkeypatch, undrawn):
    """Times of the model as in TIMES_S on an idle machine; no calls of attention alone, so no prediction."""

    def timed(case, variant, subject, *, seconds):
        return Record(case=case, times_s=(TIMES_S[case.backend],), round_sizes=(1,))

    monkeypatch.setattr(measure, "cost", timed)
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


_DONE = {}


@pytest.fixture
def advised(encoder, given_times):
    """The advice at a cosine of 0.9, measured once."""
    return _DONE.get(encoder) or _DONE.setdefault(encoder, advise(encoder, min_cosine=0.9))


def labels(results, kind):
    return {one.case.label for one in results.records if one.case.kind == kind and one.status == "ok"}


def test_the_plan_is_within_the_target_faster_and_told_with_its_layers(advised):
    (sentence, code) = advised.sentences()
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


def test_slower_backends_are_not_tried_layer_by_layer(advised):
    alone = {one.case.label for one in advised.records if one.case.layer is not None}
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


def test_the_attached_plan_reproduces_the_verified_cosine(encoder, advised, tmp_path):
    (tmp_path / LAYERS).write_text(advised.files()[LAYERS])
    (plan,) = (one for one in advised.records if one.case.label == "plan" and one.case.kind == "swap")
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    # Every second text verifies.
    held_out = list(texts(4).values())[1::2]
    own = transformers.AutoModel.from_pretrained(encoder).eval()
    model = attach(transformers.AutoModel.from_pretrained(encoder).eval(), tmp_path / LAYERS)
    loaded = load(encoder, plan=tmp_path / LAYERS).eval()
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
    assert "attention takes about 75% of the time" in sentence and "at most about 4.00x" in sentence
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


def test_the_texts_of_the_choice_do_not_verify(advised):
    inputs = {one.case.inputs for one in advised.records if one.case.label in ("plan", "plan 1")}
    assert len(inputs) == 2 and any(one.endswith(", held out") for one in inputs)


def test_lengths_that_model_or_texts_lack_are_named(encoder):
    results = advise(encoder, seq_lens=(TOKENS, 36, 60, 100), min_cosine=0.9)
    text = " ".join(results.notes)
    assert "Not measured at 60 tokens: 0 of 4 texts are that long" in text
    assert "Not measured at 100 tokens: the model has 64 positions" in text
    assert "Lengths measured: 24, 36." in results.sentences()[0]
    with pytest.raises(DataError, match="No length can be measured"):
        advise(encoder, seq_lens=(60,))


def test_an_interrupted_advice_resumes_and_ends_as_if_never_interrupted(
    encoder, advised, tmp_path, monkeypatch
):
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
        assert labels(ended, kind) == labels(advised, kind)
    assert ended.sentences() == advised.sentences()
    assert ended.files() == advised.files()


def test_a_budget_that_ends_among_the_layers_leaves_the_plan_to_the_resumed_run(
    encoder, tmp_path, monkeypatch
):
    """The smaller window is the nearer one of layers that were not measured."""
    given = {"backends": ["window"], "options": {"window": {"window": [15, 5]}}, "min_cosine": 1 - 2.2e-5}
    whole, real, late_s = advise(encoder, **given), measure.distance, [0.0]

    def slow(case, *arguments, **named):
        if (case.layer, case.label) == (2, "window(window=15)"):
            late_s[0] = 1000.0
        return real(case, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(measure, "distance", slow)
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0])
        patched.setattr("efficient_attn.studies.loop.time", clock)
        stopped = advise(encoder, out=tmp_path, budget_s=60.0, **given)
    assert [one.status for one in stopped.records].count("skipped") == 4 and not plans(stopped)
    (sentence,) = stopped.sentences()
    assert "not measured to the end at 24 tokens" in sentence and "stay with exact" not in sentence
    ended = advise(encoder, out=tmp_path, resume=True, **given)
    assert plans(ended) == plans(whole) and ended.sentences() == whole.sentences()


def test_a_plan_of_the_layers_within_the_budget_is_made_anew_by_the_resumed_run(
    encoder, tmp_path, monkeypatch
):
    given = {"backends": ["window"], "options": {"window": {"window": [15, 5]}}, "min_cosine": 1 - 2.2e-5}
    whole, real, timed = advise(encoder, **given), Loop._over_budget, measure.cost

    def over(self, point, promised_s):
        late = point.case.layer is not None and point.case.label == "window(window=5)"
        return "no time" if late else real(self, point, promised_s)

    def interrupted(case, *arguments, **named):
        if case.backend == "plan":
            raise KeyboardInterrupt
        return timed(case, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_over_budget", over)
        stopped = advise(encoder, out=tmp_path, **given)
    assert plans(stopped)["plan"] != plans(whole)["plan"]
    assert (
        stopped.sentences()[0].startswith("From 24 tokens") and "3 points did not" in stopped.sentences()[0]
    )
    with monkeypatch.context() as patched:
        patched.setattr(measure, "cost", interrupted)
        advise(encoder, out=tmp_path, resume=True, **given)
    # The folder holds the times of the earlier plan.
    assert "not measured to the end" in read(tmp_path).sentences()[0]
    ended = advise(encoder, out=tmp_path, resume=True, **given)
    assert plans(ended) == plans(whole) and ended.sentences() == whole.sentences()
    assert ended.files() == whole.files()


def test_times_that_an_interruption_cut_short_decide_nothing_and_are_taken_again(
    encoder, tmp_path, monkeypatch
):
    timed, rounds = measure.cost, []

    def interrupted(case, *arguments, **named):
        rounds.append(case.backend)
        if rounds.count("plan") == last:
            raise KeyboardInterrupt
        return timed(case, *arguments, **named)

    monkeypatch.setattr(measure, "cost", interrupted)
    last = 3
    stopped = advise(encoder, min_cosine=0.9, out=tmp_path)
    (sentence,) = stopped.sentences()
    assert sentence.startswith("Nothing is known to be faster up to") and "undecided at 24 tokens" in sentence
    assert LAYERS not in stopped.files()
    rounds.clear()
    last = 5
    ended = advise(encoder, min_cosine=0.9, out=tmp_path, resume=True)
    # Rounds are paired by their number: those of the model itself are taken again too.
    assert Counter(rounds) == {OWN: 4, "plan": 4}
    assert ended.sentences()[0].startswith("From 24 tokens: 2.00x as fast") and LAYERS in ended.files()


def plans(results):
    """{label: layers} of the plans that were measured."""
    return {
        one.case.label: one.chosen_layers
        for one in results.records
        if one.case.backend == "plan" and one.case.kind == "swap" and one.status == "ok"
    }


def test_a_run_is_not_resumed_for_another_target_or_other_backends(encoder, tmp_path):
    given = {"backends": ["window"], "options": None}
    advise(encoder, min_cosine=0.9, out=tmp_path, **given)
    with pytest.raises(DataError, match=r"has the target .*0.09.*, not .*0.5.*; name a new folder"):
        advise(encoder, min_cosine=0.5, out=tmp_path, resume=True, **given)
    with pytest.raises(DataError, match=r"has the candidates .*window.*, not .*linformer"):
        advise(encoder, min_cosine=0.9, out=tmp_path, force_resume=True, backends=["linformer"], options=None)


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
    code = results.sentences()[1]
    assert "without a registered name" in code
    assert "attach(model, {0: ('mine', {}), 1: ('mine', {}), 2: ('mine', {})})" in code

    def broken(*arguments, **named):
        raise RuntimeError("no memory for this plan")

    monkeypatch.setattr("efficient_attn.studies.swap.model.TextSubject.plan", broken)
    results = advise(encoder, min_cosine=0.9)
    failed = [one.case.label for one in results.records if "no memory for this plan" in (one.reason or "")]
    assert failed == ["plan 1"] and not results.files()
    assert "not measured to the end at 24 tokens" in results.sentences()[0]


def test_options_without_effect_and_targets_out_of_range_are_refused(encoder, decoder):
    for given, message in (
        ({"min_cosine": 99.0}, "min_cosine is a number from 0 to 1, not 99.0"),
        ({"max_kl": float("nan")}, "max_kl is a number from 0 to 1000, not nan"),
        ({"max_kl": -1.0}, "max_kl is a number"),
        ({"max_kl": 0.1}, "max_kl has no effect with this model"),
        ({"draws": 3}, "draws has no effect with this model"),
        ({"causal": True}, "causal has no effect with this model"),
    ):
        with pytest.raises(OptionError, match=message):
            advise(encoder, **given)
    with pytest.raises(OptionError, match="min_cosine has no effect with this model"):
        advise(decoder, min_cosine=0.5)
    # A target below all losses divides by nothing.
    (sentence,) = advise(decoder, max_kl=1e-320, backends=["performer-positive"], options=None).sentences()
    assert "stay with exact" in sentence


def test_equal_texts_are_not_held_out_from_themselves(encoder):
    (text, other, *_) = texts(4).values()
    with pytest.raises(DataError, match="1 of 2 texts are that long and differ"):
        advise(encoder, texts=[text, f"{text} {other}"])


def test_a_failed_backend_is_measured_once_and_calls_of_one_length_predict_the_next(encoder, monkeypatch):
    real = measure.distance

    def failing(case, *arguments, **named):
        if case.backend == "linformer":
            return Record(case=case, status="error", reason="broken")
        return real(case, *arguments, **named)

    monkeypatch.setattr(measure, "distance", failing)
    results = advise(encoder, min_cosine=0.9)
    assert [one.case.kind for one in results.records if one.case.backend == "linformer"] == ["swap"]
    plan = find("advise").plan(encoder, texts=texts(4), seq_lens=(TOKENS, 36))
    for backend in (OWN, "exact"):
        short, *_, long = (one for one in plan.points if (one.case.backend, one.rounds) == (backend, 4))
        estimate, growth = Estimate(round_s=0.0), {OWN: 1, "exact": 2}[backend]
        estimate.learn(short, Record(case=short.case, times_s=(1.0,)), 1.0)
        # Each round has two calls of warm-up and one that is timed.
        assert estimate.seconds(long) == pytest.approx(4 * 3 * (36 / TOKENS) ** growth, rel=0.01)


def test_outputs_beyond_the_memory_limit_are_not_kept_and_no_score_matrices_unasked(decoder, encoder):
    with pytest.raises(DataError, match="the output of the model needs about"):
        advise(decoder, memory_limit=2_000)
    plan = find("advise").plan(encoder, texts=texts(4), seq_lens=(TOKENS,))
    assert "window" in plan.about["candidates"] and "exact-dense" not in plan.about["candidates"]


ONE_LAYER = json.dumps(
    {"format": 1, "layers": {"h.0": {"backend": "exact", "options": {}, "max_tokens": None}}}
)


def test_a_plan_of_another_model_or_none_is_refused(encoder, tmp_path):
    file = tmp_path / "layers.json"
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    for text, message in (
        ("{", "Cannot read the plan"),
        ('{"format": 7}', "not a plan of format 1"),
        ('{"format": true, "layers": {}}', "not a plan of format 1"),
        ('{"format": 1, "layers": {}}', "efficient_attn names no layer"),
        (ONE_LAYER, "belong to another model"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            attach(model, file)
    with pytest.raises(DataError, match="Cannot read the plan"):
        attach(model, tmp_path / "missing.json")
    for given in ({"window": 5}, {"max_tokens": 60}, {"seed": 3}, {"full": "window"}):
        with pytest.raises(
            OptionError, match=f"{next(iter(given))}=…: the file .* sets the backend of every"
        ):
            attach(model, tmp_path / "layers.json", **given)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"options": {"head_dim": 8}}, "No option of backend 'window' is called 'head_dim'"),
        ({"options": {"causal": True}}, "No option of backend 'window' is called 'causal'"),
        ({"options": {"window": "x"}}, "window"),
        ({"max_tokens": -5}, "max_tokens is at least 1"),
        ({"backend": "performer-positive", "options": {"num_features": 10**12}}, "is above 65536"),
        (
            {"backend": "linformer", "options": {"rank": 10**9}, "max_tokens": 10**9},
            r"needs \d+ numbers, \d+ are the",
        ),
    ],
)
def test_a_plan_from_elsewhere_is_refused_before_it_takes_memory(encoder, tmp_path, layer, message):
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    one = {"backend": "window", "options": {}, "max_tokens": None, **layer}
    layers = {f"encoder.layer.{number}.attention.self": one for number in range(3)}
    file = tmp_path / "layers.json"
    file.write_text(json.dumps({"format": 1, "layers": layers}))
    with pytest.raises(DataError, match=message):
        attach(model, file)


def test_load_refuses_a_plan_that_it_would_drop_or_that_would_drop_backends(encoder, tmp_path):
    model = transformers.AutoModel.from_pretrained(encoder).eval()
    with pytest.raises(OptionError, match="plan=…: the model given by into"):
        load(encoder, into=model, plan=tmp_path / "layers.json")
    save(attach(model, "window", window=5), tmp_path / "saved")
    with pytest.raises(OptionError, match="holds a model with backends of its own"):
        load(tmp_path / "saved", plan=tmp_path / "layers.json")


def test_a_causal_model_without_a_head_is_refused(tmp_path):
    folder = saved(gpt2().transformer, tmp_path / "body")
    with pytest.raises(UnsupportedError, match="an encoder, or a decoder with a language-model head"):
        advise(folder)
