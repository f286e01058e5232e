"""Backends in transformers models: which of their layers are served, by which names, and what is put back."""

import copy
import logging

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import (
    ROUNDING,
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
from efficient_attn.integrations.transformers import attach, register, swapped
from efficient_attn.integrations.transformers.sites import find_sites

register()


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, "efficient_attn")


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
    with pytest.raises(UnsupportedError, match=r"has no cross-attention.*cross='exact'"):
        attach(model, "window")


@pytest.mark.parametrize("make", [bert, gpt2])
def test_cross_attention_is_known_for_what_it_is(make):
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


def test_swapped_puts_the_attention_back_also_after_an_error():
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


def test_swapped_puts_back_what_was_attached():
    model, batch = attach(bert(), "performer-positive", num_features=16), inputs()
    expected, plan = logits(model, batch), copy.deepcopy(model.config.efficient_attn)
    with swapped(model, "exact"):
        assert not torch.allclose(logits(model, batch), expected, **ROUNDING)
    assert torch.equal(logits(model, batch), expected)
    assert model.config.efficient_attn == plan


def test_calibrated_backends_are_calibrated_on_a_batch(caplog):
    caplog.set_level(logging.WARNING, "efficient_attn")
    batch = inputs(left=0, right=0)
    model = attach(bert(), "performer-oprf", num_features=16)
    assert "ea.calibrate(model, **batch)" in caplog.text
    with pytest.raises(ea.CalibrationError, match=r"ea\.calibrate\(model"):
        model(**batch)
    ea.calibrate(model, **batch)
    assert logits(model, batch).isfinite().all()


def test_attaching_says_what_plain_from_pretrained_does(caplog):
    caplog.set_level(logging.WARNING, "efficient_attn")
    attach(bert(), "exact")
    assert "plain from_pretrained refuses" in caplog.text


def test_an_unknown_backend_is_no_attention_implementation():
    model = bert()
    with pytest.raises(ValueError, match=r"efficient_attn\.exacct"):
        model.set_attn_implementation("efficient_attn.exacct")
    assert model.config._attn_implementation == "sdpa"


ALONE = [
    "exact",
    "exact-dense",
    "linear-elu",
    "linear-taylor-1",
    "linear-taylor-2",
    "window",
    "window-clusters",
]


@pytest.mark.parametrize("backend", ALONE)
def test_what_keeps_nothing_works_by_its_name_alone(backend, counted):
    model, batch = bert(), inputs()
    model.set_attn_implementation(f"efficient_attn.{backend}")
    by_name = logits(model, batch)
    assert [name for name, _ in counted] == [backend] * 3
    torch.testing.assert_close(by_name, logits(attach(bert(), backend), batch), rtol=0, atol=0)


@pytest.mark.parametrize("backend", sorted({*ea.list_backends()} - {*ALONE}))
def test_the_name_of_a_backend_that_keeps_something_refuses_and_names_attach(backend):
    model = bert()
    model.set_attn_implementation(f"efficient_attn.{backend}")
    with pytest.raises(UnsupportedError, match=rf"attach\(model, '{backend}'\)"):
        model(**inputs())
