"""Capturing q, k and v from folders of tiny random models, and measuring what is stored of them."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from hf_models import MODELS, saved, texts
from safetensors.torch import save_file
from study_points import points_of, study

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError
from efficient_attn.integrations.capture import save_activations
from efficient_attn.integrations.transformers.loading import open_model
from efficient_attn.integrations.transformers.swapping import capture_text, sites_of
from efficient_attn.measure.inputs import Captured, read_activations

TEXT = "w3 w1 w4 w1 w5 w9 w2"


@pytest.mark.parametrize("name", ["gpt2", "llama", "modernbert"])
def test_layers_that_read_all_tokens_are_captured_with_their_pattern_and_give_their_outputs(name, tmp_path):
    (text, *_) = texts().values()
    model, causal = MODELS[name](), name != "modernbert"
    captured = capture_text(open_model(saved(model, tmp_path)), text)
    save_activations(captured, tmp_path / "x.safetensors")
    stored = read_activations(tmp_path / "x.safetensors")
    assert list(captured.layers) == ([0, 1, 2] if causal else [0, 2])
    expected = dict.fromkeys(range(3), "causal over all keys") if causal else {}
    assert stored.patterns == captured.patterns == expected
    outputs = {}
    for site in sites_of(model).ordered:
        (projection,) = (x for x in map(site.module._modules.get, ("c_proj", "o_proj", "Wo")) if x)
        projection.register_forward_pre_hook(lambda _, x, layer=site.layer: outputs.update({layer: x[0]}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        model(tokenizer(text, return_tensors="pt")["input_ids"])
    for layer, (q, k, v) in captured.layers.items():
        output = ea.attention(q, k, v, causal=causal, scale=captured.scale)
        torch.testing.assert_close(output.transpose(1, 2).flatten(2), outputs[layer], rtol=1e-5, atol=1e-5)
        assert k.shape[1] == (2 if name == "llama" else 4)


def test_swap_saves_the_layers_of_a_folder_or_of_a_pair_in_half_precision(encoder, tmp_path):
    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder).eval()
    pair = (model, transformers.AutoTokenizer.from_pretrained(encoder))
    captured = capture_text(open_model(encoder), TEXT, layers=[2, 0], max_tokens=7)
    assert captured.tokens == ("[CLS]", *TEXT.split()[:5], "[SEP]") and captured.scale == 8**-0.5
    for number, source in enumerate((encoder, pair)):
        path = tmp_path / f"{number}.safetensors"
        request = {"texts": [TEXT], "save": path, "layers": [2, 0], "seq_lens": 7}
        plan = study("swap", source, ["window"], **request)
        assert f"Saved layers 0, 2 on 7 tokens: {path}." in plan.notes()
        stored = read_activations(path)
        assert (list(stored.layers), stored.tokens) == ([0, 2], captured.tokens)
        assert ("weights_sha256" in stored.about) == (source is encoder)
        for layer, tensors in captured.layers.items():
            for half, tensor in zip(stored.layers[layer], tensors, strict=True):
                assert torch.equal(half, tensor.half())


def test_a_long_text_is_cut_to_what_the_model_can_take(encoder):
    assert len(capture_text(open_model(encoder), 20 * (TEXT + " "), max_tokens=500).tokens) == 64


def write_layers(path, patterns, layers=1):
    """A file of random activations with these patterns in its metadata."""
    tensors = {f"layer.{layer}.{x}": torch.randn(1, 6, 4) for layer in range(layers) for x in "qkv"}
    save_file(tensors, path, metadata={"patterns": patterns})
    return path


def test_of_a_file_with_both_the_bidirectional_layers_are_measured_unless_all_are_causal(tmp_path):
    path = write_layers(tmp_path / "x.safetensors", '{"1": "causal over all keys"}', layers=2)
    for causal, layers in ((False, {0}), (True, {0, 1})):
        points = points_of(study("bench", ["exact"], causal=causal, inputs=path, seq_lens=6))
        records = {(point.case.inputs, point.case.causal) for point in points if point.case.kind == "error"}
        assert records == {(f"x.safetensors(layer={layer})", causal) for layer in layers}


def swap(**settings):
    return lambda folder: study("swap", folder, ["window"], texts=[TEXT], **settings)


def store(entry, path):
    layers = {0: 3 * (torch.full((1, 1, 2, 2), entry),)}
    return lambda folder: save_activations(Captured(layers=layers, about={}), path)


def measure(patterns):
    return lambda folder: ea.mse(["exact"], inputs=[write_layers("x.safetensors", patterns)])


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (swap(layers=[0, 3], save="x.safetensors"), OptionError, "read all tokens: 0, 1, 2; not 3"),
        (swap(layers=[1]), OptionError, "layers name those that are replaced alone"),
        (swap(save="x.bin"), OptionError, "save is a new file that ends in .safetensors, not 'x.bin'"),
        (store(1e6, "x.safetensors"), DataError, r"layer\.0\.q has entries beyond the range of float16"),
        (store(1.0, "absent/x.safetensors"), DataError, "Cannot write .*: No such file or directory"),
        (measure('{"0": "causal over 5 keys"}'), DataError, r"Layer 0 of x\.safetensors is causal over 5"),
        (measure('{"a": "b"}'), DataError, "patterns in the metadata cannot be read"),
    ],
)
def test_what_cannot_be_captured_or_read_is_refused(request_, error, message, encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        request_(encoder)
