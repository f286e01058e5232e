"""Capturing q, k, v from a local model; models here are tiny, random and made on the spot."""

import sys

import pytest
import torch
from integrations.hf_models import tokenizer
from planned import points_of
from safetensors.torch import save_file

import efficient_attn as ea
from efficient_attn.errors import DataError, MissingPackageError, OptionError
from efficient_attn.integrations.capture import capture_folder, save_activations
from efficient_attn.measure.inputs import Captured, read_activations
from efficient_attn.studies import find

WORDS = ("alice", "was", "beginning", "to", "get", "very", "tired")
TEXT = "alice was beginning to get very very tired"
HEADS, HEAD_DIM, LAYERS = 2, 4, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    path = tmp_path_factory.mktemp("encoder")
    words = tokenizer(WORDS)
    words.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=HEADS * HEAD_DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    transformers.BertModel(config).save_pretrained(path)
    return path


def projections(folder, text):
    """What the three linear layers of each attention give, read by forward hooks instead."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    seen = []
    for layer in model.encoder.layer:
        for linear in (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value):
            linear.register_forward_hook(lambda module, arguments, output: seen.append(output))
    with torch.no_grad():
        model(ids)
    heads = [output.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for output in seen]
    return [heads[start : start + 3] for start in range(0, len(heads), 3)]


def test_what_is_captured_is_what_the_models_projections_give(folder):
    captured = capture_folder(folder, TEXT)
    expected = projections(folder, TEXT)
    assert list(captured.layers) == list(range(LAYERS))
    assert captured.scale == HEAD_DIM**-0.5
    for layer, activations in captured.layers.items():
        for tensor, expected_tensor in zip(activations, expected[layer], strict=True):
            # Float32 sums of 8 to 16 terms through three layers, taken in another order.
            torch.testing.assert_close(tensor, expected_tensor, rtol=1e-5, atol=1e-5)


def test_captured_layers_are_written_and_read_back_in_half_precision(folder, tmp_path):
    captured = capture_folder(folder, TEXT, layers=[2, 0], name="tiny")
    save_activations(captured, tmp_path / "tiny.safetensors")
    stored = read_activations(tmp_path / "tiny.safetensors")
    assert list(stored.layers) == [0, 2]
    assert stored.tokens == captured.tokens == ("[CLS]", *TEXT.split(), "[SEP]")
    assert stored.scale == captured.scale
    assert stored.about == captured.about
    assert stored.about["model"] == "tiny"
    assert torch.equal(stored.layers[2].v, captured.layers[2].v.half())


def test_swap_saves_the_activations_of_a_folder(folder, tmp_path):
    path = tmp_path / "tiny.safetensors"
    plan = find("swap").plan(folder, ["window"], texts=[TEXT], save=path, layers=[1])
    tokens = len(capture_folder(folder, TEXT).tokens)
    assert f"Saved layers 1 on {tokens} tokens: {path}." in plan.notes
    expected = capture_folder(folder, TEXT, layers=[1]).layers[1]
    for half, tensor in zip(read_activations(path).layers[1], expected, strict=True):
        torch.testing.assert_close(half.double(), tensor.double(), rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"layers": [1]}, OptionError, "layers name those that are replaced alone"),
        ({"save": "x.bin"}, OptionError, "save is a file that ends in .safetensors, not 'x.bin'"),
        ({"save": __file__ + "/../x.safetensors", "layers": [7]}, OptionError, "layers are from 0 to 2"),
    ],
)
def test_what_cannot_be_saved_is_refused(folder, settings, error, message):
    with pytest.raises(error, match=message):
        find("swap").plan(folder, ["window"], texts=[TEXT], **settings)


def test_a_long_text_is_cut_to_the_tokens_asked_for_and_to_what_the_model_can_take(folder):
    assert len(capture_folder(folder, TEXT, max_tokens=5).tokens) == 5
    assert len(capture_folder(folder, 20 * TEXT, max_tokens=500).tokens) == 32


@pytest.mark.parametrize("layers", [[3], [-1], []])
def test_layers_that_the_model_does_not_have_are_refused(folder, layers):
    with pytest.raises(OptionError, match="layers are from 0 to 2 in this model, not"):
        capture_folder(folder, TEXT, layers=layers)


def test_more_than_the_size_asked_for_is_refused_before_the_model_runs(folder):
    # Two layers of three tensors with nine tokens of eight entries, two bytes each.
    size = 2 * 3 * 9 * HEADS * HEAD_DIM * 2
    assert len(capture_folder(folder, TEXT, layers=[0, 1], max_tokens=9, most_bytes=size).layers) == 2
    with pytest.raises(OptionError, match="2 layers of 9 tokens take up to 864 B, more than 863 B"):
        capture_folder(folder, TEXT, layers=[0, 1], max_tokens=9, most_bytes=size - 1)


@pytest.mark.parametrize("name", ["gpt2", "llama", "modernbert"])
def test_what_a_layer_shows_its_queries_is_kept_and_read_back(name, tmp_path):
    """q, k and v of decoders, grouped queries and sliding layers give the outputs that the model has."""
    pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")
    from integrations.hf_models import MODELS, saved, texts

    from efficient_attn.integrations.transformers.swapping import sites_of

    (text, *_) = texts().values()
    model = MODELS[name]()
    captured = capture_folder(saved(model, tmp_path), text)
    save_activations(captured, tmp_path / "x.safetensors")
    stored = read_activations(tmp_path / "x.safetensors")
    patterns = {"gpt2": "causal over all keys", "llama": "causal over all keys"}
    expected = (
        {1: "bidirectional over 9 keys"} if name == "modernbert" else dict.fromkeys(range(3), patterns[name])
    )
    assert stored.patterns == captured.patterns == expected
    outputs = {}
    for site in sites_of(model).ordered:
        projection = getattr(site.module, "c_proj", None) or getattr(site.module, "o_proj", None)
        projection = projection or site.module.Wo
        projection.register_forward_pre_hook(
            lambda module, arguments, layer=site.layer: outputs.update({layer: arguments[0]})
        )
    tokenizer = __import__("transformers").AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        model(tokenizer(text, return_tensors="pt")["input_ids"])
    for layer, (q, k, v) in captured.layers.items():
        told = captured.patterns.get(layer, "")
        output = ea.attention(
            q, k, v, "window" if "over 9" in told else "exact", causal="causal" in told, scale=captured.scale,
            **({"window": 9} if "over 9" in told else {}),
        )  # fmt: skip
        torch.testing.assert_close(output.transpose(1, 2).flatten(2), outputs[layer], rtol=1e-5, atol=1e-5)
        assert k.shape[1] == (2 if name == "llama" else 4)


def test_layers_that_are_causal_are_measured_causally_and_sliding_ones_refused(tmp_path):
    pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")
    from integrations.hf_models import gpt2, saved, texts

    (text, *_) = texts().values()
    save_activations(capture_folder(saved(gpt2(), tmp_path), text), tmp_path / "x.safetensors")
    records = ea.mse(["exact"], inputs=[tmp_path / "x.safetensors"]).records
    assert {record.case.causal for record in records} == {True}
    assert all(r.output_relative_error < 1e-5 for r in records if r.case.backend == "exact")
    tensors = {f"layer.0.{letter}": torch.ones(1, 2, 2) for letter in "qkv"}
    about = {"patterns": '{"0": "causal over 5 keys"}'}
    save_file(tensors, tmp_path / "y.safetensors", metadata=about)
    with pytest.raises(DataError, match=r"Layer 0 of y\.safetensors is causal over 5 keys in its model"):
        ea.mse(["exact"], inputs=[tmp_path / "y.safetensors"])


def test_of_a_file_with_both_the_bidirectional_layers_are_measured_unless_all_are_causal(tmp_path):
    tensors = {f"layer.{layer}.{x}": torch.randn(1, 6, 4) for layer in (0, 1) for x in "qkv"}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"patterns": '{"1": "causal over all keys"}'})
    arguments = {"inputs": tmp_path / "x.safetensors", "seq_lens": 6}
    for causal, layers in ((False, {0}), (True, {0, 1})):
        points = points_of(find("bench").plan(["exact"], causal=causal, **arguments))
        records = {(point.case.inputs, point.case.causal) for point in points if point.case.kind == "error"}
        assert records == {(f"x.safetensors(layer={layer})", causal) for layer in layers}


@pytest.mark.parametrize("told", ["[]", "{", '{"0": 1}', '{"a": "b"}'])
def test_patterns_that_are_none_are_refused(told, tmp_path):
    tensors = {f"layer.0.{letter}": torch.ones(1, 2, 2) for letter in "qkv"}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"patterns": told})
    with pytest.raises(DataError, match="patterns in the metadata cannot be read"):
        read_activations(tmp_path / "x.safetensors")


def test_without_transformers_the_extra_is_named(tmp_path, monkeypatch):
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    ours = ("efficient_attn.integrations.transformers", "efficient_attn.studies.swap.model")
    for name in [name for name in sys.modules if name.startswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for ask in (lambda: capture_folder(tmp_path, TEXT), lambda: ea.swap(tmp_path, ["exact"])):
        with pytest.raises(MissingPackageError, match=r"pip install 'transformers>=5\.14' tokenizers"):
            ask()


def test_what_cannot_be_stored_or_written_is_said(tmp_path):
    vast = torch.full((1, 1, 2, 2), 1e6)
    with pytest.raises(DataError, match=r"layer\.0\.q has entries beyond the range of float16"):
        save_activations(Captured(layers={0: (vast, vast, vast)}, about={}), tmp_path / "vast.safetensors")
    small = torch.ones(1, 1, 2, 2)
    with pytest.raises(DataError, match=r"Cannot write activations to .*: No such file or directory"):
        save_activations(
            Captured(layers={0: (small, small, small)}, about={}), tmp_path / "absent" / "x.safetensors"
        )
