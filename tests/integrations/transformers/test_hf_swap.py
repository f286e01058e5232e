"""Distances of models with swapped attention from themselves; models are tiny, random, made here."""

from statistics import fmean, stdev

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import MODELS, TOKENS, WINDOW, gemma3, gpt2, mistral, saved, texts
from integrations.swapped_models import quality, swap, tokenized
from planned import points_of

from efficient_attn.integrations.transformers import swapped
from efficient_attn.integrations.transformers.swapping import run
from efficient_attn.measure.variants import OWN
from efficient_attn.studies import find
from efficient_attn.studies.swap.analysis import spread

pytestmark = pytest.mark.usefixtures("hasty")

# Of float32 hidden states of order one after three layers, in sums of a few dozen terms taken in another
# order: 2^-23 for each of some ten steps, in norm. Cosines and divergences differ by the square of it.
ROUNDING = 1e-6


def test_an_encoder_is_compared_by_hidden_states_and_embeddings_of_every_text(encoder):
    record = quality(swap(encoder, ["window"], options={"window": {"window": [5]}}))["window(window=5)", None]
    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder).eval()
    hidden, pooled, tokens, first = [], [], [], []
    for ids in tokenized(encoder):
        with torch.no_grad():
            exact = model(ids, output_hidden_states=True).hidden_states
            with swapped(model, "window", window=5):
                other = model(ids, output_hidden_states=True).hidden_states
        h, e = other[-1][0].double(), exact[-1][0].double()
        hidden.append(float((h - e).norm() / e.norm()))
        pooled.append(1 - float(torch.cosine_similarity(h.mean(0), e.mean(0), dim=0)))
        tokens.append(1 - float(torch.cosine_similarity(h, e, dim=1).mean()))
        first.append(1 - float(torch.cosine_similarity(h[0], e[0], dim=0)))
    assert min(pooled) > 100 * ROUNDING**2
    assert record.texts == 3
    # The states are those of two runs of the same model, so only rounding within one run is left.
    assert record.hidden_relative_error_draws == pytest.approx(hidden, rel=1e-4)
    assert record.mean_pool_distance_draws == pytest.approx(pooled, rel=1e-3)
    assert record.token_distance_draws == pytest.approx(tokens, rel=1e-3)
    assert record.first_token_distance_draws == pytest.approx(first, rel=1e-3)
    assert record.mean_pool_distance == pytest.approx(fmean(pooled), rel=1e-3)
    assert record.next_token_kl is None and record.perplexity is None


def test_the_model_is_compared_with_its_own_attention_whatever_is_measured_first(encoder):
    options = {"window": {"window": [5]}}
    plan = find("swap").plan(encoder, ["window"], texts=texts(), seq_lens=TOKENS, options=options)
    (window,) = (one for one in points_of(plan) if one.case.kind == "swap" and one.case.backend == "window")
    alone = window.measure()
    assert alone.hidden_relative_error > 100 * ROUNDING
    results = swap(encoder, ["window"], options=options)
    assert quality(results)[window.case.label, None].hidden_relative_error == alone.hidden_relative_error


def test_a_causal_model_is_compared_by_its_next_tokens(decoder):
    found = quality(swap(decoder, ["window"], options={"window": {"window": [3]}}))
    record = found["window(window=3)", None]
    model = transformers.AutoModelForCausalLM.from_pretrained(decoder).eval()
    divergence, unlike, perplexity, own, pooled = [], [], [], [], []
    for ids in tokenized(decoder):
        with torch.no_grad():
            exact = model(ids, output_hidden_states=True)
            p = exact.logits[0].double().softmax(-1)
            own.append(float(model(ids, labels=ids).loss.exp()))
            with swapped(model, "window", window=3):
                given = model(ids, output_hidden_states=True)
                other = given.logits[0].double().softmax(-1)
                perplexity.append(float(model(ids, labels=ids).loss.exp()))
        divergence.append(float((p * (p / other).log()).sum(-1).mean()))
        h, e = (one.hidden_states[-1][0].double().mean(0) for one in (given, exact))
        pooled.append(1 - float(torch.cosine_similarity(h, e, dim=0)))
        unlike.append(float((p.argmax(-1) != other.argmax(-1)).double().mean()))
    assert record.next_token_kl_draws == pytest.approx(divergence, rel=1e-3)
    assert record.next_token_disagreement_draws == pytest.approx(unlike) and max(unlike) > 0
    assert record.perplexity_draws == pytest.approx(perplexity, rel=1e-5)
    assert found[OWN, None].perplexity_draws == pytest.approx(own, rel=1e-5)
    assert record.mean_pool_distance_draws == pytest.approx(pooled, rel=1e-3)
    assert record.first_token_distance is None


def test_a_causal_model_without_a_head_is_compared_by_its_hidden_states(tmp_path):
    folder = saved(gpt2().transformer, tmp_path)
    record = quality(swap(folder, ["window"], options={"window": {"window": [3]}}))["window(window=3)", None]
    assert record.hidden_relative_error > 100 * ROUNDING
    assert record.mean_pool_distance > 100 * ROUNDING**2
    assert record.next_token_kl is None and record.first_token_distance is None


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


def test_a_model_whose_layers_all_slide_takes_a_window_of_its_own_width_alone(tmp_path):
    found = quality(swap(saved(mistral(), tmp_path), ["window", "performer-positive"]))
    window = found["window", None]
    assert window.case.options["window"] == WINDOW and window.case.num_kv_heads == 2
    assert window.hidden_relative_error < ROUNDING
    assert found["exact", None].hidden_relative_error < ROUNDING
    assert found["performer-positive", None].status == "unsupported"


@pytest.mark.parametrize("make", [gpt2, gemma3])
def test_logits_are_computed_in_blocks_of_positions_with_all_that_the_head_does(make, monkeypatch):
    """The cap on the logits of Gemma is part of the head."""
    model = make(**({"final_logit_softcapping": 0.5} if make is gemma3 else {}))
    ids, sizes = torch.randint(0, 40, (1, 20)), []
    with torch.no_grad():
        whole = model(ids).logits[0]
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: sizes.append(out.shape[-2]))
    outputs = run(model, ids, predicts=True)
    assert set(sizes) == {1}
    torch.testing.assert_close(outputs.logits(slice(3, 9)), whole[3:9])
    assert sizes[-1] == 6 and model(ids).logits.shape[1] == 20
