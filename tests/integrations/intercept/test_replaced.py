"""Backends in place of F.scaled_dot_product_attention, in any model, eager and compiled."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from integrations.intercepted import (
    DIM,
    HEAD_DIM,
    HEADS,
    MODELS,
    REAL,
    TOKENS,
    TRIANGLE,
    Called,
    OwnAttention,
    OwnModel,
    encoder,
    written_model,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import efficient_attn as ea
from efficient_attn.errors import OptionError, UnknownNameError, UnsupportedError


@MODELS
@torch.no_grad()
def test_exact_in_the_place_of_torchs_function_changes_rounding_alone(make):
    model, run = make()
    alone, names = run(), list(model.state_dict())
    with ea.intercept.replace(model, "exact", example=run, strict=True) as replaced:
        torch.testing.assert_close(run(), alone, rtol=1e-5, atol=1e-5)
        assert not replaced.left
        assert all(counts == {"served": 1} for counts in replaced.calls.values())
    assert list(model.state_dict()) == names
    assert torch.equal(run(), alone)


@MODELS
@torch.no_grad()
def test_replaced_attention_travels_with_copies_state_dicts_and_pickles(make):
    model, run = make()
    with ea.intercept.replace(model, "performer-positive", example=run, num_features=16):
        expected = run()
        state = model.state_dict()
        assert sum("efficient_attn.0" in name for name in state)
    with ea.intercept.replace(model, "performer-positive", example=run, num_features=16, seed=5):
        assert not torch.equal(run(), expected)
        model.load_state_dict(state)
        torch.testing.assert_close(run(), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_a_copy_has_backends_of_its_own(copied):
    model, run = written_model()
    x = torch.randn(1, TOKENS, DIM)
    with ea.intercept.replace(model, "performer-positive", example=run, num_features=16):
        expected, copy_ = model(x), copied(model)
    assert torch.equal(copy_(x), expected)
    assert not torch.equal(model(x), expected)


def test_parameters_of_backends_are_trained_and_a_checkpoint_computes_them_again():
    torch.manual_seed(0)
    model, x = encoder().train(), torch.randn(2, TOKENS, DIM)
    ea.intercept.replace(model, "linformer", example=lambda: model(x), rank=4)
    mixing = [name for name, _ in model.named_parameters() if "efficient_attn" in name]
    assert mixing
    parameters = [dict(model.named_parameters())[name] for name in mixing]
    direct = torch.autograd.grad(model(x).square().sum(), parameters)
    # The second forward runs within the backward pass, outside of every block.
    again = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).square().sum(), parameters)
    for gradient, recomputed in zip(direct, again, strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, recomputed)


@torch.no_grad()
def test_each_site_may_have_its_own_backend():
    model, run = written_model()
    choice = {"layers.0": ("window", {"window": 3}), "layers.1": "performer-positive"}
    with ea.intercept.replace(model, choice, example=run) as replaced:
        assert replaced.served == {"layers.0": "window", "layers.1": "performer-positive"}
    with ea.intercept.replace(model, "window", example=run, only="layers.1") as replaced:
        assert replaced.left == {"layers.0": "no pattern names it"}
        run()


@torch.no_grad()
def test_random_features_differ_by_site_and_repeat_by_seed():
    model, run = written_model()

    def projections(seed):
        with ea.intercept.replace(model, "performer-positive", example=run, seed=seed):
            return [x.clone() for name, x in model.named_buffers() if "projection" in name]

    first, second = projections(3)
    assert not torch.equal(first, second)
    assert all(map(torch.equal, projections(3), [first, second]))
    assert not torch.equal(projections(4)[0], first)


@torch.no_grad()
def test_calls_that_cannot_be_served_stay_exact_with_their_reason():
    model, run = written_model()
    x, sliding = torch.randn(2, TOKENS, DIM), TRIANGLE & ~TRIANGLE.tril(-4)
    alone = model(x, sliding)
    with ea.intercept.replace(model, "performer-positive", example=run) as replaced:
        assert torch.equal(model(x, sliding), alone)
        model(x, REAL[:, None, None])
    reasons = {"its mask is no key mask and not causal": 1, "its causality is not that of the example": 1}
    assert set(replaced.served) == {"layers.0", "layers.1"}
    with ea.intercept.replace(model, "performer-positive", example=run) as replaced:
        model(x, sliding), model(x, REAL[:, None, None])
        assert replaced.calls == {"layers.0": reasons, "layers.1": reasons}
    refused = pytest.raises(UnsupportedError, match=r"layers\.0 cannot be served: its mask is no key mask")
    with ea.intercept.replace(model, "performer-positive", example=run, strict=True), refused:
        model(x, sliding)


def test_attention_with_dropout_stays_exact_in_training():
    model, x = OwnModel(dropout=0.5).train(), torch.randn(2, TOKENS, DIM)
    with ea.intercept.replace(model, "window", example=lambda: model(x)) as replaced:
        assert model.training
        model(x)
        assert replaced.calls["layers.0"] == {"it drops attention weights (dropout_p=0.5)": 1}


@torch.no_grad()
def test_one_query_of_a_decoding_step_is_served_by_a_causal_backend():
    q, k = torch.randn(1, HEADS, 1, HEAD_DIM), torch.randn(1, HEADS, TOKENS, HEAD_DIM)

    class Cached(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, is_causal=q.shape[-2] > 1)

    model = Cached()
    with ea.intercept.replace(model, "exact", example=lambda: model(k, k), strict=True) as replaced:
        torch.testing.assert_close(model(q, k), F.scaled_dot_product_attention(q, k, k))
        assert replaced.calls == {"model": {"served": 1}}


LINEAR = ("linear-elu", "linear-hedgehog", "performer-positive", "performer-trig")


@pytest.mark.parametrize("name", ["exact", "window", "linformer", *LINEAR])
@pytest.mark.parametrize("scale", [0.9, -0.4, 0.0])
@torch.no_grad()
def test_a_backend_takes_the_scale_of_each_call(name, scale):
    model, (q, k, v) = Called(), torch.randn(3, 2, HEADS, TOKENS, HEAD_DIM, dtype=torch.float64)
    options = {"window": {"window": 5}, "linformer": {"rank": 4}}.get(name, {})
    with ea.intercept.replace(model, name, example=lambda: model(q, k, v), **options) as replaced:
        (backend,) = (part for part in model.modules() if isinstance(part, ea.Backend))
        sizes = {"head_dim": HEAD_DIM, "num_heads": HEADS, "max_tokens": TOKENS}
        built = ea.build(name, scale=scale, **sizes, **options).double()
        built.load_state_dict(backend.state_dict())
        torch.testing.assert_close(model(q, k, v, scale=scale), built(q, k, v), rtol=1e-9, atol=1e-12)
        assert replaced.calls == {"model": {"served": 1}}


@torch.no_grad()
def test_a_backend_built_with_scale_0_serves_no_other_scale():
    model, (q, k, v) = Called(), torch.randn(3, 2, HEADS, TOKENS, HEAD_DIM)
    with ea.intercept.replace(model, "exact", example=lambda: model(q, k, v, scale=0.0)) as replaced:
        assert torch.equal(model(q, k, v), F.scaled_dot_product_attention(q, k, v))
        assert replaced.calls == {"model": {"its scale is 0.353553, that of the example 0": 1}}


class Biased(nn.Module):
    """Attention with a learned bias of the scores, zero at first."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HEADS, TOKENS, 1))

    def forward(self, q):
        return F.scaled_dot_product_attention(q, q, q, self.bias + torch.zeros(TOKENS))


def test_a_learned_bias_that_is_still_zero_gets_its_gradient():
    model, q = Biased(), torch.randn(2, HEADS, TOKENS, HEAD_DIM)
    with ea.intercept.replace(model, "exact", example=lambda: model(q)) as replaced:
        model(q).square().sum().backward()
        assert replaced.calls == {"model": {"its mask is learned (it requires a gradient)": 1}}
    assert model.bias.grad is not None
    refused = pytest.raises(UnsupportedError, match="model cannot be served: its mask is learned")
    with ea.intercept.replace(model, "exact", example=lambda: model(q), strict=True), refused:
        model(q)


class Pair(nn.Module):
    """Full and causal attention, of which a run may skip the first or repeat the second."""

    def __init__(self):
        super().__init__()
        self.inner = Uneven()

    def forward(self, x, first=True, times=1):
        return self.inner(x, first, times)


class Uneven(nn.Module):
    def forward(self, x, first, times):
        x = F.scaled_dot_product_attention(x, x, x) if first else x
        for _ in range(times):
            x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return x


@torch.no_grad()
def test_a_run_with_fewer_calls_than_the_example_is_refused():
    model, x = Pair(), torch.randn(1, HEADS, TOKENS, HEAD_DIM)
    with ea.intercept.replace(model, {"inner": "exact", "inner#1": "window"}, example=lambda: model(x)):
        model(x)
        with pytest.raises(UnsupportedError, match="inner makes 1 of the 2 calls of the example"):
            model(x, first=False)
        assert torch.equal(model(x, first=False, times=0), x)


@torch.no_grad()
def test_calls_that_the_example_does_not_make_stay_exact():
    model, x = Pair(), torch.randn(1, HEADS, TOKENS, HEAD_DIM)
    expected = model(x, times=2)
    with ea.intercept.replace(model, "exact", example=lambda: model(x)) as replaced:
        torch.testing.assert_close(model(x, times=2), expected, rtol=1e-5, atol=1e-5)
        assert replaced.calls["inner#2"] == {"the example makes no such call": 1}
    refused = pytest.raises(UnsupportedError, match="inner#2 cannot be served: the example makes no such")
    with ea.intercept.replace(model, "exact", example=lambda: model(x), strict=True), refused:
        model(x, times=2)


@torch.no_grad()
def test_a_module_whose_runs_differ_within_the_example_stays_exact():
    model, x = Pair(), torch.randn(1, HEADS, TOKENS, HEAD_DIM)
    differ = "the runs of its module differ in their number of calls"
    with pytest.raises(UnsupportedError, match=f"inner cannot be served: {differ}"):
        ea.intercept.replace(model, "exact", example=lambda: (model(x), model(x, first=False)))


@torch.no_grad()
def test_autocast_reaches_the_backend():
    model, run = written_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = run()
        with ea.intercept.replace(model, "exact", example=run, strict=True):
            torch.testing.assert_close(run(), alone, rtol=2**-6, atol=2**-6)


@torch.no_grad()
def test_backends_that_need_calibration_are_calibrated_on_the_example():
    model, run = written_model()
    alone = run()
    with ea.intercept.measure(model, ["performer-full"]) as measured:
        run()
    with ea.intercept.replace(model, "performer-full", example=run, strict=True):
        assert not torch.equal(run(), alone)
    assert all(site.errors["performer-full"] > 0 for site in measured.sites.values())


@torch.no_grad()
def test_attention_that_returns_its_weights_is_named_as_unreached():
    layer, x = nn.MultiheadAttention(DIM, HEADS, batch_first=True), torch.randn(1, TOKENS, DIM)
    with ea.intercept.measure(layer) as measured:
        layer(x, x, x)
    assert measured.not_reached == [("model", "its caller asks for the weights (need_weights=True)")]
    with pytest.raises(UnsupportedError, match=r"model cannot be served: its caller asks for the weights"):
        ea.intercept.replace(layer, "window", example=lambda: layer(x, x, x))


@torch.no_grad()
def test_a_module_around_another_that_calls_attention_stays_exact():
    class Outer(OwnAttention):
        def __init__(self):
            super().__init__()
            self.inner = OwnAttention()

        def forward(self, x):
            return self.inner(super().forward(x))

    model, x = Outer(), torch.randn(1, TOKENS, DIM)
    with ea.intercept.replace(model, "window", example=lambda: model(x)) as replaced:
        assert replaced.served == {"inner": "window"}
        assert replaced.left == {"model": "a module inside this one calls attention too"}
        model(x)
        assert replaced.calls == {"inner": {"served": 1}}


@pytest.mark.parametrize(
    ("backend", "options", "error", "match"),
    [
        ("window", {"only": "layer.*"}, UnknownNameError, "call site"),
        (
            "window",
            {"example": lambda: None},
            UnsupportedError,
            r"nowhere: .* code with its own softmax",
        ),
        ("linformer", {}, UnsupportedError, r"layers\.0 cannot be served: .*causal"),
        ({"*": "window"}, {"window": 3}, OptionError, "With a mapping of backends, options and patterns"),
        ("windoww", {}, UnknownNameError, "windoww"),
    ],
)
def test_wrong_requests_name_the_argument_and_change_nothing(backend, options, error, match):
    model, run = written_model()
    names = list(model.state_dict())
    with pytest.raises(error, match=match):
        ea.intercept.replace(model, backend, **{"example": run, **options})
    assert list(model.state_dict()) == names


def test_a_model_with_backends_takes_no_others():
    model, run = written_model()
    refused = pytest.raises(OptionError, match=r"undo\(\) it first")
    with ea.intercept.replace(model, "window", example=run), refused:
        ea.intercept.replace(model, "window", example=run)


@pytest.mark.compile
@MODELS
@torch.no_grad()
def test_a_compiled_model_with_backends_is_one_graph(make):
    model, run = make()
    with ea.intercept.replace(model, "performer-positive", example=run, num_features=16):
        expected, forward = run(), model.forward
        model.forward = torch.compile(forward, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-5)
        model.forward = forward


@pytest.mark.compile
@torch.no_grad()
def test_a_compiled_graph_applies_a_mask_and_causality_and_follows_the_scale():
    model, (q, k, v) = Called(), torch.randn(3, 2, HEADS, TOKENS, HEAD_DIM)
    mask, both = REAL[:, None, None], TRIANGLE & REAL[:, None, None]
    with ea.intercept.replace(model, "exact", example=lambda: model(q, k, v, is_causal=True), strict=True):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for hidden in (mask, torch.zeros(mask.shape).masked_fill(~mask, -1e4)):
            output = compiled(q, k, v, attn_mask=hidden, is_causal=True, scale=0.9)
            expected = F.scaled_dot_product_attention(q, k, v, both, scale=0.9)
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    with ea.intercept.replace(model, "exact", example=lambda: model(q, k, v)):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        output = compiled(q, k, v, attn_mask=mask, is_causal=True)
        expected = F.scaled_dot_product_attention(q, k, v, both)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.compile
@torch.no_grad()
def test_a_compiled_graph_refuses_a_mask_of_another_pattern_when_it_runs():
    model, x = OwnModel().eval(), torch.randn(2, TOKENS, DIM)
    ea.intercept.replace(model, "performer-positive", example=lambda: model(x, REAL[:, None, None]))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    mask = REAL[:, None, None].expand(2, 1, TOKENS, TOKENS).clone()
    torch.testing.assert_close(compiled(x, mask), model(x, mask), rtol=1e-4, atol=1e-5)
    mask[0, 0, 3, 4] = False
    with pytest.raises(RuntimeError, match="another pattern"):
        compiled(x, mask)
