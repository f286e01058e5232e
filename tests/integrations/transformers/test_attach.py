"""Backends in transformers models: layers that are served, names that work, and what swapping restores."""

import copy
import logging

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import (
    MODELS,
    ROUNDING,
    SIZES,
    bart,
    bert,
    gpt2,
    inputs,
    logits,
    modernbert,
    ready,
)

import efficient_attn as ea
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers import attach, ignored, register, swapped
from efficient_attn.integrations.transformers.sites import find_sites

register()


def test_an_encoder_and_its_decoder_are_served_by_kind(counted):
    model, batch = bart(), {**inputs(), "decoder_input_ids": inputs()["input_ids"][:, :7]}
    with torch.no_grad():
        expected = model(**batch).logits
        with swapped(model, "exact"):
            torch.testing.assert_close(model(**batch).logits, expected, **ROUNDING)
        counted.clear()
        with swapped(model, full="window", cross="performer-positive"):
            assert model(**batch).logits.isfinite().all()
    assert [name for name, _ in counted] == ["window"] * 2 + ["window", "performer-positive"] * 2


@pytest.mark.parametrize("make", [bert, gpt2])
def test_cross_attention_is_recognised_and_not_causal(make):
    model = make(is_decoder=True, add_cross_attention=True)
    kinds = [(site.kind, site.pattern.causal) for site in find_sites(model)]
    assert kinds == [("full", True), ("cross", False)] * 3


def test_a_model_without_masks_is_served(counted):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    model = ready(transformers.ViTModel, transformers.ViTConfig(**sizes, image_size=32, patch_size=8))
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(pixels).last_hidden_state
        with swapped(model, "exact"):
            torch.testing.assert_close(model(pixels).last_hidden_state, expected, **ROUNDING)
    assert len(counted) == 1


def test_layers_can_be_named_by_number(counted):
    model = attach(bert(), {"0-1": ("window", {"window": 7}), 2: "performer-positive"})
    logits(model, inputs())
    assert [name for name, _ in counted] == ["window", "window", "performer-positive"]
    assert counted[0][1].window == 7
    counted.clear()
    logits(attach(model, {"2": "window"}), inputs())
    assert [name for name, _ in counted] == ["exact", "exact", "window"]


def test_swapped_restores_the_attention_also_after_an_error():
    model, batch = modernbert(), inputs()
    expected, keys, config = logits(model, batch), list(model.state_dict()), model.config.to_dict()
    with swapped(model, full=("performer-positive", {"num_features": 16})) as same:
        assert same is model
        assert not torch.allclose(logits(model, batch), expected, **ROUNDING)
    with pytest.raises(ZeroDivisionError), swapped(model, "exact"):
        raise ZeroDivisionError
    assert torch.equal(logits(model, batch), expected)
    assert (list(model.state_dict()), model.config.to_dict()) == (keys, config)
    assert model.config._attn_implementation == "sdpa"
    attach(model, full=("performer-positive", {"num_features": 16}))
    expected, plan = logits(model, batch), copy.deepcopy(model.config.efficient_attn)
    with swapped(model, "exact"):
        assert not torch.allclose(logits(model, batch), expected, **ROUNDING)
    assert torch.equal(logits(model, batch), expected) and model.config.efficient_attn == plan


def test_calibrated_backends_are_calibrated_on_a_batch(caplog):
    caplog.set_level(logging.WARNING, "efficient_attn")
    batch = inputs(left=0, right=0)
    model = attach(bert(), "performer-oprf", num_features=16)
    assert "ea.calibrate(model, **batch)" in caplog.text
    assert "plain from_pretrained refuses" in caplog.text
    with pytest.raises(ea.CalibrationError, match=r"ea\.calibrate\(model"):
        model(**batch)
    ea.calibrate(model, **batch)
    assert logits(model, batch).isfinite().all()


ALONE = (
    *("exact", "exact-dense", "linear-elu", "linear-taylor-1", "linear-taylor-2", "window"),
    "window-clusters",
)


@pytest.mark.parametrize("backend", ea.list_backends())
def test_a_stateless_backend_works_by_its_name_alone_and_the_others_name_attach(backend, counted):
    model, batch = bert(), inputs()
    model.set_attn_implementation(f"efficient_attn.{backend}")
    if backend not in ALONE:
        with pytest.raises(UnsupportedError, match=rf"attach\(model, '{backend}'\)"):
            model(**batch)
        return
    by_name = logits(model, batch)
    assert [name for name, _ in counted] == [backend] * 3
    torch.testing.assert_close(by_name, logits(attach(bert(), backend), batch), rtol=0, atol=0)


def falcon():
    return ready(transformers.FalconForCausalLM, transformers.FalconConfig(**SIZES, alibi=False))


def bloom():
    sizes = {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    return ready(transformers.BloomForCausalLM, transformers.BloomConfig(**sizes))


def gptj():
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}
    return ready(transformers.GPTJForCausalLM, transformers.GPTJConfig(**sizes))


def deberta():
    return ready(transformers.DebertaModel, transformers.DebertaConfig(**SIZES))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (falcon, "FalconAttention"),
        (bloom, "BloomAttention"),
        (gptj, "GPTJAttention"),
        (deberta, "DisentangledSelfAttention"),
    ],
)
def test_models_that_compute_attention_themselves_are_refused_and_their_modules_listed(make, kind):
    model = make()
    with pytest.raises(UnsupportedError, match=rf"attention interface \({kind}\); no backend"):
        attach(model, "exact")
    paths = ignored(model)
    assert len(paths) == model.config.num_hidden_layers and set(paths.values()) == {kind}
    assert all(type(model.get_submodule(path)).__name__ == kind for path in paths)
    if make is not deberta:
        model.config._attn_implementation = "efficient_attn.exact"
        with pytest.raises(UnsupportedError, match=r"='efficient_attn\.exact' has no effect"):
            model(**inputs())
        model.config._attn_implementation = "eager"
        assert logits(model, inputs()).isfinite().all()


def test_models_on_the_interface_ignore_nothing_before_and_after_attaching():
    for make in (*MODELS.values(), bart):
        assert ignored(make()) == {}
    assert ignored(attach(bert(), "performer-positive")) == {}


def test_attaching_to_a_part_of_a_model_names_the_other_part(caplog):
    """The image encoder of GIT calls the attention interface, the text decoder does not."""
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.GitConfig(**SIZES, vision_config={**vision, "image_size": 32, "patch_size": 16})
    model = ready(transformers.GitForCausalLM, config)
    assert set(ignored(model).values()) == {"GitSelfAttention"}
    with caplog.at_level(logging.WARNING, "efficient_attn"):
        attach(model, "exact")
    assert "3 attention modules of GitForCausalLM stay as they are" in caplog.text
    assert "git.encoder.layer.0.attention.self (GitSelfAttention)" in caplog.text
