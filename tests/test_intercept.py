"""Interception of F.scaled_dot_product_attention: measured, captured and replaced in any model."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError, UnknownNameError, UnsupportedError
from efficient_attn.integrations.intercept import masks
from efficient_attn.measure.inputs import read_activations

HEADS, HEAD_DIM, TOKENS = 4, 8, 12
DIM = HEADS * HEAD_DIM


class OwnAttention(nn.Module):
    """Attention as people write it: one projection, causal or by mask, `calls` times in one forward."""

    def __init__(self, calls=1, dropout=0.0):
        super().__init__()
        self.projection, self.calls, self.dropout = nn.Linear(DIM, 3 * DIM), calls, dropout

    def forward(self, x, mask=None):
        for _ in range(self.calls):
            q, k, v = self.projection(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
            causal, dropout = mask is None, self.dropout if self.training else 0.0
            x = x + F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout
            ).transpose(1, 2).flatten(2)
        return x


class OwnModel(nn.Module):
    def __init__(self, layers=2, **options):
        super().__init__()
        self.layers = nn.ModuleList(OwnAttention(**options) for _ in range(layers))

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Looped(nn.Module):
    """One layer three times."""

    def __init__(self):
        super().__init__()
        self.layer = OwnAttention()

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x)
        return x


def encoder():
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def padding():
    hidden = torch.zeros(2, TOKENS, dtype=torch.bool)
    hidden[1, 9:] = True
    return hidden


def own():
    torch.manual_seed(0)
    model, x = OwnModel().eval(), torch.randn(2, TOKENS, DIM)
    return model, lambda: model(x)


def padded_encoder():
    torch.manual_seed(0)
    model, x = encoder().eval(), torch.randn(2, TOKENS, DIM)
    return model, lambda: model(x, src_key_padding_mask=padding()).masked_fill(padding()[..., None], 0.0)


def translation():
    torch.manual_seed(0)
    model = nn.Transformer(DIM, HEADS, 1, 2, 2 * DIM, batch_first=True, dropout=0.0).eval()
    source, target = torch.randn(2, TOKENS, DIM), torch.randn(2, 7, DIM)
    later = nn.Transformer.generate_square_subsequent_mask(7)
    return model, lambda: model(source, target, tgt_mask=later, tgt_is_causal=True)


MODELS = pytest.mark.parametrize("made", [own, padded_encoder, translation], ids=lambda made: made.__name__)


@pytest.fixture(autouse=True)
def slow_path():
    """torch's fused path of nn.TransformerEncoderLayer calls no attention function and rounds elsewhere."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@MODELS
@torch.no_grad()
def test_a_measured_model_computes_the_same_bits(made):
    model, run = made()
    alone = run()
    with ea.intercept.measure(model, ["exact", "performer-positive"]) as measured:
        assert torch.equal(run(), alone)
    for one in measured.sites.values():
        assert one.errors["exact"] < 1e-5 < one.errors["performer-positive"]
        assert not one.exact_because
        assert 0 < one.entropy <= one.uniform_entropy
    assert 0 < measured.to_pandas()["time_share"].sum() < 1


@torch.no_grad()
def test_the_fused_path_of_torchs_layers_is_off_while_they_are_intercepted():
    torch.backends.mha.set_fastpath_enabled(True)
    model, run = padded_encoder()
    with ea.intercept.measure(model) as measured:
        run()
    assert [str(site) for site in measured.sites] == ["layers.0.self_attn", "layers.1.self_attn"]
    with ea.intercept.replace(model, "exact", example=run) as replaced:
        run()
        assert replaced.calls == {name: {"served": 1} for name in replaced.served}


def test_sites_are_named_by_their_module_and_keep_the_name_in_loops():
    x = torch.randn(1, TOKENS, DIM)
    twice, looped = OwnModel(layers=1, calls=2), Looped()
    with torch.no_grad(), ea.intercept.measure(twice) as measured:
        twice(x), twice(x)
    assert {str(site): one.calls for site, one in measured.sites.items()} == {"layers.0": 2, "layers.0#1": 2}
    with torch.no_grad(), ea.intercept.measure(looped) as measured:
        looped(x)
    assert {str(site): one.calls for site, one in measured.sites.items()} == {"layer": 3}


@torch.no_grad()
def test_a_measured_error_is_that_of_the_backend_on_these_tensors():
    model, run = padded_encoder()
    with (
        ea.intercept.measure(model, {"window": {"window": 3}}) as measured,
        ea.intercept.capture(model) as kept,
    ):
        run()
    site, one = next(iter(measured.sites.items()))
    captured, whole = kept.sites[site], []
    with ea.intercept.capture(model, entry=1) as second:
        run()
    for q, k, v in (captured, second.sites[site]):
        out = ea.attention(q, k, v, "window", window=3)
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        whole.append(((out - exact).square().sum(), exact.square().sum()))
    errors, norms = map(sum, zip(*whole, strict=True))
    assert one.errors["window(window=3)"] == pytest.approx(math.sqrt(errors / norms), rel=1e-5)
    assert [x.q.shape[-2] for x in (captured, second.sites[site])] == [TOKENS, 9]


def test_equal_keys_have_the_entropy_of_uniform_weights():
    q, k = torch.randn(1, 2, 70, 8), torch.ones(1, 1, 70, 8)
    with ea.intercept.measure() as measured:
        F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    (one,) = measured.sites.values()
    assert one.entropy == pytest.approx(one.uniform_entropy, rel=1e-12)
    assert one.shape == (1, 2, 1, 70, 70, 8)


TRIANGLE = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
REAL = ~padding()
LEFT = REAL.flip(1)


def bias(shown, low=-math.inf):
    return torch.zeros(shown.shape).masked_fill(~shown, low)


@pytest.mark.parametrize(
    ("mask", "keys", "causal"),
    [
        (REAL[:, None, None], REAL, False),
        (bias(REAL[:, None, None]), REAL, False),
        (bias(REAL[:, None, None].expand(2, 3, TOKENS, TOKENS), torch.finfo(torch.float32).min), REAL, False),
        (torch.ones(TOKENS, TOKENS, dtype=torch.bool), None, False),
        (TRIANGLE, None, True),
        (bias(TRIANGLE), None, True),
        (bias(TRIANGLE)[None], None, True),
        (TRIANGLE[5:], None, True),
        (TRIANGLE & REAL[:, None, None], REAL, True),
        (TRIANGLE & LEFT[:, None, None], LEFT, True),
        # transformers shows everything to rows of padding, so that no row is without a key.
        ((TRIANGLE & LEFT[:, None, None]) | ~LEFT[:, None, :, None], LEFT, True),
    ],
)
def test_masks_of_keys_and_causal_masks_are_read_back(mask, keys, causal):
    found = masks.read(mask, batch=2, q_tokens=mask.shape[-2], k_tokens=TOKENS)
    assert found is not None
    assert found.causal is causal
    assert (found.keys is None) if keys is None else torch.equal(found.keys, keys)


@pytest.mark.parametrize(
    "mask",
    [
        TRIANGLE & ~TRIANGLE.tril(-4),
        torch.randn(TOKENS, TOKENS),
        bias(TRIANGLE) + 0.5 * TRIANGLE,
        torch.stack([TRIANGLE, TRIANGLE.mT])[None],
        TRIANGLE.mT,
        REAL[:, None, None] & TRIANGLE.roll(1, 0),
        TRIANGLE[:, :5],
    ],
    ids=["sliding", "bias", "causal bias", "by head", "upper", "shifted", "more queries than keys"],
)
def test_other_masks_are_left_to_exact_attention(mask):
    assert masks.read(mask, batch=2, q_tokens=TOKENS, k_tokens=mask.shape[-1]) is None


def test_layers_that_share_a_mask_read_it_once_and_a_changed_one_again(monkeypatch):
    count, read = [], masks.read
    monkeypatch.setattr(masks, "read", lambda *args, **options: count.append(1) or read(*args, **options))
    model, x, mask = OwnModel(layers=3).eval(), torch.randn(2, TOKENS, DIM), REAL[:, None, None].clone()
    with torch.no_grad(), ea.intercept.measure(model):
        model(x, mask), model(x, mask[:, :])
        assert len(count) == 1
        mask[0, ..., 3] = False
        model(x, mask)
    assert len(count) == 2


@MODELS
@torch.no_grad()
def test_exact_in_the_place_of_torchs_function_changes_rounding_alone(made):
    model, run = made()
    alone, names = run(), list(model.state_dict())
    with ea.intercept.replace(model, "exact", example=run, strict=True) as replaced:
        torch.testing.assert_close(run(), alone, rtol=1e-5, atol=1e-5)
        assert not replaced.left
        assert all(counts == {"served": 1} for counts in replaced.calls.values())
    assert list(model.state_dict()) == names
    assert torch.equal(run(), alone)


@MODELS
@torch.no_grad()
def test_replaced_attention_travels_with_copies_state_dicts_and_pickles(made):
    model, run = made()
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
    model, run = own()
    x = torch.randn(1, TOKENS, DIM)
    with ea.intercept.replace(model, "performer-positive", example=run, num_features=16):
        expected, other = model(x), copied(model)
    assert torch.equal(other(x), expected)
    assert not torch.equal(model(x), expected)


def test_parameters_of_backends_are_trained_and_a_checkpoint_computes_them_again():
    torch.manual_seed(0)
    model, x = encoder().train(), torch.randn(2, TOKENS, DIM)
    ea.intercept.replace(model, "linformer", example=lambda: model(x), rank=4)
    mixing = [name for name, _ in model.named_parameters() if "efficient_attn" in name]
    assert mixing
    wanted = [dict(model.named_parameters())[name] for name in mixing]
    direct = torch.autograd.grad(model(x).square().sum(), wanted)
    # The second forward runs within the backward pass, outside of every block.
    again = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).square().sum(), wanted)
    for one, other in zip(direct, again, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_each_site_may_have_its_own_backend():
    model, run = own()
    choice = {"layers.0": ("window", {"window": 3}), "layers.1": "performer-positive"}
    with ea.intercept.replace(model, choice, example=run) as replaced:
        assert replaced.served == {"layers.0": "window", "layers.1": "performer-positive"}
    with ea.intercept.replace(model, "window", example=run, only="layers.1") as replaced:
        assert replaced.left == {"layers.0": "no pattern names it"}
        run()


@torch.no_grad()
def test_random_features_differ_by_site_and_repeat_by_seed():
    model, run = own()

    def projections(seed):
        with ea.intercept.replace(model, "performer-positive", example=run, seed=seed):
            return [x.clone() for name, x in model.named_buffers() if "projection" in name]

    first, second = projections(3)
    assert not torch.equal(first, second)
    assert all(map(torch.equal, projections(3), [first, second]))
    assert not torch.equal(projections(4)[0], first)


@torch.no_grad()
def test_calls_that_cannot_be_served_stay_exact_with_their_reason():
    model, run = own()
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


@torch.no_grad()
def test_autocast_reaches_the_backend():
    model, run = own()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = run()
        with ea.intercept.replace(model, "exact", example=run, strict=True):
            torch.testing.assert_close(run(), alone, rtol=2**-6, atol=2**-6)


@torch.no_grad()
def test_backends_that_need_calibration_are_calibrated_on_the_example():
    model, run = own()
    alone = run()
    with ea.intercept.measure(model, ["performer-full"]) as measured:
        run()
    with ea.intercept.replace(model, "performer-full", example=run, strict=True):
        assert not torch.equal(run(), alone)
    assert all(one.errors["performer-full"] > 0 for one in measured.sites.values())


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


def test_wrong_requests_name_the_argument_and_change_nothing():
    model, run = own()
    names = list(model.state_dict())
    with pytest.raises(UnknownNameError, match="call site"):
        ea.intercept.replace(model, "window", example=run, only="layer.*")
    with pytest.raises(UnsupportedError, match=r"F\.scaled_dot_product_attention nowhere"):
        ea.intercept.replace(model, "window", example=lambda: None)
    with pytest.raises(UnsupportedError, match=r"layers\.0 cannot be served: .*causal"):
        ea.intercept.replace(model, "linformer", example=run)
    with pytest.raises(OptionError, match="belong into the mapping"):
        ea.intercept.replace(model, {"*": "window"}, example=run, window=3)
    with pytest.raises(UnknownNameError, match="windoww"):
        ea.intercept.replace(model, "windoww", example=run)
    assert list(model.state_dict()) == names
    refused = pytest.raises(OptionError, match=r"undo\(\) it first")
    with ea.intercept.replace(model, "window", example=run), refused:
        ea.intercept.replace(model, "window", example=run)


@torch.no_grad()
def test_captured_sites_are_read_as_layers_by_the_measurements(tmp_path):
    model, run = padded_encoder()
    with ea.intercept.capture(model, entry=1) as captured:
        run()
    captured.save(tmp_path / "qkv.safetensors")
    kept = read_activations(tmp_path / "qkv.safetensors")
    assert list(kept.layers) == [0, 1]
    assert torch.equal(kept.layers[1].q, captured.sites[list(captured.sites)[1]].q.half())
    assert kept.about["sites"] == '["layers.0.self_attn", "layers.1.self_attn"]'
    errors = ea.mse(["window"], sizes=[3], inputs=str(tmp_path / "qkv.safetensors")).to_pandas()
    assert set(errors["status"]) == {"ok"}


@torch.no_grad()
def test_captured_causal_sites_say_so_and_wrong_requests_are_refused(tmp_path):
    model, run = own()
    with ea.intercept.capture(model, only="layers.1") as captured:
        run()
    assert captured.captured().patterns == {0: "causal over all keys"}
    with pytest.raises(UnknownNameError, match=r"layers\.7"):
        ea.intercept.capture(model, only="layers.7")
    with pytest.raises(DataError, match="No call"):
        ea.intercept.capture(model).captured()
    with pytest.raises(OptionError, match="entry"), ea.intercept.capture(model, entry=2):
        run()
    with pytest.raises(OptionError, match="only"), ea.intercept.capture(model, most_bytes=100):
        run()


@pytest.mark.compile
@MODELS
@torch.no_grad()
def test_a_compiled_model_with_backends_is_one_graph(made):
    model, run = made()
    with ea.intercept.replace(model, "performer-positive", example=run, num_features=16):
        expected, forward = run(), model.forward
        model.forward = torch.compile(forward, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-5)
        model.forward = forward


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
