"""Interception in models of transformers: equal bits when measured, rounding when exact is served."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import MODELS, ROUNDING, inputs, logits

import efficient_attn as ea
from efficient_attn.errors import UnsupportedError


@pytest.mark.parametrize("name", MODELS)
def test_padded_models_compute_the_same_bits_while_measured_and_captured(name):
    model, batch = MODELS[name](), inputs()
    alone = logits(model, batch)
    with ea.intercept.measure(model, ["exact"]) as measured, ea.intercept.capture(model) as captured:
        assert torch.equal(logits(model, batch), alone)
    assert len(measured.sites) == model.config.num_hidden_layers
    assert all(site.errors["exact"] < 1e-5 for site in measured.sites.values() if site.mask != "other")
    assert {*captured.sites, *captured.left_out} == set(measured.sites)


@pytest.mark.parametrize("name", sorted({*MODELS} - {"mistral"}))
def test_exact_takes_the_calls_of_padded_models(name):
    model, batch = MODELS[name](), inputs()
    expected = logits(model, batch)
    with ea.intercept.replace(model, "exact", example=lambda: model(**batch)) as replaced:
        torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
        assert all("served" in replaced.calls[site] for site in replaced.served)
        # Layers with a sliding window keep their own mask, and exact attention.
        assert set(replaced.left.values()) <= {"its mask is no key mask and not causal"}


def test_a_model_of_sliding_layers_alone_is_refused():
    model, batch = MODELS["mistral"](), inputs()
    with pytest.raises(UnsupportedError, match="its mask is no key mask and not causal"):
        ea.intercept.replace(model, "exact", example=lambda: model(**batch))


def test_generation_serves_the_prompt_and_says_what_stays_exact():
    model = MODELS["llama"]()
    ids = inputs()["input_ids"][:1, :8]
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    with ea.intercept.replace(model, "exact", example=lambda: model(ids)) as replaced:
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
        # Newer versions of transformers hand the heads of a group over as the queries of one head, in steps
        # with a cache.
        grouped = {"served": 1, "its causality is not that of the example": 4}
        assert all(calls in (grouped, {"served": 5}) for calls in replaced.calls.values())
