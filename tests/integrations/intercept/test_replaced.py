"""Backends in place of F.scaled_dot_product_attention, in any model, eager and compiled."""

import pickle
import re
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import hf_models
import pytest
import torch
import torch.nn.functional as F
from intercepted_models import DIM, MODELS, REAL, TOKENS, Called, OwnModel, written_model
from torch import nn

import efficient_attn as ea
from efficient_attn.errors import OptionError, UnknownNameError, UnsupportedError

PATTERN = "its mask is no key mask and not causal"
CAUSALITY = "its causality is not that of its backend"


def of_transformers(name):
    def make():
        pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")
        model, batch = getattr(hf_models, name)(), hf_models.inputs()
        return model, lambda: hf_models.logits(model, batch)

    return make


@pytest.mark.parametrize("make", [*MODELS, *map(of_transformers, ["modernbert", "opt"])])
@torch.no_grad()
def test_no_call_of_a_model_is_missed_and_exact_in_its_place_changes_rounding_alone(make, request):
    model, run = make()
    names = list(model.state_dict())
    # The fused path of torch's layers calls no attention function and rounds elsewhere.
    request.addfinalizer(lambda: torch.backends.mha.set_fastpath_enabled(True))
    torch.backends.mha.set_fastpath_enabled(False)
    real = F.scaled_dot_product_attention
    with patch.object(F, "scaled_dot_product_attention", wraps=real) as calls:
        alone = run()
    with ea.intercept.capture(model) as captured:
        assert torch.equal(run(), alone)
    # Layers with a sliding window keep their mask, and exact attention.
    sliding = {str(name) for name in captured.left_out}
    assert len(captured.sites) + len(sliding) == calls.call_count > 0
    with ea.intercept.replace(model, "exact", example=run) as replaced:
        torch.testing.assert_close(run(), alone, **hf_models.ROUNDING)
        assert replaced.left == dict.fromkeys(sliding, PATTERN)
        assert {*replaced.served} == {*map(str, captured.sites)}
        assert all(counts == {"served": 1} for counts in replaced.calls.values())
    assert list(model.state_dict()) == names
    assert torch.equal(run(), alone)


@torch.no_grad()
def test_random_features_repeat_by_seed_and_travel_with_state_dicts_and_copies():
    model, run = written_model()
    options = {"example": run, "num_features": 16}
    with ea.intercept.replace(model, "performer-positive", **options, seed=3):
        expected, copy_, state = model(X), pickle.loads(pickle.dumps(model)), model.state_dict()
        first, second = (x.clone() for name, x in state.items() if name.endswith("features.projection"))
        assert sum("efficient_attn.0" in name for name in state) and not torch.equal(first, second)
    assert torch.equal(copy_(X), expected) and not torch.equal(model(X), expected)
    with ea.intercept.replace(model, "performer-positive", **options, seed=3):
        assert torch.equal(model(X), expected)
    with ea.intercept.replace(model, "performer-positive", **options, seed=5):
        assert not torch.equal(model(X), expected)
        model.load_state_dict(state)
        torch.testing.assert_close(model(X), expected)


class Pair(nn.Module):
    """Full and causal attention, of which a run may skip the first or repeat the second."""

    def forward(self, x, first=True, times=1):
        x = F.scaled_dot_product_attention(x, x, x) if first else x
        for _ in range(times):
            x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return x


X, HEADS_OF_X = torch.randn(2, TOKENS, DIM), torch.randn(2, 4, TOKENS, 8)
QKV, LAST = dict.fromkeys("qkv", HEADS_OF_X), HEADS_OF_X[..., -1:, :]
SLIDING = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(-3)
SCALE = "its scale is 0.353553, that of its backend 0.9"
DROPS = "it drops attention weights (dropout_p=0.5)"


@pytest.mark.parametrize(
    ("make", "arguments", "changes", "site", "reason"),
    [
        (OwnModel, {"x": X}, {"mask": SLIDING}, "layers.0", PATTERN),
        (OwnModel, {"x": X}, {"mask": REAL[:, None, None]}, "layers.0", CAUSALITY),
        (lambda: OwnModel(dropout=0.5), {"x": X}, {}, "layers.0", DROPS),
        (lambda: Called(scale=0.9), QKV, {"scale": None}, "model", SCALE),
        (Pair, {"x": HEADS_OF_X}, {"times": 2}, "model#2", "the example makes no such call"),
        # One query of a decoding step reads all keys, and is not causal.
        (lambda: Called(is_causal=True), QKV, {"q": LAST, "is_causal": False}, "model", "served"),
    ],
)
def test_a_call_that_cannot_be_served_stays_exact_with_its_reason(make, arguments, changes, site, reason):
    torch.manual_seed(0)
    model = make().train()

    def example():
        return model(**arguments)

    def run():
        torch.manual_seed(1)
        return model(**{**arguments, **changes})

    expected = run()
    # Its window has all keys.
    with ea.intercept.replace(model, "window", example=example) as replaced:
        assert model.training
        torch.testing.assert_close(run(), expected, rtol=1e-5, atol=1e-5)
        assert replaced.calls[site][reason] == 1
    if reason != "served":
        refused = pytest.raises(UnsupportedError, match=re.escape(f"{site} cannot be served: {reason}"))
        with refused, ea.intercept.replace(model, "window", example=example, strict=True):
            run()


@torch.no_grad()
def test_exact_attention_serves_calls_of_either_causality():
    model = Called()
    with ea.intercept.replace(model, "exact", example=lambda: model(**QKV), strict=True) as replaced:
        for causal in (False, True):
            out = model(**QKV, is_causal=causal)
            torch.testing.assert_close(out, F.scaled_dot_product_attention(*QKV.values(), is_causal=causal))
    assert replaced.served == {"model": "exact"}


CROSS = "its queries and keys are of two sequences (cross-attention)"
# Backends that compare positions, alone and for a part of the heads.
POSITIONED = {
    "window": {"window": 3},
    "nystrom": {"landmarks": 4},
    "by-head": {"heads": {"1": ("window", {"window": 3})}},
}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("backend", POSITIONED)
@torch.no_grad()
def test_torchs_layer_of_two_sequences_stays_exact_at_all_lengths_where_positions_count(backend, batch_first):
    layer = nn.MultiheadAttention(DIM, 4, batch_first=batch_first).eval()
    x, y = torch.randn(2, 12, 12, DIM)

    def run(q, k, v):
        return layer(q, k, v, need_weights=False)[0]

    def attached(name, *call, **options):
        return ea.attach(layer, name, **options, example=lambda: run(*call))

    for call in ((x, y, y), (x, y, x)):
        with pytest.raises(UnsupportedError, match=re.escape(CROSS)):
            attached(backend, *call, **POSITIONED[backend])
    # Layers of detectors add positions to queries and keys, each to its own.
    for call in ((x, x, x), (x, x, y), (x + 0.5, x + 0.5, x)):
        expected = run(x, y, y)
        with attached(backend, *call, **POSITIONED[backend]) as served:
            assert (served.served, served.remarks) == ({"model": backend}, {})
            assert not torch.allclose(run(*call), expected)
            assert torch.equal(run(x, y, y), expected)
            assert served.calls == {"model": {"served": 1, CROSS: 1}}
    # Features of queries and keys have no positions.
    assert attached("linear-elu", x, y, y).served == {"model": "linear-elu"}


def test_dropout_that_keeps_training_exact_is_a_remark():
    layer, x = nn.MultiheadAttention(8, 2, dropout=0.25), torch.randn(9, 1, 8)
    for backend, remarks in (("window", ["dropout=0.25 keeps training exact: set it to 0"]), ("exact", [])):
        with ea.attach(layer, backend, example=lambda: layer(x, x, x, need_weights=False)) as replaced:
            assert list(replaced.remarks.values()) == remarks


@torch.no_grad()
def test_a_site_seen_with_unequal_lengths_stays_exact_and_one_seen_with_equal_ones_gets_a_remark():
    model, (q, k) = Called(), torch.randn(2, 2, 4, TOKENS, 8)
    short, remark = q[:, :, :7], "if this is cross-attention, pass an example with unequal lengths"
    equal, unequal = (lambda: model(q, k, k)), (lambda: model(short, k, k))
    with ea.attach(model, "window", window=3, example=equal) as replaced:
        assert (replaced.served, replaced.remarks) == ({"model": "window"}, {"model": remark})
        torch.testing.assert_close(unequal(), F.scaled_dot_product_attention(short, k, k))
        assert replaced.calls == {"model": {CROSS: 1}}
    for example in ([equal, unequal], [unequal, equal]):
        with pytest.raises(UnsupportedError, match=re.escape(f"cannot be served: {CROSS}")):
            ea.attach(model, "window", window=3, example=example)
    # Causal sites that decode, and features, leave nothing open.
    steps = [lambda: model(q, k, k, is_causal=True), lambda: model(q[:, :, -1:], k, k)]
    for backend, calls in (("window", steps), ("window", steps[::-1]), ("linear-elu", [equal, unequal])):
        with ea.attach(model, backend, example=calls) as replaced:
            assert (replaced.served, replaced.remarks) == ({"model": backend}, {})
    # The longest call counts.
    with ea.attach(model, "linformer", rank=4, example=[lambda: model(short, short, short), equal]):
        equal()


@torch.no_grad()
def test_runs_with_fewer_calls_than_others_are_refused():
    model, x = Pair(), HEADS_OF_X
    with ea.intercept.replace(model, {"model": "exact", "model#1": "window"}, example=lambda: model(x)):
        model(x)
        with pytest.raises(UnsupportedError, match="model makes 1 of the 2 calls of the example"):
            model(x, first=False)
        assert torch.equal(model(x, first=False, times=0), x)
    differ = "model cannot be served: the runs of its module differ in their number of calls"
    with pytest.raises(UnsupportedError, match=differ):
        ea.intercept.replace(model, "exact", example=lambda: (model(x), model(x, first=False)))


@torch.no_grad()
def test_autocast_reaches_the_backend():
    model, run = written_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = run()
        with ea.intercept.replace(model, "exact", example=run, strict=True):
            torch.testing.assert_close(run(), alone, rtol=2**-6, atol=2**-6)


@torch.no_grad()
def test_attention_that_returns_its_weights_is_named_as_unreached():
    layer = nn.MultiheadAttention(DIM, 4, batch_first=True)
    with pytest.raises(UnsupportedError, match=r"model cannot be served: its caller asks for the weights"):
        ea.intercept.replace(layer, "window", example=lambda: layer(X, X, X))


class WithWeights(nn.Module):
    """A layer of another package that asks for attention weights, as fair-esm's, and may use them."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 4, batch_first=True)

    def forward(self, x, use=False, positional=False):
        if positional:
            inner, x = self.attention, x.transpose(0, 1)
            both = (inner.in_proj_weight, inner.in_proj_bias, None, None, False, 0.0)
            ends = (inner.out_proj.weight, inner.out_proj.bias, False, None, positional == "weights")
            return F.multi_head_attention_forward(x, x, x, DIM, 4, *both, *ends)[0].transpose(0, 1)
        output, weights = self.attention(x, x, x)
        return output * weights.mean() if use else output


@torch.no_grad()
def test_weights_that_a_caller_drops_are_none_at_the_users_word():
    model = WithWeights().eval()
    alone, local = model(X), model.attention(X, X, X, need_weights=False)[0]
    with ea.attach(model, "window", window=3, example=lambda: model(X), weights="none") as replaced:
        assert replaced.served == {"attention": "window"}
        actual, weights = model.attention(X, X, X)
        assert weights is None
        assert replaced.calls == {"attention": {"served": 1}}
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(X), actual)
    assert not torch.allclose(actual, local)
    with ea.attach(model, "exact", example=lambda: model(X), weights="none"):
        torch.testing.assert_close(model(X), alone)
    assert torch.equal(model(X), alone)


@torch.no_grad()
def test_a_caller_that_uses_the_weights_learns_why_they_are_none():
    model = WithWeights().eval()
    alone = model(X, use=True)
    arguments = {"weights": "none", "strict": True}
    with pytest.raises(UnsupportedError, match=r"no caller may use them\. Nothing was attached: .*mean"):
        ea.attach(model, "window", example=lambda: model(X, use=True), **arguments)
    with ea.attach(model, "window", example=lambda: model(X), **arguments):
        with pytest.raises(AttributeError, match="'mean'") as raised:
            model(X, use=True)
        assert "weights='none'" in raised.value.__notes__[0]
    assert torch.equal(model(X, use=True), alone)


@torch.no_grad()
def test_need_weights_is_read_by_position():
    model = WithWeights().eval()
    with ea.attach(model, "window", example=lambda: model(X, positional=True)) as replaced:
        assert replaced.served == {"model": "window"}
    example = partial(model, X, positional="weights")
    with pytest.raises(UnsupportedError, match=r"asks for the weights .*weights='none'"):
        ea.attach(model, "window", example=example)
    with ea.attach(model, "window", example=example, weights="none") as replaced:
        assert replaced.served == {"model": "window"}


@torch.no_grad()
def test_a_module_around_another_that_calls_attention_stays_exact():
    class Outer(OwnModel):
        def forward(self, x):
            q = x[:, None]
            return super().forward(F.scaled_dot_product_attention(q, q, q)[:, 0])

    model = Outer(layers=1)
    with ea.intercept.replace(model, "window", example=lambda: model(X)) as replaced:
        assert replaced.left == {"model": "a module inside this one calls attention too"}
        model(X)
        assert replaced.calls == {"layers.0": {"served": 1}}


PAIRS = [("window",), ("window", 65), ("window", {}, 3)]


@pytest.mark.parametrize(
    ("backend", "options", "error", "match"),
    [
        ({"layer.*": "window"}, {}, UnknownNameError, "call site"),
        ("window", {"example": lambda: None}, UnsupportedError, "nowhere: .* code with its own softmax"),
        ("window", {"example": lambda: F.scaled_dot_product_attention(X, X, X)}, UnsupportedError, "outside"),
        ("linformer", {}, UnsupportedError, r"layers\.0 cannot be served: .*causal"),
        *(({"*": pair}, {}, ea.DtypeError, "or a pair such as") for pair in PAIRS),
        ({"*": "window"}, {"window": 3}, OptionError, "With a mapping of backends"),
        ({"*": ("exact", {"causal": True})}, {}, OptionError, "causal=True is no option of backend 'exact'"),
        ("by-head", {"heads": {"0": ("window", {"scale": 1.0})}}, OptionError, "scale=1.0 is no option of"),
        ({}, {}, OptionError, "names no site"),
        ("windoww", {}, UnknownNameError, "windoww"),
        ("window", {"weights": None}, OptionError, "weights is 'exact' or 'none', not None"),
    ],
)
def test_wrong_requests_name_the_argument_and_change_nothing(backend, options, error, match):
    model, run = written_model()
    names = list(model.state_dict())
    with pytest.raises(error, match=match):
        ea.intercept.replace(model, backend, **{"example": run, **options})
    assert list(model.state_dict()) == names
    refused = pytest.raises(OptionError, match=r"undo\(\) it first")
    with ea.intercept.replace(model, {"layers.1": "window"}, example=run) as replaced, refused:
        assert replaced.left == {"layers.0": "no pattern names it"}
        ea.intercept.replace(model, "window", example=run)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_torchs_layers_are_served_in_training_and_evaluation_and_restored(counted):
    layer = nn.TransformerEncoderLayer(DIM, 4, 48, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double()
    nested, names = model.use_nested_tensor, list(model.state_dict())

    def run():
        return model(X.double(), src_key_padding_mask=~REAL)

    replaced = ea.attach(model, "performer-positive", num_features=8, example=run)
    outputs = []
    for training, context in ((True, nullcontext()), (False, nullcontext()), (False, torch.no_grad())):
        model.train(training)
        counted.clear()
        with context:
            outputs.append(run())
        assert [name for name, _ in counted] == 2 * ["performer-positive"]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=1e-12)
    replaced.undo()
    assert model.use_nested_tensor is nested and list(model.state_dict()) == names


def test_models_of_transformers_and_modules_around_them_are_attached_by_layer(counted):
    model, run = of_transformers("bert")()
    for module in (model, nn.ModuleDict({"model": model})):
        counted.clear()
        assert ea.attach(module, {"0-1": "window"}) is module
        run()
        assert [name for name, _ in counted] == ["window", "window", "exact"]
    with pytest.raises(OptionError, match=r"Linear is no transformers model: give example=lambda"):
        ea.attach(nn.Linear(2, 2), "window")


@pytest.mark.compile
@torch.no_grad()
def test_a_compiled_model_without_masks_is_one_graph_and_masks_break_it():
    model, run = written_model()
    with ea.intercept.replace(model, "performer-positive", example=run, num_features=16):
        expected, forward = run(), model.forward
        model.forward = torch.compile(forward, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-5)
        model.forward = forward
    model, (q, k, v) = Called(), torch.randn(3, 2, 4, TOKENS, 8)
    given = {"attn_mask": REAL[:, None, None]}
    with ea.intercept.replace(model, "window", example=lambda: model(q, k, v, **given), window=3) as replaced:
        expected = model(q, k, v, **given)
        with pytest.raises(Exception, match="masks are not read in a whole compiled graph"):
            torch.compile(model, fullgraph=True, backend="aot_eager")(q, k, v, **given)
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(q, k, v, **given), expected)
        assert replaced.calls == {"model": {"served": 2}}
