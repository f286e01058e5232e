"""`ea.attach` finds the way into a model of transformers, of torch's layers, or of any other code."""

import pytest
import torch
from integrations.intercepted import padded_encoder, written_model
from torch import nn

import efficient_attn as ea
from efficient_attn.errors import OptionError
from efficient_attn.integrations.intercept.installed import ReplacedSites


@torch.no_grad()
def test_models_of_torch_are_attached_by_their_layers_or_by_an_example_and_restored(counted):
    model, run = padded_encoder()
    written, run_written = written_model()
    for module, call, example in ((model, run, None), (model, run, run), (written, run_written, run_written)):
        expected, options = call(), {} if example is None else {"example": example}
        attached = ea.attach(module, "window", window=3, **options)
        counted.clear()
        assert not torch.allclose(call(), expected)
        assert isinstance(attached, ReplacedSites) and [name for name, _ in counted] == ["window", "window"]
        attached.undo()
        torch.testing.assert_close(call(), expected)


def test_models_of_transformers_and_modules_around_them_are_attached_by_layer(counted):
    pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")
    from integrations.hf_models import bert, inputs

    model = bert()
    for module in (model, nn.ModuleDict({"model": model})):
        counted.clear()
        assert ea.attach(module, {"0-1": "window"}) is module
        model(**inputs())
        assert [name for name, _ in counted] == ["window", "window", "exact"]
    with pytest.raises(OptionError, match="a transformers model is attached without one"):
        ea.attach(model, "window", example=lambda: model(**inputs()))


def test_a_model_without_a_way_in_is_refused():
    model, _ = written_model()
    with pytest.raises(OptionError, match=r"OwnModel is no transformers model .* give example=lambda"):
        ea.attach(model, "window")
