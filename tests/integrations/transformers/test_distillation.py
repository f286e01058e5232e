"""Distillation of backends: the exact calls of a model, the loss, and the example that trains by them."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import bert, inputs, llama

import efficient_attn as ea
from efficient_attn.integrations.transformers import attach, distillation_loss, exact_calls


def losses(model, batch):
    with torch.no_grad(), exact_calls(model) as calls:
        model(**batch)
    return calls, [distillation_loss(call) for call in calls]


@pytest.mark.parametrize("make", [bert, llama])
def test_every_layer_is_called_as_exactly_as_without_backends(make):
    model, batch = make(), inputs()
    with torch.no_grad():
        exact = model(**batch).logits
        attach(model, "linear-hedgehog")
        replaced = model(**batch).logits
        with exact_calls(model) as calls:
            taught = model(**batch).logits
        after = model(**batch).logits
    torch.testing.assert_close(taught, exact, rtol=1e-5, atol=1e-4)
    assert torch.equal(after, replaced) and not torch.allclose(replaced, exact, atol=1e-3)
    backends = [module for module in model.modules() if isinstance(module, ea.Backend)]
    assert [call.backend for call in calls] == backends and len(calls) == 3
    for call in calls:
        kwargs = {"key_mask": call.key_mask, "causal": make is llama}
        torch.testing.assert_close(call.out, ea.attention(call.q, call.k, call.v, **kwargs))


def test_the_loss_is_the_squared_relative_error_of_the_backend():
    model, batch = attach(bert(), "window", window=3), inputs()
    calls, loss_values = losses(model, batch)
    assert calls[0].key_mask is not None
    for call, loss in zip(calls, loss_values, strict=True):
        out = ea.attention(call.q, call.k, call.v, "window", window=3, key_mask=call.key_mask)
        expected = ((out - call.out).norm() / call.out.norm()) ** 2
        torch.testing.assert_close(loss, expected)
        assert loss > 0.01
    assert losses(attach(bert(), "exact"), batch)[1] == [0.0] * 3


def test_a_step_lowers_the_loss_of_every_layer_and_leaves_the_model_as_it_is():
    model, batch = attach(bert(), "linear-hedgehog"), inputs()
    weights = {name: x.clone() for name, x in model.named_parameters() if "efficient_attn" not in name}
    backends = torch.nn.ModuleList(module for module in model.modules() if isinstance(module, ea.Backend))
    optimiser = torch.optim.Adam(backends.parameters(), lr=0.003)
    _, before = losses(model, batch)
    sum(before).backward()
    optimiser.step()
    _, after = losses(model, batch)
    assert all(new < old for new, old in zip(after, before, strict=True))
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name in weights)
    assert all(torch.equal(model.get_parameter(name), x) for name, x in weights.items())


def test_a_model_without_backends_is_refused():
    with pytest.raises(ea.UnsupportedError, match="has no backends"), exact_calls(bert()):
        pass
