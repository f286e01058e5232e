"""Activations of models of the user's own, which a function in a file makes: captured and measured."""

import json

import pytest
import torch
from reference import reference_attention

pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")

from integrations.called import OPTIONS, command, projected, the_pair

import efficient_attn as ea
from efficient_attn.errors import OptionError
from efficient_attn.integrations.capture import captured_model
from efficient_attn.measure.inputs import read_activations

pytestmark = pytest.mark.usefixtures("called_models", "undrawn", "hasty")


@torch.no_grad()
def test_the_activations_of_a_file_are_captured_and_measured(capsys):
    assert command("capture", "models.py:make_pair", "--out", "all.safetensors") == 0
    out, told = capsys.readouterr()
    assert out == "all.safetensors\n" and "a model is made" in told
    assert "Layers are call sites: 0 is masked, 1 is causal." in told and "Layers 0, 1 on 12 tokens" in told
    kept = read_activations("all.safetensors")
    assert kept.about["model"] == "models.py:make_pair"
    assert json.loads(kept.about["sites"]) == ["masked", "causal"]
    assert kept.scale == 8**-0.5 and kept.patterns == {1: "causal over all keys"}
    model, x, _ = the_pair()
    for stored, tensor in zip(kept.layers[0], projected(model.masked, x), strict=True):
        # Three of twelve tokens are padding; float16 keeps eleven bits.
        torch.testing.assert_close(stored.double(), tensor[..., :9, :], rtol=2**-11, atol=1e-6)
    assert command("mse", "--inputs", "all.safetensors", "--backend", "window", "--size", "3", "-q") == 0
    asked = ["compare", "--inputs", "all.safetensors", "--backend", "window", "--set", "window.window=5"]
    quick = ["--draws", "1", "--rounds", "1", "--isolate", "none", "-q"]
    assert command(*asked, "--layer", "1", *quick, "--out", "run") == 0
    assert {record.case.causal for record in ea.read("run").records} == {True}


def test_layers_are_chosen_by_number_and_a_text_is_refused(capsys):
    asked = ["capture", "models.py:make_pair", "--out", "one.safetensors"]
    assert command(*asked, "--layers", "2") == 2
    assert "layers are from 0 to 1 in this model, not 2" in capsys.readouterr().err
    assert command(*asked, "--text", "models.py") == 2
    told = capsys.readouterr().err
    assert "text belongs to a Hugging Face folder; 'models.py:make_pair' decides its own" in told
    assert command("capture", ".", "--out", "one.safetensors") == 2
    assert "text (--text FILE) is needed with the folder '.'" in capsys.readouterr().err
    assert command(*asked, "--layers", "1", "--name", "mine") == 0
    kept = read_activations("one.safetensors")
    assert list(kept.layers) == [1] and kept.about["model"] == "mine"


def test_sites_of_a_call_are_named_by_the_modules_that_it_runs():
    captured = captured_model("models.py:make_call")
    assert json.loads(captured.about["sites"]) == ["Model.masked", "Model.causal"]
    assert json.loads(captured.about["left_out"]) == {"model": "its mask is no key mask and not causal"}
    assert json.loads(captured_model("models.py:make_plain").about["sites"]) == ["model"]


def test_mse_and_compare_capture_a_model_in_memory():
    found = ea.mse(["window"], model="models.py:make_pair", sizes=[3], draws=1)
    assert {record.case.inputs for record in found.records} == {"models.py:make_pair(layer=0)"}
    captured = captured_model("models.py:make_pair").layers[0]
    expected = reference_attention(*captured, scale=8**-0.5)
    window = reference_attention(*captured, scale=8**-0.5, visible=lambda i, j: abs(i - j) <= 1)
    (record,) = (r for r in found.records if r.case.backend == "window")
    relative = float((window - expected).norm() / expected.norm())
    assert record.output_relative_error == pytest.approx(relative, rel=1e-5)
    quick = {"draws": 1, "rounds": 1, "isolate": "none", "options": OPTIONS}
    found = ea.compare(["window"], model="models.py:make_pair", layer=1, **quick)
    assert {record.case.inputs for record in found.records} == {"models.py:make_pair(layer=1)"}
    with pytest.raises(OptionError, match=r"inputs \(decoder\) and model \(models.py:make_pair\) exclude"):
        ea.compare(["window"], model="models.py:make_pair", inputs="decoder")
    with pytest.raises(OptionError, match="text belongs to a model"):
        ea.mse(["window"], text="words")
    with pytest.raises(OptionError, match="text belongs to a Hugging Face folder"):
        ea.mse(["window"], model="models.py:make_pair", text="words")
