"""Models whose code computes attention itself: a backend that would do nothing is refused or named."""

import logging

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import MODELS, SIZES, bart, bert, inputs, ready

from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers import attach, ignored, register

register()


def falcon():
    config = transformers.FalconConfig(**SIZES, alibi=False)
    return ready(transformers.FalconForCausalLM, config)


def bloom():
    sizes = {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    return ready(transformers.BloomForCausalLM, transformers.BloomConfig(**sizes))


def gptj():
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}
    return ready(transformers.GPTJForCausalLM, transformers.GPTJConfig(**sizes))


def deberta():
    return ready(transformers.DebertaModel, transformers.DebertaConfig(**SIZES))


def git():
    """The image encoder calls the attention interface, the text decoder does not."""
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.GitConfig(**SIZES, vision_config={**vision, "image_size": 32, "patch_size": 16})
    return ready(transformers.GitForCausalLM, config)


ALONE = {
    "falcon": (falcon, "FalconAttention"),
    "bloom": (bloom, "BloomAttention"),
    "gptj": (gptj, "GPTJAttention"),
    "deberta": (deberta, "DisentangledSelfAttention"),
}


@pytest.mark.parametrize("model", ALONE)
def test_attaching_is_refused_and_names_the_class(model):
    make, kind = ALONE[model]
    with pytest.raises(UnsupportedError, match=rf"attention interface \({kind}\); no backend"):
        attach(make(), "exact")


@pytest.mark.parametrize("model", ["falcon", "bloom", "gptj"])
def test_a_name_that_the_model_ignores_is_refused_in_the_first_call(model):
    made = ALONE[model][0]()
    made.config._attn_implementation = "efficient_attn.exact"
    with pytest.raises(UnsupportedError, match=r"attn_implementation='efficient_attn\.exact' has no effect"):
        made(**inputs())
    made.config._attn_implementation = "eager"
    with torch.no_grad():
        assert made(**inputs()).logits.isfinite().all()


@pytest.mark.parametrize("model", ALONE)
def test_modules_that_ignore_a_name_are_listed_by_path_and_class(model):
    make, kind = ALONE[model]
    made = make()
    found = ignored(made)
    assert len(found) == made.config.num_hidden_layers and set(found.values()) == {kind}
    assert all(type(made.get_submodule(path)).__name__ == kind for path in found)


def test_models_on_the_interface_ignore_nothing_before_and_after_attaching():
    for make in (*MODELS.values(), bart):
        assert ignored(make()) == {}
    assert ignored(attach(bert(), "performer-positive")) == {}


def test_attaching_to_a_part_of_a_model_names_the_other_part(caplog):
    model = git()
    assert set(ignored(model).values()) == {"GitSelfAttention"}
    with caplog.at_level(logging.WARNING, "efficient_attn"):
        attach(model, "exact")
    assert "3 attention modules of GitForCausalLM stay as they are" in caplog.text
    assert "git.encoder.layer.0.attention.self (GitSelfAttention)" in caplog.text
