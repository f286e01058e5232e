"""What attaching cannot honour in a transformers model is refused by name, and nothing is attached."""

import logging

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import (
    bert,
    gpt2,
    inputs,
    llama,
    mistral,
    modernbert,
)

from efficient_attn.errors import DtypeError, OptionError, UnknownNameError, UnsupportedError
from efficient_attn.integrations.transformers import attach, register, swapped

register()


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, "efficient_attn")


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_attention_outputs_are_refused(make):
    model, batch = make(), inputs()
    with swapped(model, "exact"), pytest.raises(UnsupportedError, match=r"output_attentions.*'eager'"):
        model(**batch, output_attentions=True)
    # Outside nothing is left of the refusal.
    assert model(**batch, output_attentions=True).logits.isfinite().all()


@pytest.mark.parametrize(
    ("make", "request_", "error", "match"),
    [
        (gpt2, {"backend": "linformer"}, UnsupportedError, "cannot be causal"),
        (bert, {"backend": "perfomer-positive"}, UnknownNameError, "Did you mean 'performer-positive'"),
        (bert, {"backend": "performer-positive", "num_feature": 3}, UnknownNameError, "num_features"),
        (bert, {}, OptionError, "Name a backend"),
        (bert, {"backend": {}}, OptionError, "Name a backend"),
        (bert, {"backend": {"2-1": "window"}}, OptionError, "numbers and ranges"),
        (bert, {"sliding": "window"}, OptionError, "no such layers; its layers are full"),
        (bert, {"backend": {"0-3": "window"}}, OptionError, "Layers are from 0 to 2"),
        (bert, {"backend": {"first": "window"}}, OptionError, "numbers and ranges"),
        (bert, {"backend": {"0-1": "window", 1: "exact"}}, OptionError, "named twice"),
        (bert, {"backend": {0: ("window", 7)}}, DtypeError, "pair"),
        (bert, {"backend": {0: "window"}, "window": 7}, OptionError, "options belong to one of them"),
        (bert, {"backend": "linformer", "sharing": "layers", "rank": 4}, UnsupportedError, "key-value"),
        (modernbert, {"backend": "performer-positive"}, UnsupportedError, "full='performer-positive'"),
        (modernbert, {"backend": "window", "window": 65}, OptionError, "slides over 9 keys"),
        (modernbert, {"backend": "window", "global_tokens": 4}, OptionError, "cache drops the first tokens"),
        (bert, {"backend": "exact", "max_distance": 4}, UnsupportedError, "4: a trained model has"),
        (mistral, {"sliding": ("window", {"max_distance": 4})}, UnsupportedError, "positions of its own"),
        (mistral, {"backend": {"1": "performer-trig"}}, UnsupportedError, "causal over 5 keys"),
    ],
)
def test_a_bad_request_is_refused_and_nothing_is_attached(make, request_, error, match):
    model = make()
    state, config = list(model.state_dict()), model.config.to_dict()
    with pytest.raises(error, match=match):
        attach(model, **request_)
    assert (list(model.state_dict()), model.config.to_dict()) == (state, config)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_says_it_is_attached_and_is_not_is_told_how():
    model = bert()
    model.set_attn_implementation("efficient_attn")
    with pytest.raises(UnsupportedError, match=r"attach\(model, …\), or load\(path\)"):
        model(**inputs())


def test_a_model_that_transformers_leaves_as_it_is_is_refused(monkeypatch):
    model = bert()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda _: False))
    state = list(model.state_dict())
    with pytest.raises(UnsupportedError, match="cannot be replaced"):
        attach(model, "performer-positive")
    assert list(model.state_dict()) == state


def test_only_models_of_transformers_are_taken():
    with pytest.raises(DtypeError, match="transformers model"):
        attach(torch.nn.Linear(2, 2), "exact")
