"""Backends in models with offloaded weights: the logits of the model in memory, or a refusal."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")
accelerate = pytest.importorskip("accelerate", reason="the extra [dev] is not installed")

from integrations.hf_models import ROUNDING, bert, inputs, llama, logits

from efficient_attn.backend import Backend
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers import attach, load

BACKENDS = {
    "performer-positive": (llama, {"num_features": 16}),
    "performer-trig": (llama, {"num_features": 16}),
    "performer-full": (llama, {"num_features": 16}),
    "linformer": (bert, {"rank": 4}),
    "window": (llama, {"window": 5}),
}
CPU = torch.device("cpu")


def attached(model, name):
    _, options = BACKENDS[name]
    attach(model, name, **options)
    torch.manual_seed(0)
    for backend in (module for module in model.modules() if isinstance(module, Backend)):
        if backend.needs_calibration:
            backend.calibrate(torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8))
    return model


def cpu_offload(model, tmp_path, **choices):
    accelerate.cpu_offload(model, execution_device=CPU, **choices)


def disk_offload(model, tmp_path, **choices):
    accelerate.disk_offload(model, str(tmp_path), execution_device=CPU, **choices)


OFFLOADS = pytest.mark.parametrize("offload", [cpu_offload, disk_offload])


@OFFLOADS
@pytest.mark.parametrize("name", BACKENDS)
def test_a_model_that_is_offloaded_before_or_after_attaching_computes_as_without(name, offload, tmp_path):
    make, _ = BACKENDS[name]
    batch, plain = inputs(), attached(make(), name)
    expected = logits(plain, batch)
    before = make()
    offload(before, tmp_path / "before")
    attached(before, name)
    backends = [module for module in before.modules() if isinstance(module, Backend)]
    assert not any(x.is_meta for m in backends for x in (*m.parameters(), *m.buffers()))
    torch.testing.assert_close(logits(before, batch), expected, **ROUNDING)
    for buffers in (False, True):
        after = attached(make(), name)
        offload(after, tmp_path / f"after {buffers}", offload_buffers=buffers)
        torch.testing.assert_close(logits(after, batch), expected, **ROUNDING)


def mapped(layers):
    """The device map of the tiny Llama with layers on several devices."""
    parts = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return dict.fromkeys(parts, "cpu") | {f"model.layers.{i}": device for i, device in enumerate(layers)}


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_a_device_map_with_a_disk_is_served_also_when_saved_and_loaded(tmp_path):
    plain, batch = llama(), inputs()
    plain.save_pretrained(tmp_path / "plain")
    expected = logits(attached(plain, "performer-positive"), batch)
    placement = {"device_map": mapped(["cpu", "disk", "disk"]), "offload_folder": str(tmp_path / "offload")}
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain", **placement)
    assert model.model.layers[1].self_attn.q_proj.weight.is_meta
    attached(model, "performer-positive")
    torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    model.save_pretrained(tmp_path / "attached")
    torch.testing.assert_close(logits(load(tmp_path / "attached"), batch), expected, **ROUNDING)
    loaded = load(tmp_path / "attached", **placement)
    assert loaded.model.layers[1].self_attn.q_proj.weight.is_meta
    torch.testing.assert_close(logits(loaded, batch), expected, **ROUNDING)


def test_random_features_that_are_offloaded_are_not_drawn_again(tmp_path):
    model = attached(llama(), "performer-positive")
    cpu_offload(model, tmp_path, offload_buffers=True)
    with pytest.raises(UnsupportedError, match="redraw: the random features lie on meta"):
        model.model.layers[0].self_attn.efficient_attn.redraw(3)


def test_a_model_without_memory_is_refused_and_nothing_is_attached():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama().config)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn are on meta.*load the model first"):
        attach(model, "performer-positive")
    assert not any(isinstance(module, Backend) for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


class Hook:
    """What accelerate leaves on a module whose parameters it has offloaded, as far as `attach` reads it."""

    def __init__(self, device=None, hooks=None):
        self.execution_device = device
        if hooks is not None:
            self.hooks = hooks


@pytest.mark.parametrize("site", ["model.layers.1.self_attn.q_proj", "model.layers.1", ""])
def test_the_device_of_an_offloaded_layer_is_read_from_the_nearest_hook(site):
    model = llama()
    model.model.layers[1].to("meta")
    model.get_submodule(site)._hf_hook = Hook(hooks=[Hook(), Hook(torch.device("cpu"))])
    attach(model, "performer-positive", num_features=16)
    assert not any(x.is_meta for x in model.model.layers[1].self_attn.efficient_attn.buffers())
