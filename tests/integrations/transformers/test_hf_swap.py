"""Attention of transformers models swapped: distances from the model itself, runs, refusals, the command."""

import json
import os
import shutil
from itertools import product
from pathlib import Path
from statistics import fmean

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from hf_advice import quality, swap
from hf_models import MODELS, TOKENS, WINDOW, bart, bert, config, gemma3, mistral, saved, texts
from study_points import points_of, study

import efficient_attn as ea
from efficient_attn.errors import DataError, DtypeError, OptionError, UnsupportedError
from efficient_attn.integrations.transformers import swapped
from efficient_attn.integrations.transformers.loading import open_model, token_ids
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION

pytestmark = pytest.mark.usefixtures("hasty")

# Of float32 hidden states of order one after three layers, in sums of a few dozen terms taken in another
# order: 2^-23 for each of some ten steps, in norm. Cosines and divergences differ by the square of it.
ROUNDING = 1e-6
WINDOW_OF_3 = {"window": {"window": [3]}}


def tokenized(folder):
    """Ids of every text, by the tokenizer of a saved model."""
    opened = open_model(folder)
    return [token_ids(opened, text, most=TOKENS) for text in texts().values()]


def hidden_states(model, ids):
    with torch.no_grad():
        return model(ids, output_hidden_states=True).hidden_states[-1][0].double()


def with_tokenizer(model, folder):
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def relative_error(states, exact):
    return float((states - exact).norm() / exact.norm())


def test_an_encoder_is_compared_by_hidden_states_and_embeddings_of_every_text(encoder):
    options = {"window": {"window": [5]}}
    records = quality(swap(encoder, ["window"], options=options, by_layer=True, layers=[1]))
    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder).eval()
    hidden, pooled = [], []
    for ids in tokenized(encoder):
        exact = hidden_states(model, ids)
        with swapped(model, "window", window=5):
            states = hidden_states(model, ids)
        hidden.append(relative_error(states, exact))
        pooled.append(1 - float(torch.cosine_similarity(states.mean(0), exact.mean(0), dim=0)))
    assert min(pooled) > 100 * ROUNDING**2
    record = records["window(window=5)", None]
    assert record.texts == 3
    assert record.hidden_relative_error_draws == pytest.approx(hidden, rel=1e-4)
    assert record.mean_pool_distance_draws == pytest.approx(pooled, rel=1e-3)
    assert record.mean_pool_distance == pytest.approx(fmean(pooled), rel=1e-3)
    # A layer alone is the model with that layer swapped.
    with swapped(model, {1: ("window", {"window": 5})}):
        expected = relative_error(hidden_states(model, ids), exact)
    alone = records["window(window=5)", 1].hidden_relative_error_draws[-1]
    assert alone == pytest.approx(expected, rel=1e-3) and expected > 100 * ROUNDING


def test_a_causal_model_is_compared_by_its_next_tokens_with_all_that_its_head_does(tmp_path):
    # The cap on the logits of Gemma is part of the head.
    folder = saved(gemma3(final_logit_softcapping=5.0), tmp_path)
    records = quality(swap(folder, ["window"], options=WINDOW_OF_3))
    record = records["window(window=3)", None]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    divergence, perplexity, exact_perplexity = [], [], []
    for ids in tokenized(folder):
        with torch.no_grad():
            p = model(ids).logits[0].double().softmax(-1)
            exact_perplexity.append(float(model(ids, labels=ids).loss.exp()))
            with swapped(model, full=("window", {"window": 3})):
                q = model(ids).logits[0].double().softmax(-1)
                perplexity.append(float(model(ids, labels=ids).loss.exp()))
        divergence.append(float((p * (p / q).log()).sum(-1).mean()))
    assert record.next_token_kl_draws == pytest.approx(divergence, rel=1e-3)
    assert record.perplexity_draws == pytest.approx(perplexity, rel=1e-5)
    assert records[OWN, None].perplexity_draws == pytest.approx(exact_perplexity, rel=1e-5)


def test_a_causal_model_without_a_head_is_compared_by_its_hidden_states(tmp_path):
    folder = saved(MODELS["gpt2"]().transformer, tmp_path)
    record = quality(swap(folder, ["window"], options=WINDOW_OF_3))["window(window=3)", None]
    assert record.hidden_relative_error > 100 * ROUNDING
    assert record.mean_pool_distance > 100 * ROUNDING**2
    assert record.next_token_kl is None


@pytest.mark.parametrize(
    ("dtype", "loaded"), [(None, "bfloat16"), ("float32", "float32"), ("auto", "float32")]
)
def test_the_reference_is_the_model_in_the_dtype_of_its_checkpoint_or_of_the_option(tmp_path, dtype, loaded):
    folder = saved(bert().to(torch.bfloat16), tmp_path)
    results = swap(folder, ["window"], options=WINDOW_OF_3, texts=texts(1), dtype=dtype)
    assert {record.case.dtype for record in results.records} == {loaded}
    assert f"heads of 8, {loaded}, " in results.tables()[0].title
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, dtype=getattr(torch, loaded)).eval()
    ids = tokenized(folder)[0]
    exact = hidden_states(model, ids)
    with swapped(model, "window", window=3):
        expected = relative_error(hidden_states(model, ids), exact)
    record = quality(results)["window(window=3)", None]
    assert record.hidden_relative_error == pytest.approx(expected, rel=1e-3)
    advice = study("advise", folder, ["window"], texts=texts(2), seq_lens=(TOKENS,), dtype=dtype)
    assert advice.settle().dtype == loaded


def test_random_features_are_drawn_anew_and_calibrated_on_the_first_text(encoder):
    records = quality(swap(encoder, ["performer-positive", "performer-oprf"], draws=2, seed=7))
    record, calibrated = records["performer-positive", None], records["performer-oprf", None]
    assert (record.calibrated_on, calibrated.calibrated_on) == (None, "the first text")
    draws = record.hidden_relative_error_draws
    assert len(draws) == 3 * 2 and len(set(draws)) == len(draws)
    # The first draw of the run is what `swapped` gives with the same seed.
    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder).eval()
    ids = tokenized(encoder)[0]
    exact = hidden_states(model, ids)
    with swapped(model, "performer-positive", seed=7):
        expected = relative_error(hidden_states(model, ids), exact)
    assert draws[0] == pytest.approx(expected, rel=1e-3)


def test_every_length_is_a_swap_of_its_own_of_all_layers_and_of_those_named_that_do_not_slide(tmp_path):
    folder, request = saved(MODELS["modernbert"](), tmp_path), {"texts": texts(1), "by_layer": True}
    for layers, numbers in (((2,), {None, 2}), (None, {None, 0, 2})):
        plan = study("swap", folder, ["linear-elu"], seq_lens=(8, TOKENS), layers=layers, **request)
        parts = {(point.case.tokens, point.case.layer) for point in points_of(plan)}
        assert parts == {*product({8, TOKENS}, numbers)}
        assert "1 of 3 attention layers stay exact (sliding)" in plan.notes()[0]


def test_a_text_that_the_tokenizer_does_not_know_is_named(encoder):
    # 20 words, with the two tokens around a text.
    mixed = {f"{count}": count * "ж " + (20 - count) * "w1 " for count in (11, 12, 0, 20)}
    ends = "its tokens are the tokenizer's unknown token. Use a text in the model's language and format."
    warned = [f"12: 55 % of {ends}", f"20: 91 % of {ends}"]
    assert list(study("swap", encoder, ["window"], texts=mixed).notes()) == warned
    # Every second text verifies.
    advice = study("advise", encoder, ["window"], texts=mixed, seq_lens=(22,))
    assert list(advice.notes()) == warned


def test_a_model_whose_layers_all_slide_takes_a_window_of_its_own_width_alone(tmp_path):
    results = swap(saved(mistral(), tmp_path), ["window", "performer-positive", "window-clusters"])
    records = quality(results)
    window, refused = records["window", None], records["performer-positive", None]
    assert window.case.options["window"] == WINDOW and window.case.num_kv_heads == 2
    assert window.hidden_relative_error < ROUNDING
    assert records["exact", None].hidden_relative_error < ROUNDING
    assert refused.status == "unsupported"
    assert records["window-clusters", None].case.options["window"] != WINDOW
    assert refused.reason.startswith("Backend 'performer-positive' does not support causal over 5 keys")
    assert "performer-positive" not in {r.case.label for r in results.records if r.case.kind == "time"}


def test_the_models_own_attention_is_put_back_even_after_an_error(encoder):
    (model, tokenizer), ids = with_tokenizer(bert(), encoder), tokenized(encoder)[0]
    before = model(ids).logits

    def broken(q, k, v):
        raise RuntimeError("no such thing")

    unbuilt = {"linformer": {"sharing": ["layers"], "rank": [8]}}
    records = quality(swap((model, tokenizer), [broken, "linformer"], options=unbuilt))
    assert records["broken", None].status == "error"
    assert records["linformer(sharing=layers, rank=8)", None].status == "unsupported"
    assert not any(isinstance(module, ea.Backend) for module in model.modules())
    assert torch.equal(model(ids).logits, before)


def test_a_run_times_all_variants_and_is_written_and_read(encoder, tmp_path):
    request = {"options": WINDOW_OF_3, "rounds": 2, "out": tmp_path / "run", "draws": 1}
    results = swap(encoder, ["window", "performer-positive"], **request)
    timed = [record for record in results.records if record.case.kind == "time"]
    memories = [record for record in results.records if record.case.kind == "memory"]
    assert len(timed) == len(memories) == 5
    assert all(len(r.round_sizes) == 2 and len(r.times_s) == sum(r.round_sizes) >= 4 for r in timed)
    assert all(r.peak_bytes > 0 for r in memories)
    assert {bool(r.parameter_bytes) for r in memories if r.case.backend == "performer-positive"} == {True}
    again = ea.read(tmp_path / "run")
    assert again.records == results.records
    about = again.environment["settled"]["model"]
    assert about["class"] == "BertForMaskedLM" and set(about["texts"]) == set(texts())


def test_the_most_promising_candidates_are_measured_first(decoder):
    plan = study("swap", decoder, texts=texts(), seq_lens=TOKENS, by_layer=True)
    points = points_of(plan)
    # The first pass predicts the others, which differ in their attention alone.
    first, *others = (point.cost for point in points if point.case.kind == "swap" and not point.case.seed)
    assert max(others) <= 10 * first
    labels = list(dict.fromkeys(point.case.label for point in points))
    first = ["window-clusters", "window", "window(global_tokens=4)"]
    assert labels[:6] == [OWN, "exact", UNIFORM_ATTENTION, *first]


def test_texts_are_cut_to_one_length_and_to_what_the_model_can_take(encoder):
    words = {"short": " ".join(["w1"] * 10), "long": " ".join(["w2"] * 30)}
    # [CLS] and [SEP] are tokens too.
    for given, tokens in ((words, 12), ([" ".join(["w3"] * 500)], 64)):
        points = points_of(study("swap", encoder, ["exact"], texts=given))
        assert {point.case.tokens for point in points} == {tokens}


@pytest.mark.parametrize(
    ("model", "changes", "error", "message"),
    [
        (str, {"seq_lens": 65}, OptionError, "seq_len is at most the 64 positions of this model, not 65"),
        (str, {"seq_lens": 60}, DataError, "The text 'text 0' has 42 tokens, not 60"),
        (str, {"texts": "a text"}, DtypeError, "texts is a list of texts, or a mapping"),
        (str, {"draws": 0}, OptionError, "draws"),
        (lambda folder: bert(), {}, DtypeError, r"model is a folder, a pair .* not Bert"),
        (lambda folder: with_tokenizer(bert().train(), folder), {}, OptionError, "training mode"),
        (lambda folder: with_tokenizer(bart(), folder), {}, UnsupportedError, "is an encoder-decoder"),
        (lambda folder: with_tokenizer(bert(vocab_size=20), folder), {}, DataError, r"to 4\d, .* only 20 em"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(encoder, model, changes, error, message):
    with pytest.raises(error, match=message):
        swap(model(encoder), ["exact"], **changes)


def only_a_pickle(path):
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")


def a_device(path):
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.json").symlink_to(os.devnull)


TEN_BYTES = b"\2" + bytes(7) + b"{}"
LARGER = "describes a larger model than its safetensors hold"
STRANGE = '{"model_type": "strange", "auto_map": {"AutoConfig": "modeling.Strange"}}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "is not a folder"),
        (lambda path: (path / "config.json").unlink(), r"holds no config\.json"),
        (lambda path: (path / "config.json").write_text("{"), "Cannot load a model"),
        (only_a_pickle, r"no model\.safetensors, .* pickles, which can run code"),
        (lambda path: (path / "config.json").write_text(STRANGE), "Cannot load a model"),
        (lambda path: (path / "config.json").write_text(" " * (1 << 22) + "{}"), "is larger than"),
        (lambda path: (path / "model.safetensors").write_bytes(TEN_BYTES), LARGER),
        # Before transformers makes lists of as many entries, modules, or tensors of such a size.
        (lambda path: config(path, lambda c: c.update(num_hidden_layers=1 << 40)), LARGER),
        (lambda path: config(path, lambda c: c.update(inner={"num_labels": 1 << 40})), LARGER),
        (lambda path: config(path, lambda c: c.update(num_hidden_layers=3000)), LARGER),
        (lambda path: config(path, lambda c: c.update(vocab_size=1 << 40)), LARGER),
        (lambda path: os.truncate(path / "tokenizer.json", (1 << 28) + 1), "tokenizer.json is larger than"),
        (a_device, "tokenizer.json.*not a regular file"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_in_one_line(encoder, tmp_path, change, message):
    shutil.copytree(encoder, tmp_path / "m")
    change(tmp_path / "m")
    with pytest.raises(DataError, match=message) as caught:
        swap(tmp_path / "m", ["exact"])
    assert "\n" not in str(caught.value)


def test_folders_and_broken_links_beside_a_model_are_left_alone(encoder, tmp_path):
    shutil.copytree(encoder, tmp_path / "m")
    (tmp_path / "m" / "logs.json").mkdir()
    (tmp_path / "m" / "old.json").symlink_to(tmp_path / "gone")
    assert open_model(tmp_path / "m").tokenizer


def test_the_command_names_texts_by_their_files(encoder, tmp_path, monkeypatch, undrawn):
    pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
    from command_line import command

    monkeypatch.chdir(tmp_path)
    for number, text in enumerate(texts().values()):
        Path(f"{number}.txt").write_text(text)
    request = ["swap", str(encoder), "--text", "0.txt", "--text", "1.txt", "--rounds", "1", "--draws", "1"]
    code, out, err = command(*request, "--backend", "exact")
    title, *_, folder = out.splitlines()
    assert code == 0 and title.startswith("Attention replaced: ") and " on 2 texts #" in title
    assert "The model runs in float32. 9 points, at most " in err
    environment = json.loads(Path(folder, "environment.json").read_text())
    assert set(environment["settled"]["model"]["texts"]) == {"0.txt", "1.txt"}
    assert str(tmp_path) not in json.dumps(environment)
    refused = {"absent.txt": "--text: cannot read absent.txt", "./0.txt": "two files are called '0.txt'"}
    for path, message in refused.items():
        code, _, err = command(*request, "--text", path)
        assert code == 2 and err.startswith("error: ") and message in err and err.count("\n") == 1
