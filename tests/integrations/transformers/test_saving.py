"""Saved and loaded, a model has the same outputs; files that do not fit it are refused in one line."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from hf_models import SIZES, bert, config, gemma2, gemma3, gpt_oss, inputs, llama, logits, mistral, saved
from reference import relative_error

import efficient_attn as ea
from efficient_attn.backend import Backend
from efficient_attn.errors import DataError, UnsupportedError
from efficient_attn.integrations.transformers import attach, distillation_loss, load
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


def sinks():
    model = gpt_oss()
    # As in a loaded model.
    model.set_experts_implementation("grouped_mm")
    return attach(model, full=("window", {"window": 7}))


HALF = {"compute_dtype": "bfloat16"}
DTYPES = {"heads": {"0": ("exact", HALF), "1": ("window", {"window": 7, "global_tokens": 1, **HALF})}}


MAKERS = {
    "keys as values": lambda: linformer(sharing="key-value"),
    "calibrated, redrawn": calibrated,
    "by layer": lambda: attach(bert(), {"0-1": ("window", {"window": 7}), 2: "performer-trig"}),
    "sinks": sinks,
    "caps": lambda: attach(gemma2(), full=("by-head", {"heads": {"1": ("window", {"window": 7})}})),
    "dtypes": lambda: attach(llama(), "by-head", **DTYPES),
    "dtype of sliding layers": lambda: attach(mistral(), "exact", **HALF),
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


# Logits of the loaded model, and of a plain model with the same backend and the tensors of the file.
NEW_PROCESS = """
import json, sys
import torch, transformers
from safetensors.torch import load_file
from efficient_attn.integrations.transformers import attach, load
torch.set_num_threads(1)
folder, ids, (backend, options) = sys.argv[1], *map(json.loads, sys.argv[2:])
loaded = load(folder)
plain = type(loaded).from_pretrained(folder, attn_implementation="sdpa")
attach(plain, backend, **options).load_state_dict(load_file(f"{folder}/model.safetensors"), strict=False)
torch.save([model(torch.tensor(ids)).logits for model in (loaded, plain)], f"{folder}/out")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "backend", "options"),
    [
        (bert, "linformer", {"rank": 8}),
        (bert, "linear-hedgehog", {}),
        (llama, "performer-full", {"num_features": 16}),
        (llama, "performer-full", {"num_features": 16, "norms": "fixed"}),
        (llama, "by-head", DTYPES),
    ],
)
def test_distilled_and_calibrated_backends_give_the_same_bits_in_a_new_process(
    make, backend, options, tmp_path
):
    ids = inputs()["input_ids"]
    model = attach(make(), backend, **options)
    ea.calibrate(model, ids)
    parameters = [parameter for name, parameter in model.named_parameters() if ".efficient_attn." in name]
    if parameters:
        distillation_loss(model, input_ids=ids).backward()
        torch.optim.Adam(parameters, lr=0.1).step()
    model.save_pretrained(tmp_path)
    words = [str(tmp_path), json.dumps(ids.tolist()), json.dumps([backend, options])]
    subprocess.run([sys.executable, "-c", NEW_PROCESS, *words], check=True, timeout=600)
    expected = model(ids).logits
    for out in torch.load(tmp_path / "out", weights_only=True):
        assert torch.equal(out, expected)


def test_a_dtype_of_exact_attention_reaches_the_windows_of_sliding_layers():
    half, whole = (attach(mistral(), "exact", **options) for options in (HALF, {}))
    assert 1e-4 < relative_error(logits(half, BATCH), logits(whole, BATCH)) < 0.05


def test_a_plan_fits_a_model_with_and_without_its_head(tmp_path):
    model = llama()
    attach(model.model, "performer-positive")
    first, second, _ = (module for module in model.modules() if isinstance(module, Backend))
    assert not torch.equal(first.core.features.projection, second.core.features.projection)
    model.save_pretrained(tmp_path / "whole")
    assert_same(load(tmp_path / "whole"), model)
    attach(model, "performer-positive", seed=1).model.save_pretrained(tmp_path / "body")
    ids = inputs()["input_ids"]
    with torch.no_grad():
        expected = model.model(ids).last_hidden_state
        assert torch.equal(load(tmp_path / "body")(ids).last_hidden_state, expected)


@pytest.mark.slow
def test_without_this_package_from_pretrained_refuses_a_saved_model(trained):
    code = f"import transformers; transformers.AutoModel.from_pretrained({str(trained)!r})"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert 'attn_implementation="efficient_attn"` is not supported' in process.stderr


def test_plain_from_pretrained_runs_no_model_without_its_backends_unless_sdpa_is_requested(trained):
    loaded = transformers.AutoModel.from_pretrained(trained)
    refused = r"No backend is attached to this BertSelfAttention.*load\(path\)"
    with pytest.raises(UnsupportedError, match=refused):
        loaded(**BATCH)
    with pytest.raises(DataError, match="holds a model with attached backends"):
        open_model(trained)
    plain = transformers.BertForMaskedLM.from_pretrained(trained, attn_implementation="sdpa")
    assert not [name for name in plain.state_dict() if "efficient_attn" in name]
    torch.testing.assert_close(logits(plain, BATCH), logits(bert(), BATCH), rtol=1e-5, atol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("linformer")
    linformer().save_pretrained(path)
    return path


@pytest.fixture
def trained(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "saved")


def layer(folder, change):
    """Change the plan of the first layer."""
    config(folder, lambda fields: change(next(iter(fields["efficient_attn"]["layers"].values()))))


def tensors(folder, change):
    """Change the tensors of a folder by name."""
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def file(folder, change):
    """Change the bytes of the tensors."""
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))


MIX = "bert.encoder.layer.0.attention.self.efficient_attn.core.mix_keys"
INVALID = r"Cannot load a model|is not a valid safetensors file"


@pytest.mark.parametrize(
    ("part", "change", "match"),
    [
        (config, lambda c: c.pop("efficient_attn"), "names no backends"),
        (config, lambda c: c["efficient_attn"]["layers"].popitem(), "belong to another model"),
        (config, lambda c: c.update(architectures=["logging"]), "which transformers lacks"),
        (config, lambda c: c.update(hidden_size="x"), "Cannot load a model"),
        (layer, lambda x: x.pop("options"), "lacks one of the fields"),
        (layer, lambda x: x.update(max_tokens=1 << 39), "backend 'linformer' cannot be built"),
        (tensors, lambda t: t.pop(MIX), "do not fit backend 'linformer'.*Missing"),
        (tensors, lambda t: t.update({f"{MIX}_too": torch.zeros(1)}), "backend 'linformer'.*Unexpected"),
        (tensors, lambda t: t.pop("bert.encoder.layer.1.output.dense.weight"), "another model: it lacks"),
        (tensors, lambda t: t.update(strange=torch.zeros(1)), "it has, beyond the model, strange"),
        (file, lambda whole: whole[:4], INVALID),
        (file, lambda whole: whole[:-1], INVALID),
        (file, lambda whole: (1 << 40).to_bytes(8, "little") + b"{}", INVALID),
        (file, lambda whole: b"\x80\x04\x95pickle" * 9, INVALID),
    ],
)
def test_files_of_another_model_and_hostile_ones_are_refused(trained, part, change, match):
    part(trained, change)
    with pytest.raises(DataError, match=match):
        load(trained)


def test_an_encoder_that_was_saved_without_its_pooler_has_none_and_half_a_pooler_is_refused(tmp_path):
    model = transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False).eval()
    ids = inputs()["input_ids"]
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        output = open_model(saved(model, tmp_path / "exact")).model(ids)
        assert torch.equal(output.last_hidden_state, expected) and output.pooler_output is None
        attach(model, "window", window=3).save_pretrained(tmp_path / "window")
        assert torch.equal(load(tmp_path / "window")(ids).last_hidden_state, model(ids).last_hidden_state)
    saved(transformers.BertModel(transformers.BertConfig(**SIZES)), tmp_path / "part")
    tensors(tmp_path / "part", lambda t: t.pop("pooler.dense.bias"))
    with pytest.raises(DataError, match=r"it lacks pooler\.dense\.bias"):
        open_model(tmp_path / "part")
