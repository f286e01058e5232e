"""Learned sinks: equal to their definition and to the model's own attention."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from hf_models import WINDOW, gpt_oss, inputs

import efficient_attn as ea
from efficient_attn.integrations.transformers import attach
from efficient_attn.integrations.transformers.attend import SINK_DIM, SinkAttention


def defined(q, k, v, visible, sinks):
    """Softmax over the visible keys and the sink, whose column is dropped, head by head."""
    outs = []
    for head in range(q.shape[1]):
        keys, values = (x[:, head * k.shape[1] // q.shape[1]] for x in (k, v))
        scores = (q[:, head] @ keys.mT * q.shape[3] ** -0.5).masked_fill(~visible, -torch.inf)
        column = sinks[head].expand(*scores.shape[:2], 1)
        outs.append(torch.cat([scores, column], dim=2).softmax(dim=2)[..., :-1] @ values)
    return torch.stack(outs, dim=1)


@pytest.mark.parametrize(("name", "options"), [("exact", {}), ("window", {"window": 6, "global_tokens": 1})])
@pytest.mark.parametrize("queries", [20, 7, 1])
def test_a_sink_takes_part_in_every_softmax_and_has_gradients(name, options, queries):
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 4, queries, 8), (2, 2, 20, 8), (2, 2, 20, 6), (4,)
    tensors = [torch.randn(x, generator=draw, dtype=torch.float64, requires_grad=True) for x in shapes]
    key_mask = torch.ones(2, 20, dtype=torch.bool)
    key_mask[1, :5] = False
    back = torch.arange(20 - queries, 20)[:, None] - torch.arange(20)
    visible = (back >= 0) & (back < options.get("window", 20)) & key_mask[:, None]
    backend = ea.build(name, head_dim=8 + SINK_DIM, causal=True, scale=8**-0.5, **options)
    expected = defined(*tensors[:3], visible, tensors[3])
    actual = SinkAttention(backend, tensors[3])(*tensors[:3], key_mask=key_mask)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    steps = [torch.autograd.grad(out.square().sum(), tensors) for out in (actual, expected)]
    torch.testing.assert_close(*steps, rtol=0, atol=1e-11)


@pytest.mark.parametrize("make", [gpt_oss])
def test_the_models_own_attention_and_its_gradients_are_equal_in_float64(make):
    model, batch = make().double(), inputs()
    model.set_attn_implementation("eager")
    real, results = batch["attention_mask"].bool(), []
    for _ in range(2):
        logits = model(**batch).logits[real]
        results.append([logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))])
        attach(model, "exact")
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_a_window_of_full_layers_reads_the_sink_too():
    model, batch = gpt_oss().double(), inputs()
    expected = attach(model, "exact")(**batch).logits
    wide = attach(model, full=("window", {"window": 24}))(**batch).logits
    near = attach(model, full=("window", {"window": WINDOW}))(**batch).logits
    torch.testing.assert_close(wide, expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(near, expected)
