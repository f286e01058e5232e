"""Attention of transformers models swapped: distances from the model itself, runs, refusals, the command.

Models are tiny, random, made here. Records of a trained one are stored.
"""

import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import MODELS, TOKENS, WINDOW, bart, bert, gemma3, gpt2, mistral, saved, texts
from integrations.swapped_models import quality, swap, tokenized
from planned import points_of

import efficient_attn as ea
from efficient_attn.errors import DataError, DtypeError, OptionError, UnsupportedError
from efficient_attn.integrations.transformers import swapped
from efficient_attn.integrations.transformers.swapping import run
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION
from efficient_attn.report.table import ORIGINAL
from efficient_attn.studies import find
from efficient_attn.studies.swap.plan import MEAN_POOL
from efficient_attn.studies.swap.view import show_quantity

pytestmark = pytest.mark.usefixtures("hasty")

# Of float32 hidden states of order one after three layers, in sums of a few dozen terms taken in another
# order: 2^-23 for each of some ten steps, in norm. Cosines and divergences differ by the square of it.
ROUNDING = 1e-6


def hidden_states(model, ids):
    with torch.no_grad():
        return model(ids, output_hidden_states=True).hidden_states[-1][0].double()


def relative_error(states, exact):
    return float((states - exact).norm() / exact.norm())


def distance(states, exact):
    return 1 - float(torch.cosine_similarity(states, exact, dim=-1).mean())


def test_an_encoder_is_compared_by_hidden_states_and_embeddings_of_every_text(encoder):
    records = quality(
        swap(encoder, ["window"], options={"window": {"window": [5]}}, by_layer=True, layers=[1])
    )
    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder).eval()
    hidden, pooled = [], []
    for ids in tokenized(encoder):
        exact = hidden_states(model, ids)
        with swapped(model, "window", window=5):
            states = hidden_states(model, ids)
        hidden.append(relative_error(states, exact))
        pooled.append(distance(states.mean(0), exact.mean(0)))
    assert min(pooled) > 100 * ROUNDING**2
    record = records["window(window=5)", None]
    assert record.texts == 3
    # The states are those of two runs of the same model, so only rounding within one run is left.
    assert record.hidden_relative_error_draws == pytest.approx(hidden, rel=1e-4)
    assert record.mean_pool_distance_draws == pytest.approx(pooled, rel=1e-3)
    assert record.mean_pool_distance == pytest.approx(fmean(pooled), rel=1e-3)
    assert record.next_token_kl is None and record.perplexity is None
    # A layer alone is the model with that layer swapped.
    with swapped(model, {1: ("window", {"window": 5})}):
        expected = relative_error(hidden_states(model, ids), exact)
    alone = records["window(window=5)", 1].hidden_relative_error_draws[-1]
    assert alone == pytest.approx(expected, rel=1e-3) and expected > 100 * ROUNDING


def test_a_causal_model_is_compared_by_its_next_tokens(decoder):
    records = quality(swap(decoder, ["window"], options={"window": {"window": [3]}}))
    record = records["window(window=3)", None]
    model = transformers.AutoModelForCausalLM.from_pretrained(decoder).eval()
    divergence, perplexity, exact_perplexity = [], [], []
    for ids in tokenized(decoder):
        with torch.no_grad():
            p = model(ids).logits[0].double().softmax(-1)
            exact_perplexity.append(float(model(ids, labels=ids).loss.exp()))
            with swapped(model, "window", window=3):
                q = model(ids).logits[0].double().softmax(-1)
                perplexity.append(float(model(ids, labels=ids).loss.exp()))
        divergence.append(float((p * (p / q).log()).sum(-1).mean()))
    assert record.next_token_kl_draws == pytest.approx(divergence, rel=1e-3)
    assert record.perplexity_draws == pytest.approx(perplexity, rel=1e-5)
    assert records[OWN, None].perplexity_draws == pytest.approx(exact_perplexity, rel=1e-5)


def test_a_causal_model_without_a_head_is_compared_by_its_hidden_states(tmp_path):
    folder = saved(gpt2().transformer, tmp_path)
    record = quality(swap(folder, ["window"], options={"window": {"window": [3]}}))["window(window=3)", None]
    assert record.hidden_relative_error > 100 * ROUNDING
    assert record.mean_pool_distance > 100 * ROUNDING**2
    assert record.next_token_kl is None


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


def test_layers_that_slide_stay_exact_and_are_told(tmp_path):
    folder = saved(MODELS["modernbert"](), tmp_path)
    plan = find("swap").plan(folder, ["performer-positive"], texts=texts(1), by_layer=True)
    assert {point.case.layer for point in points_of(plan)} == {None, 0, 2}
    assert "1 of 3 attentions stay exact (sliding)" in plan.notes[0]


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


def test_logits_are_computed_in_blocks_of_positions_with_all_that_the_head_does():
    """The cap on the logits of Gemma is part of the head."""
    model = gemma3(final_logit_softcapping=0.5)
    ids, sizes = torch.randint(0, 40, (1, 20)), []
    with torch.no_grad():
        whole = model(ids).logits[0]
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: sizes.append(out.shape[-2]))
    outputs = run(model, ids, predicts=True)
    assert not sizes
    torch.testing.assert_close(outputs.logits(slice(3, 9)), whole[3:9])
    assert sizes[-1] == 6 and model(ids).logits.shape[1] == 20


def test_the_models_own_attention_is_put_back_even_after_an_error(encoder):
    model, tokenizer = bert(), transformers.AutoTokenizer.from_pretrained(encoder)
    ids = tokenized(encoder)[0]
    before, implementation = model(ids).logits, model.config._attn_implementation

    def broken(q, k, v):
        raise RuntimeError("no such thing")

    unbuilt = {"linformer": {"sharing": ["layers"], "rank": [8]}}
    records = quality(swap((model, tokenizer), [broken, "linformer"], options=unbuilt))
    assert records["broken", None].status == "error"
    assert records["linformer(sharing=layers, rank=8)", None].status == "unsupported"
    assert model.config._attn_implementation == implementation
    assert not any(isinstance(module, ea.Backend) for module in model.modules())
    assert torch.equal(model(ids).logits, before)


def test_a_run_times_all_variants_and_is_written_and_read(encoder, tmp_path):
    request = {"options": {"window": {"window": [3]}}, "rounds": 2, "out": tmp_path / "run", "draws": 1}
    results = swap(encoder, ["window", "performer-positive"], **request)
    timed = [record for record in results.records if record.case.kind == "time"]
    memories = [record for record in results.records if record.case.kind == "memory"]
    assert len(timed) == len(memories) == 5
    assert all(len(r.round_sizes) == 2 and len(r.times_s) == sum(r.round_sizes) >= 4 for r in timed)
    assert all(r.peak_bytes > 0 for r in memories)
    assert {bool(r.parameter_bytes) for r in memories if r.case.backend == "performer-positive"} == {True}
    again = ea.read(tmp_path / "run")
    assert again.records == results.records
    about = again.environment["model"]
    assert about["class"] == "BertForMaskedLM" and set(about["texts"]) == set(texts())
    rows = {row[0]: row for row in again.tables()[0].rows}
    assert set(rows) == {ORIGINAL, "exact", UNIFORM_ATTENTION, "window(window=3)", "performer-positive"}
    distances = quality(again)["window(window=3)", None]
    assert rows["window(window=3)"][1] == show_quantity(MEAN_POOL, distances.mean_pool_distance)


def test_every_length_is_a_swap_of_its_own_and_layers_filter_those_replaced_alone(encoder):
    request = {"seq_lens": (8, TOKENS), "by_layer": True, "layers": (1,)}
    plan = find("swap").plan(encoder, ["window"], texts=texts(1), **request)
    parts = {(point.case.tokens, point.case.layer) for point in points_of(plan)}
    assert parts == {(8, None), (8, 1), (TOKENS, None), (TOKENS, 1)}


def test_the_most_promising_candidates_are_measured_first(decoder):
    plan = find("swap").plan(decoder, texts=texts(), seq_lens=TOKENS, by_layer=True)
    points = points_of(plan)
    # The first pass predicts the others, which differ in their attention alone.
    first, *others = (point.cost for point in points if point.case.kind == "swap" and not point.case.seed)
    assert max(others) <= 10 * first
    labels = list(dict.fromkeys(point.case.label for point in points))
    first = ["window-clusters", "window", "window(global_tokens=4)"]
    assert labels[:6] == [OWN, "exact", UNIFORM_ATTENTION, *first]


def test_a_run_of_a_model_with_other_weights_is_not_continued(encoder, tmp_path):
    run_folder = tmp_path / "run"
    swap(encoder, ["exact"], out=run_folder)
    model = bert()
    model.bert.embeddings.word_embeddings.weight.data.mul_(2)
    with pytest.raises(DataError, match=r"model.weights_sha256 was .*, is "):
        swap(saved(model, tmp_path / encoder.name), ["exact"], resume=True, out=run_folder)


def test_texts_are_cut_to_one_length_and_to_what_the_model_can_take(encoder):
    words = {"short": " ".join(["w1"] * 10), "long": " ".join(["w2"] * 30)}
    # [CLS] and [SEP] are tokens too.
    for given, tokens in ((words, 12), ([" ".join(["w3"] * 500)], 64)):
        points = points_of(find("swap").plan(encoder, ["exact"], texts=given))
        assert {point.case.tokens for point in points} == {tokens}


def with_tokenizer(model, folder):
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("model", "changes", "error", "message"),
    [
        (str, {"seq_lens": 65}, OptionError, "seq_len is from 2 to the 64 positions of this model, not 65"),
        (str, {"seq_lens": 60}, DataError, "The text 'text 0' has 42 tokens, not 60"),
        (str, {"texts": "a text"}, DtypeError, "texts is a list of texts, or a mapping"),
        (str, {"draws": 0}, OptionError, "draws"),
        (lambda folder: 3, {}, DtypeError, r"model is a folder, a pair .* not int"),
        (lambda folder: bert(), {}, DtypeError, r"a pair \(model, tokenizer\) .*, not BertForMaskedLM"),
        (lambda folder: with_tokenizer(bert().train(), folder), {}, OptionError, "training mode"),
        (lambda folder: with_tokenizer(bart(), folder), {}, UnsupportedError, "is an encoder-decoder"),
        (
            lambda folder: with_tokenizer(bert(vocab_size=20), folder),
            {},
            DataError,
            r"The tokenizer has ids up to 4\d, this model only 20 embeddings",
        ),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(encoder, model, changes, error, message):
    with pytest.raises(error, match=message):
        swap(model(encoder), ["exact"], **changes)


def only_a_pickle(path):
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")


def code_of_its_own(path):
    config = json.loads((path / "config.json").read_text())
    changes = {"model_type": "strange", "auto_map": {"AutoConfig": "modeling.Strange"}}
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "is not a folder"),
        (lambda path: (path / "config.json").unlink(), r"holds no config\.json"),
        (lambda path: (path / "config.json").write_text("{"), "Cannot load a model"),
        (only_a_pickle, r"no model\.safetensors, .* pickles, which can run code"),
        (code_of_its_own, "Cannot load a model"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_in_one_line(encoder, tmp_path, change, message):
    shutil.copytree(encoder, tmp_path / "m")
    change(tmp_path / "m")
    with pytest.raises(DataError, match=message) as caught:
        swap(tmp_path / "m", ["exact"])
    assert "\n" not in str(caught.value)


def test_the_command_names_texts_by_their_files_and_refuses_in_one_line(
    encoder, tmp_path, monkeypatch, undrawn
):
    pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
    from command_line import command

    monkeypatch.chdir(tmp_path)
    for number, text in enumerate(texts().values()):
        Path(f"{number}.txt").write_text(text)
    request = ["swap", str(encoder), "--text", "0.txt", "--text", "1.txt", "--rounds", "1", "--draws", "1"]
    code, out, _ = command(*request, "--backend", "exact")
    title, *_, folder = out.splitlines()
    assert code == 0 and title.startswith("Attention replaced: ") and " on 2 texts #" in title
    environment = json.loads(Path(folder, "environment.json").read_text())
    assert set(environment["model"]["texts"]) == {"0.txt", "1.txt"}
    assert str(tmp_path) not in json.dumps(environment)
    for words, message in (
        (["--text", "absent.txt"], "--text: cannot read absent.txt"),
        (["--text", "./0.txt"], "two files are called '0.txt'"),
    ):
        code, _, err = command(*request, *words)
        assert code == 2 and err.startswith("error: ") and message in err and err.count("\n") == 1
