"""Interception of F.scaled_dot_product_attention: measured and captured in any model, its masks read back."""

import math

import pytest
import torch
import torch.nn.functional as F
from intercepted import (
    DIM,
    LEFT,
    MODELS,
    REAL,
    TOKENS,
    TRIANGLE,
    Looped,
    OwnModel,
    own,
    padded_encoder,
    slow_path,
)

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError, UnknownNameError
from efficient_attn.integrations.intercept import masks
from efficient_attn.measure.inputs import read_activations

__all__ = ["slow_path"]  # a fixture of every test here


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
