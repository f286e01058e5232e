"""Learned sinks and soft caps: equal to their definition and to the model's own attention."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from hf_models import WINDOW, gemma2, gpt_oss, inputs, logits

import efficient_attn as ea
from efficient_attn.integrations.transformers import attach
from efficient_attn.integrations.transformers.scores import SINK_DIM, CappedAttention, SinkAttention
from efficient_attn.measure.memory import peak


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


# Gemma's own softmax is in float32, where the mask of float64 overflows.
@pytest.mark.parametrize(("make", "dtype", "bound"), [(gpt_oss, "double", 1e-10), (gemma2, "float", 2e-5)])
def test_the_models_own_attention_and_its_gradients_are_equal(make, dtype, bound):
    model, batch = getattr(make(), dtype)(), inputs()
    model.set_attn_implementation("eager")
    real, results = batch["attention_mask"].bool(), []
    for _ in range(2):
        logits = model(**batch).logits[real]
        results.append([logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))])
        attach(model, "exact")
    for actual, expected in zip(*results, strict=True):
        atol = bound * max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("make", [gpt_oss, gemma2])
def test_a_window_of_full_layers_has_sinks_and_caps_too(make):
    model, batch = make().double(), inputs()
    expected = attach(model, "exact")(**batch).logits
    wide = attach(model, full=("window", {"window": 24}))(**batch).logits
    near = attach(model, full=("window", {"window": WINDOW}))(**batch).logits
    torch.testing.assert_close(wide, expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(near, expected)


STREAMING = {"window": 31, "global_tokens": 2}
CAPPED = [
    ("exact", {}, True, 300),
    ("exact", {}, True, 1),
    ("exact", {}, False, 150),
    ("window", {"window": 31}, True, 300),
    ("window", {"window": 31}, True, 140),
    ("window", STREAMING, True, 300),
    ("window", {"window": 31}, False, 300),
    ("by-head", {"heads": {"1": ("window", STREAMING)}}, True, 300),
]


def visible_pairs(keys_mask, queries, *, causal, options):
    """Keys of a window and the first real ones, bool [batch queries keys], and all keys for `exact`."""
    keys = keys_mask.shape[1]
    back = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    width = options.get("window", 2 * keys + 1)
    near = (back >= 0) & (back < width) if causal else back.abs() <= width // 2
    first = keys_mask & (keys_mask.cumsum(dim=1) <= options.get("global_tokens", 0))
    return (near | (first[:, None] & (back >= 0))) & keys_mask[:, None]


@pytest.mark.parametrize(("name", "options", "causal", "queries"), CAPPED)
def test_capped_scores_have_the_softmax_and_the_gradients_of_their_definition(name, options, causal, queries):
    draw, cap = torch.Generator().manual_seed(0), 1.5
    shapes = (2, 4, queries, 8), (2, 2, 300, 8), (2, 2, 300, 6)
    tensors = [torch.randn(x, generator=draw, dtype=torch.float64, requires_grad=True) for x in shapes]
    key_mask = torch.ones(2, 300, dtype=torch.bool)
    key_mask[1, :170] = False
    by_head = [options, options] if name != "by-head" else [{}, STREAMING]
    visible = [visible_pairs(key_mask, queries, causal=causal, options=x) for x in by_head]
    backend, (q, k, v) = ea.build(name, head_dim=8, causal=causal, **options), tensors
    scores = cap * (q.unflatten(1, (2, 2)) @ k[:, :, None].mT * 8**-0.5 / cap).tanh()
    hidden = ~torch.stack(visible, dim=1)[:, :, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
    expected = (weights @ v[:, :, None]).flatten(1, 2)
    actual = CappedAttention(backend, cap)(*tensors, key_mask=key_mask)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    real = key_mask[:, None, 300 - queries :, None] if causal else torch.tensor(True)
    steps = [torch.autograd.grad((out * real).square().sum(), tensors) for out in (actual, expected)]
    torch.testing.assert_close(*steps, rtol=0, atol=1e-11)


def test_capped_half_precision_is_as_accurate_as_the_models_own_attention():
    batch, outs = inputs(), {}
    exact = logits(attach(gemma2().double(), "exact"), batch)
    for name in ("eager", "attached"):
        model = gemma2().bfloat16()
        model.set_attn_implementation("eager")
        if name == "attached":
            attach(model, "exact")
        outs[name] = logits(model, batch)
        assert outs[name].dtype == torch.bfloat16
    errors = {name: float((out - exact).norm() / exact.norm()) for name, out in outs.items()}
    assert errors["attached"] < 1.2 * errors["eager"] < 0.2


def test_scores_of_all_pairs_are_never_in_memory_with_gradients_either():
    capped, heads, tokens = CappedAttention(ea.build("exact", head_dim=8, causal=True), 5.0), 2, 4096
    q, k, v = (torch.randn(1, heads, tokens, 8, requires_grad=True) for _ in range(3))
    measured = peak(lambda: torch.autograd.grad(capped(q, k, v).sum(), (q, k, v)), device="cpu")
    assert measured.peak_bytes < heads * tokens**2
