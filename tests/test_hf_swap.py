"""Swapping the attention of models and comparing them with themselves; models are tiny, random, made here."""

import signal
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5", reason="the extra [hf] is not installed")

from hf_models import MODELS, WINDOW, bert, gpt2, mistral, saved, texts

import efficient_attn as ea
from efficient_attn.errors import DataError
from efficient_attn.integrations.transformers import swapped
from efficient_attn.runner.record import Record, replace
from efficient_attn.runner.sizes import MEAN_OF_VALUES, OWN
from efficient_attn.studies import find, loop
from efficient_attn.studies.swap.analysis import MEAN_POOL, spread, swaps
from efficient_attn.studies.swap.view import show_quantity

TOKENS = 24
# Of float32 hidden states of order one after three layers, in sums of a few dozen terms taken in another
# order: 2^-23 for each of some ten steps, in norm. Cosines and divergences differ by the square of it.
ROUNDING = 1e-6


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """What is timed here is nobody's concern."""
    monkeypatch.setattr("efficient_attn.studies.loop._ROUND_S", 0.0)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return saved(bert(), tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return saved(gpt2(), tmp_path_factory.mktemp("decoder"))


def swap(model, backends, **changes):
    return ea.swap(model, backends, **{"texts": texts(), "seq_len": TOKENS, "rounds": 1, **changes})


def quality(results):
    """{(label, layer): record} of what was compared."""
    return {(r.case.label, r.case.layer): r for r in results.records if r.case.kind == "swap"}


def tokenized(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt")["input_ids"]
        for text in texts().values()
    ]


def test_an_encoder_is_compared_by_hidden_states_and_embeddings_of_every_text(encoder):
    record = quality(swap(encoder, ["window"], options={"window": {"window": [5]}}))["window(window=5)", None]
    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder).eval()
    hidden, pooled, first = [], [], []
    for ids in tokenized(encoder):
        with torch.no_grad():
            exact = model(ids, output_hidden_states=True).hidden_states
            with swapped(model, "window", window=5):
                other = model(ids, output_hidden_states=True).hidden_states
        h, e = other[-1][0].double(), exact[-1][0].double()
        hidden.append(float((h - e).norm() / e.norm()))
        pooled.append(1 - float(torch.cosine_similarity(h.mean(0), e.mean(0), dim=0)))
        first.append(1 - float(torch.cosine_similarity(h[0], e[0], dim=0)))
    assert min(pooled) > 100 * ROUNDING**2
    assert record.texts == 3
    # The states are those of two runs of the same model, so only rounding within one run is left.
    assert record.hidden_relative_error_draws == pytest.approx(hidden, rel=1e-4)
    assert record.mean_pool_distance_draws == pytest.approx(pooled, rel=1e-3)
    assert record.first_token_distance_draws == pytest.approx(first, rel=1e-3)
    assert record.mean_pool_distance == pytest.approx(fmean(pooled), rel=1e-3)
    assert record.next_token_kl is None and record.perplexity is None


def test_the_model_is_compared_with_its_own_attention_whatever_is_measured_first(encoder):
    options = {"window": {"window": [5]}}
    plan = find("swap").plan(encoder, ["window"], texts=texts(), seq_len=TOKENS, options=options)
    (window,) = (one for one in plan.points if one.case.kind == "swap" and one.case.backend == "window")
    alone = window.measure()
    assert alone.hidden_relative_error > 100 * ROUNDING
    results = swap(encoder, ["window"], options=options)
    assert quality(results)[window.case.label, None].hidden_relative_error == alone.hidden_relative_error


def test_a_causal_model_is_compared_by_its_next_tokens(decoder):
    found = quality(swap(decoder, ["window"], options={"window": {"window": [3]}}))
    record = found["window(window=3)", None]
    model = transformers.AutoModelForCausalLM.from_pretrained(decoder).eval()
    divergence, unlike, perplexity, own = [], [], [], []
    for ids in tokenized(decoder):
        with torch.no_grad():
            p = model(ids).logits[0].double().softmax(-1)
            own.append(float(model(ids, labels=ids).loss.exp()))
            with swapped(model, "window", window=3):
                other = model(ids).logits[0].double().softmax(-1)
                perplexity.append(float(model(ids, labels=ids).loss.exp()))
        divergence.append(float((p * (p / other).log()).sum(-1).mean()))
        unlike.append(float((p.argmax(-1) != other.argmax(-1)).double().mean()))
    assert record.next_token_kl_draws == pytest.approx(divergence, rel=1e-3)
    assert record.next_token_disagreement_draws == pytest.approx(unlike) and max(unlike) > 0
    assert record.perplexity_draws == pytest.approx(perplexity, rel=1e-5)
    assert found[OWN, None].perplexity_draws == pytest.approx(own, rel=1e-5)
    assert record.mean_pool_distance is None


@pytest.mark.parametrize("name", ["bert", "modernbert", "gpt2", "llama", "mistral"])
def test_exact_swapped_for_exact_changes_nothing_but_rounding(name, tmp_path):
    results = swap(saved(MODELS[name](), tmp_path), ["exact", "exact-dense"], by_layer=True)
    checked = 0
    for (label, _), record in quality(results).items():
        if record.case.backend in (OWN, MEAN_OF_VALUES) or record.status == "unsupported":
            continue
        checked += 1
        assert record.status == "ok", record.reason
        assert record.hidden_relative_error < ROUNDING, label
        known = record.next_token_kl if record.case.causal else record.mean_pool_distance
        assert known < ROUNDING**2 or known < 1e-12
        assert not record.next_token_disagreement
    assert checked >= 4


def test_a_causal_model_without_a_head_is_compared_by_its_hidden_states(tmp_path):
    folder = saved(gpt2().transformer, tmp_path)
    record = quality(swap(folder, ["window"], options={"window": {"window": [3]}}))["window(window=3)", None]
    assert record.hidden_relative_error > 100 * ROUNDING
    assert record.next_token_kl is None and record.mean_pool_distance is None


def test_a_layer_alone_is_the_model_with_that_layer_swapped(encoder):
    found = quality(swap(encoder, ["window"], options={"window": {"window": [5]}}, by_layer=True))
    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder).eval()
    ids = tokenized(encoder)[0]
    with torch.no_grad():
        exact = model(ids, output_hidden_states=True).hidden_states[-1][0]
        for layer in range(3):
            with swapped(model, {layer: ("window", {"window": 5})}):
                other = model(ids, output_hidden_states=True).hidden_states[-1][0]
            told = found["window(window=5)", layer].hidden_relative_error_draws[0]
            assert told == pytest.approx(float((other - exact).norm() / exact.norm()), rel=1e-3)
            assert told > 100 * ROUNDING


def test_random_features_are_drawn_anew_for_every_seed_and_layer(encoder):
    results = swap(encoder, ["performer-positive"], draws=4, seed=7)
    record = quality(results)["performer-positive", None]
    draws = record.hidden_relative_error_draws
    assert len(draws) == 3 * 4 and len(set(draws)) == len(draws)
    by_seed = [fmean(draws[seed::4]) for seed in range(4)]
    told = spread(record, "hidden_relative_error")
    assert told.mean == pytest.approx(record.hidden_relative_error) == pytest.approx(fmean(by_seed))
    assert told.over_seeds == pytest.approx(stdev(by_seed))
    # The first draw of the run is what `swapped` gives with the same seed.
    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder).eval()
    ids = tokenized(encoder)[0]
    with torch.no_grad():
        exact = model(ids, output_hidden_states=True).hidden_states[-1][0]
        with swapped(model, "performer-positive", seed=7):
            other = model(ids, output_hidden_states=True).hidden_states[-1][0]
    assert draws[0] == pytest.approx(float((other - exact).norm() / exact.norm()), rel=1e-3)


def test_backends_that_need_it_are_calibrated_on_the_first_text(encoder):
    record = quality(swap(encoder, ["performer-oprf"], draws=1))["performer-oprf", None]
    assert (record.status, record.calibrated_on) == ("ok", "the first text")
    assert record.hidden_relative_error > 0


def test_layers_that_slide_stay_exact_and_are_told(tmp_path):
    results = swap(saved(MODELS["modernbert"](), tmp_path), ["performer-positive"], by_layer=True, draws=1)
    assert {layer for _, layer in quality(results)} == {None, 0, 2}
    assert "1 of 3 attentions are sliding and stay exact" in results.notes[0]


def test_a_model_whose_layers_all_slide_takes_a_window_of_its_own_width(tmp_path):
    options = {"window": {"window": [WINDOW]}}
    found = quality(swap(saved(mistral(), tmp_path), ["window", "performer-positive"], options=options))
    assert found[f"window(window={WINDOW})", None].hidden_relative_error < ROUNDING
    assert found["performer-positive", None].status == "unsupported"


def test_the_default_window_of_a_model_whose_layers_all_slide_is_its_own(tmp_path):
    found = quality(swap(saved(mistral(), tmp_path), ["window"]))["window", None]
    assert found.case.options["window"] == WINDOW
    assert found.hidden_relative_error < ROUNDING


@pytest.mark.parametrize(("distance", "shown"), [(0.0123, "0.9877"), (1e-6, "0.9999990"), (0.0, "1.0000000")])
def test_a_cosine_near_one_is_shown_with_more_decimals(distance, shown):
    assert show_quantity(MEAN_POOL, distance) == shown


def test_what_a_backend_cannot_serve_is_a_record_with_its_reason(decoder):
    results = swap(decoder, ["linformer"])
    record = quality(results)["linformer", None]
    assert record.status == "unsupported"
    assert record.reason.startswith("Backend 'linformer' cannot be causal.")
    assert "linformer" not in {r.case.label for r in results.records if r.case.kind == "time"}


@pytest.mark.parametrize("fails", ["forward", "build"])
def test_the_models_own_attention_is_put_back_even_after_an_error(encoder, fails):
    model = bert()
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    ids = tokenized(encoder)[0]
    before, implementation = model(ids).logits, model.config._attn_implementation

    def broken(q, k, v):
        raise RuntimeError("no such thing")

    wrong = [broken] if fails == "forward" else ["linformer"]
    options = {"linformer": {"sharing": ["layers"], "rank": [8]}} if fails == "build" else None
    results = swap(model, wrong, tokenizer=tokenizer, options=options)
    label = "broken" if fails == "forward" else "linformer(sharing=layers, rank=8)"
    assert quality(results)[label, None].status == ("error" if fails == "forward" else "unsupported")
    assert model.config._attn_implementation == implementation
    assert not any(isinstance(module, ea.Backend) for module in model.modules())
    assert torch.equal(model(ids).logits, before)


def test_interrupting_keeps_what_was_measured_and_puts_the_attention_back(encoder, tmp_path):
    model = bert()
    calls = []

    def impatient(q, k, v):
        calls.append(q)
        signal.raise_signal(signal.SIGINT)

    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    results = swap(model, ["window", impatient], tokenizer=tokenizer, out=tmp_path / "run")
    assert calls and results.interrupted
    assert {label for label, _ in quality(results)} == {OWN, "exact", MEAN_OF_VALUES, "window"}
    again = ea.read(tmp_path / "run")
    assert len(again) == len(results)
    told = again.sentences()
    assert told == results.sentences()
    assert told[0].endswith("Not measured (1 of 3 candidates): impatient."), told
    assert not any(isinstance(module, ea.Backend) for module in model.modules())


def test_a_window_wider_than_the_texts_and_a_rank_of_half_of_them_are_remarked_on(encoder):
    options = {"window": {"window": [TOKENS + 1, 5]}, "linformer": {"rank": [TOKENS // 2, 4]}}
    told = swap(encoder, ["window", "linformer"], options=options).sentences()
    (remark,) = (sentence for sentence in told if sentence.startswith("Approximations that save few"))
    assert f"window(window={TOKENS + 1}) (" in remark and f"linformer(rank={TOKENS // 2}) (1.00x)" in remark
    assert "window=5" not in remark and "rank=4" not in remark


def test_a_run_is_written_read_drawn_tabled_told_and_compared(encoder, tmp_path):
    options = {"window": {"window": [3, 9]}}
    results = swap(
        encoder,
        ["window", "performer-positive"],
        options=options,
        by_layer=True,
        rounds=2,
        out=tmp_path / "a",
    )
    kinds = [record.case.kind for record in results.records]
    assert (kinds.count("time"), kinds.count("memory")) == (6, 6)
    timed = [record for record in results.records if record.case.kind == "time"]
    assert all(len(r.round_sizes) == 2 and len(r.times_s) == sum(r.round_sizes) >= 4 for r in timed)
    memories = [record for record in results.records if record.case.kind == "memory"]
    assert all(r.peak_bytes > 0 for r in memories)
    assert {bool(r.parameter_bytes) for r in memories if r.case.backend == "performer-positive"} == {True}
    again = ea.read(tmp_path / "a")
    assert again.records == results.records
    about = again.environment["model"]
    assert about["class"] == "BertForMaskedLM" and set(about["texts"]) == set(texts())
    assert len(about["weights_sha256"]) == 64
    titles = [table.title for table in again.tables()]
    assert [title.partition(":")[0] for title in titles] == [
        "Attention swapped", "One layer swapped, cosine, mean pool"
    ]  # fmt: skip
    rows = {row[0]: row for row in again.tables()[0].rows}
    assert set(rows) == {
        OWN,
        "exact",
        MEAN_OF_VALUES,
        "window(window=3)",
        "window(window=9)",
        "performer-positive",
    }
    found = quality(again)["window(window=3)", None]
    assert rows["window(window=3)"][1] == show_quantity(MEAN_POOL, found.mean_pool_distance)
    assert any("stays nearest to itself with" in sentence for sentence in again.sentences())
    for name in ("records.jsonl", "environment.json", "summary.csv", "report.html", "swap.png"):
        assert (tmp_path / "a" / name).is_file()
    assert len(again.plot().figure.axes) == 2
    assert len(again.to_pandas()) == len(again)
    (one,) = swaps(again.records)
    assert one.own is not None and one.own.times_s and one.layers == (0, 1, 2)
    assert not ea.diff(again, again).regressions
    worse = [
        replace(r, **{name: tuple(2 * x for x in getattr(r, name)) for name in ("mean_pool_distance_draws",)})
        if r.case.label == "performer-positive" and r.case.kind == "swap" and r.case.layer is None
        else r
        for r in again.records
    ]
    changed = ea.diff(again, ea.Results(worse)).comparison.changes
    assert any(c.quantity == "mean_pool_distance" and c.ratio == pytest.approx(2) for c in changed)


def test_the_most_promising_candidates_are_measured_first_and_the_predicted_duration_never_rises(
    decoder, monkeypatch
):
    now, left = 0.0, []
    plan = find("swap").plan(decoder, texts=texts(), seq_len=TOKENS, by_layer=True)
    labels = list(dict.fromkeys(point.case.label for point in plan.points))
    assert labels[:5] == [OWN, "exact", MEAN_OF_VALUES, "window-clusters", "window"]

    def lasting(point):
        def measure(seconds=0.0):
            nonlocal now
            now += point.calls or 3
            return Record(case=point.case, times_s=(1.0,) if point.rounds else None)

        return replace(point, measure=measure)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now))
    points = list(map(lasting, plan.points))
    loop.Loop(replace(plan, points=points), earlier={}, emit=id, progress=left.append).run()
    told = [step.remaining_s for step in left if step.done]
    assert told == sorted(told, reverse=True) and told[0] == pytest.approx(now, rel=0.1)


def test_a_run_that_was_cut_off_is_continued_and_another_model_is_refused(encoder, tmp_path):
    asked = {"options": {"window": {"window": [5]}}, "out": tmp_path / "run"}
    whole, file = swap(encoder, ["window"], **asked), tmp_path / "run" / "records.jsonl"
    kept = b"".join(file.read_bytes().splitlines(keepends=True)[:4])
    file.write_bytes(kept + b'{"schema"')
    again = swap(encoder, ["window"], resume=True, **asked)
    assert file.read_bytes().startswith(kept)
    assert {r.case.key for r in again.records} == {r.case.key for r in whole.records}
    model = bert()
    model.bert.embeddings.word_embeddings.weight.data.mul_(2)
    other = saved(model, tmp_path / encoder.name)
    with pytest.raises(DataError, match=r"model.weights_sha256 was .*, is "):
        swap(other, ["window"], resume=True, **asked)


def test_texts_are_cut_to_one_length_and_to_what_the_model_can_take(encoder):
    words = {"short": " ".join(["w1"] * 10), "long": " ".join(["w2"] * 30)}
    results = ea.swap(encoder, ["exact"], texts=words, rounds=1)
    # [CLS] and [SEP] are tokens too.
    assert {record.case.tokens for record in results.records} == {12}
    long = ea.swap(encoder, ["exact"], texts=[" ".join(["w3"] * 500)], rounds=1)
    assert {record.case.tokens for record in long.records} == {64}
