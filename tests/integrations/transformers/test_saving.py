"""Saved and loaded, a model has the same outputs; files that do not fit it are refused in one line."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import NO_DROPOUT, SIZES, bert, gemma3, inputs, llama, logits
from integrations.hf_models import saved as saved_with_tokenizer

import efficient_attn as ea
from efficient_attn.backend import Backend
from efficient_attn.errors import DataError, UnsupportedError
from efficient_attn.integrations.transformers import attach, load
from efficient_attn.integrations.transformers.loading import open_model

BATCH = inputs()


def assert_same(model, expected):
    """Equal logits of two models, bit for bit."""
    assert torch.equal(logits(model, BATCH), logits(expected, BATCH))


def linformer(**options):
    """A BERT whose mixtures have been trained a little."""
    model = attach(bert(), "linformer", rank=8, **options)
    with torch.no_grad():
        for backend in (m for m in model.modules() if isinstance(m, Backend)):
            for parameter in backend.parameters():
                parameter.add_(torch.randn(parameter.shape) / 100)
    return model


def calibrated():
    model = attach(llama(), "performer-full", num_features=16)
    ea.calibrate(model, inputs(left=0, right=0)["input_ids"])
    model.model.layers[1].self_attn.efficient_attn.redraw(7)
    return model


MAKERS = {
    "keys as values": lambda: linformer(sharing="key-value"),
    "calibrated, redrawn": calibrated,
    "by layer": lambda: attach(bert(), {"0-1": ("window", {"window": 7}), 2: "performer-trig"}),
    "sliding heads": lambda: attach(gemma3(), "by-head", heads={"1": ("window", {"global_tokens": 2})}),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_saved_model_is_loaded_with_its_backends_options_and_state_and_saved_again(make, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config.efficient_attn == model.config.efficient_attn
    assert_same(loaded, model)
    loaded.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert_same(load(tmp_path / "shards"), model)


def test_a_plan_fits_a_model_with_and_without_its_head(tmp_path):
    model = llama()
    attach(model.model, "performer-positive")
    model.save_pretrained(tmp_path / "whole")
    assert_same(load(tmp_path / "whole"), model)
    attach(model, "performer-positive", seed=1).model.save_pretrained(tmp_path / "body")
    ids = inputs()["input_ids"]
    with torch.no_grad():
        expected = model.model(ids).last_hidden_state
        assert torch.equal(load(tmp_path / "body")(ids).last_hidden_state, expected)


WITHOUT_US = """
import sys
from transformers import AutoModel
try:
    AutoModel.from_pretrained(sys.argv[1])
except ValueError as error:
    print(error)
assert "efficient_attn" not in sys.modules
"""


@pytest.mark.slow
def test_without_this_package_from_pretrained_refuses_a_saved_model(saved):
    command = [sys.executable, "-c", WITHOUT_US, str(saved)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    assert 'attn_implementation="efficient_attn"` is not supported' in process.stdout


def test_plain_from_pretrained_runs_no_model_without_its_backends_unless_sdpa_is_requested(saved):
    loaded = transformers.AutoModel.from_pretrained(saved)
    refused = r"No backend is attached to this BertSelfAttention.*load\(path\)"
    with pytest.raises(UnsupportedError, match=refused):
        loaded(**BATCH)
    with pytest.raises(DataError, match="holds a model with attached backends"):
        open_model(saved)
    plain = transformers.BertForMaskedLM.from_pretrained(saved, attn_implementation="sdpa")
    assert not [name for name in plain.state_dict() if "efficient_attn" in name]
    torch.testing.assert_close(logits(plain, BATCH), logits(bert(), BATCH), rtol=1e-5, atol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("linformer")
    linformer().save_pretrained(path)
    return path


@pytest.fixture
def saved(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "saved")


def change_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def first_layer(config):
    return next(iter(config["efficient_attn"]["layers"].values()))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c.pop("efficient_attn"), "names no backends"),
        (lambda c: c.update(efficient_attn=[1]), "not a plan of format 1"),
        (lambda c: c["efficient_attn"].update(format=2), "not a plan of format 1"),
        (lambda c: first_layer(c).pop("options"), "lacks one of the fields"),
        (lambda c: first_layer(c).update(backend="evil.py:f"), "'evil.py:f', which is not registered"),
        (lambda c: first_layer(c).update(options={"ranks": 4}), "unexpected keyword argument 'ranks'"),
        (lambda c: c["efficient_attn"]["layers"].popitem(), "belong to another model"),
        (lambda c: first_layer(c).update(max_tokens=1 << 39), "backend 'linformer' cannot be built"),
        (lambda c: c.update(architectures=["logging"]), "which transformers lacks"),
        (lambda c: c.update(hidden_size="x"), "Cannot load a model"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(saved, change, match):
    change_config(saved, change)
    with pytest.raises(DataError, match=match):
        load(saved)


MIX = "bert.encoder.layer.0.attention.self.efficient_attn.core.mix_keys"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(MIX), "do not fit backend 'linformer'.*Missing"),
        (lambda t: t.update({MIX: torch.zeros(64, 8)}), "do not fit backend 'linformer'.*size mismatch"),
        (lambda t: t.update({f"{MIX}_too": torch.zeros(1)}), "do not fit backend 'linformer'.*Unexpected"),
        (lambda t: t.pop("bert.encoder.layer.1.output.dense.weight"), "to another model: it lacks"),
        (lambda t: t.update(strange=torch.zeros(1)), "to another model: it has, beyond the model, strange"),
    ],
)
def test_parameters_of_another_model_are_refused(saved, change, match):
    change_tensors(saved, change)
    with pytest.raises(DataError, match=match):
        load(saved)


@pytest.mark.parametrize(
    "content",
    [
        *(lambda whole, n=n: whole[:n] for n in (4, 100, -1)),
        lambda _: (1 << 40).to_bytes(8, "little") + b"{}",
        lambda _: b"\x80\x04\x95pickle" * 9,
    ],
)
def test_a_file_that_was_cut_off_or_is_hostile_is_refused(saved, content):
    path = saved / "model.safetensors"
    path.write_bytes(content(path.read_bytes()))
    refused = r"Cannot load a model|is not a valid safetensors file"
    with pytest.raises(DataError, match=refused):
        load(saved)


def test_an_encoder_that_was_saved_without_its_pooler_has_none_and_half_a_pooler_is_refused(tmp_path):
    config = transformers.BertConfig(**SIZES, **NO_DROPOUT)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    ids = inputs()["input_ids"]
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        output = open_model(saved_with_tokenizer(model, tmp_path / "exact")).model(ids)
        assert torch.equal(output.last_hidden_state, expected) and output.pooler_output is None
        attach(model, "window", window=3).save_pretrained(tmp_path / "window")
        assert torch.equal(load(tmp_path / "window")(ids).last_hidden_state, model(ids).last_hidden_state)
    saved_with_tokenizer(transformers.BertModel(transformers.BertConfig(**SIZES)), tmp_path / "part")
    change_tensors(tmp_path / "part", lambda tensors: tensors.pop("pooler.dense.bias"))
    with pytest.raises(DataError, match=r"it lacks pooler\.dense\.bias"):
        open_model(tmp_path / "part")
