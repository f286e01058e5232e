"""Interception of F.scaled_dot_product_attention: measured and captured in any model, its masks read back."""

import math

import pytest
import torch
import torch.nn.functional as F
from integrations.intercepted import (
    DIM,
    HEAD_DIM,
    HEADS,
    LEFT,
    REAL,
    TOKENS,
    TRIANGLE,
    Called,
    OwnAttention,
    OwnModel,
    padded_encoder,
    written_model,
)
from torch import nn

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError, UnknownNameError
from efficient_attn.integrations import masks
from efficient_attn.measure.inputs import read_activations


@torch.no_grad()
def test_the_fused_path_of_torchs_layers_is_off_while_they_are_intercepted():
    model, run = padded_encoder()
    with ea.intercept.measure(model) as measured:
        run()
    assert [str(site) for site in measured.sites] == ["layers.0.self_attn", "layers.1.self_attn"]
    with ea.intercept.replace(model, "exact", example=run) as replaced:
        run()
        assert replaced.calls == {name: {"served": 1} for name in replaced.served}


def test_sites_are_named_by_their_module_and_keep_the_name_in_loops():
    twice, looped = OwnModel(layers=1, calls=2), nn.Sequential(*3 * [OwnAttention()])
    for model, runs, calls in ((twice, 2, {"layers.0": 2, "layers.0#1": 2}), (looped, 1, {"0": 3})):
        with torch.no_grad(), ea.intercept.measure(model) as measured:
            for _ in range(runs):
                model(torch.randn(1, TOKENS, DIM))
        assert {str(name): site.calls for name, site in measured.sites.items()} == calls


@torch.no_grad()
def test_a_measured_error_is_that_of_the_backend_on_the_captured_tensors_of_real_tokens(tmp_path):
    model, run = padded_encoder()
    entries = [ea.intercept.capture(model, entry=entry) for entry in (0, 1)]
    with ea.intercept.measure(model, {"window": {"window": 3}}) as measured, entries[0], entries[1]:
        run()
    name, site = next(iter(measured.sites.items()))
    assert [x.sites[name].q.shape[-2] for x in entries] == [TOKENS, 9]
    squares = []
    for q, k, v in (x.sites[name] for x in entries):
        out = ea.attention(q, k, v, "window", window=3)
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        squares.append(((out - exact).square().sum(), exact.square().sum()))
    errors, norms = map(sum, zip(*squares, strict=True))
    assert site.errors["window(window=3)"] == pytest.approx(math.sqrt(errors / norms), rel=1e-5)
    entries[1].save(tmp_path / "qkv.safetensors")
    stored = read_activations(tmp_path / "qkv.safetensors")
    assert list(stored.layers) == [0, 1]
    assert torch.equal(stored.layers[0].q, entries[1].sites[name].q.half())


def test_requests_of_a_capture_that_cannot_be_served_are_refused(monkeypatch):
    model, run = written_model()
    monkeypatch.setattr("efficient_attn.integrations.capture.MOST_BYTES", 100)
    for options, error, match in (
        ({"only": "layers.7"}, UnknownNameError, r"layers\.7"),
        ({"entry": 2}, OptionError, "entry"),
        ({}, OptionError, "only"),
    ):
        with pytest.raises(error, match=match), ea.intercept.capture(model, **options):
            run()
    with pytest.raises(DataError, match=r"No call .* with its own softmax must call F\."):
        ea.intercept.capture(model).captured()


def bias(shown, low=-math.inf):
    return torch.zeros(shown.shape).masked_fill(~shown, low)


KEYS, ROWS = REAL[:, None, None], REAL[1:, None, :, None]


@pytest.mark.parametrize(
    ("mask", "keys", "causal"),
    [
        (bias(KEYS), REAL, False),
        (bias(KEYS.expand(2, 3, TOKENS, TOKENS), torch.finfo(torch.float32).min), REAL, False),
        # diffusers adds −10000, which bfloat16 rounds to −9984.
        (bias(KEYS, -1e4).bfloat16(), REAL, False),
        (bias(TRIANGLE, -1e4)[None], None, True),
        (torch.stack([TRIANGLE, TRIANGLE]), None, True),
        (torch.ones(TOKENS, TOKENS, dtype=torch.bool), None, False),
        (TRIANGLE[5:], None, True),
        (TRIANGLE & LEFT[:, None, None], LEFT, True),
        # transformers shows everything to rows of padding, so that no row is without a key.
        ((TRIANGLE & LEFT[:, None, None]) | ~LEFT[:, None, :, None], LEFT, True),
        # Exact attention takes all others.
        (TRIANGLE & ~TRIANGLE.tril(-4), None, None),
        (torch.randn(TOKENS, TOKENS), None, None),
        (bias(TRIANGLE) + 0.5 * TRIANGLE, None, None),
        (torch.stack([TRIANGLE, TRIANGLE.mT])[None], None, None),
        (torch.stack([REAL, LEFT], dim=1)[:, :, None], None, None),
        (ROWS, None, None),
        (ROWS.expand(1, 1, TOKENS, TOKENS), None, None),
        # A row that −10000 hides whole is a softmax over all its keys.
        (bias(KEYS & torch.tensor([[[[True]]], [[[False]]]]), -1e4), None, None),
        (TRIANGLE.mT, None, None),
        (KEYS & TRIANGLE.roll(1, 0), None, None),
        (TRIANGLE[:, :5], None, None),
    ],
)
def test_masks_of_keys_and_causal_masks_are_read_back_and_no_others(mask, keys, causal):
    shown = masks.read_mask(mask, batch=2, q_tokens=mask.shape[-2], k_tokens=mask.shape[-1])
    if causal is None:
        assert shown is None
        return
    assert shown is not None and shown.causal is causal
    assert (shown.key_mask is None) if keys is None else torch.equal(shown.key_mask, keys)


@torch.no_grad()
def test_a_mask_that_changes_unseen_by_torch_is_read_again():
    model, x, mask = OwnModel(layers=1).eval(), torch.randn(2, TOKENS, DIM), bias(KEYS)
    with ea.intercept.measure(model, ["exact"]) as measured:
        model(x, mask)
        mask.numpy()[0, ..., 3:] = -math.inf
        model(x, mask)
    (site,) = measured.sites.values()
    assert site.calls == 2 and site.errors["exact"] < 1e-5


def qkv(*, batch=2, heads=HEADS, kv_batch=2, kv_heads=None):
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, heads, TOKENS, HEAD_DIM), (kv_batch, kv_heads or heads, TOKENS, HEAD_DIM)
    return tuple(torch.randn(shapes[index > 0], generator=generator) for index in range(3))


Q, K, V = qkv()
FLAT = Q[:, 0], K[:, 0], V[:, 0]
CALLS = {
    "keys, is_causal": ((Q, K, V), {"attn_mask": KEYS, "is_causal": True}, "causal keys"),
    "triangle, is_causal": ((Q, K, V), {"attn_mask": bias(TRIANGLE), "is_causal": True}, "causal"),
    "one query sequence": (qkv(batch=1), {"attn_mask": KEYS}, "keys"),
    "one key sequence": (qkv(kv_batch=1), {"attn_mask": KEYS}, "keys"),
    "grouped heads": (qkv(kv_heads=1), {"is_causal": True, "enable_gqa": True}, "causal"),
    "two heads": (qkv(heads=2), {"attn_mask": torch.stack([REAL, REAL], 1)[:, :, None]}, "keys"),
    "[heads queries keys]": (qkv(heads=2), {"attn_mask": TRIANGLE.expand(2, -1, -1)}, "causal"),
    "3-D": (FLAT, {"is_causal": True}, "causal"),
    "3-D, [queries keys]": (FLAT, {"attn_mask": TRIANGLE}, "causal"),
    "3-D, [batch 1 keys]": (FLAT, {"attn_mask": REAL[:, None]}, "keys"),
    "3-D, [batch queries keys]": (FLAT, {"attn_mask": TRIANGLE & REAL[:, None]}, "causal keys"),
    "a scale of one entry": ((Q, K, V), {"scale": torch.tensor(0.9)}, "none"),
}


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_a_call_is_read_measured_captured_and_served_as_torch_computes_it(name):
    (q, k, v), options, mask = CALLS[name]
    model, expected = Called(), F.scaled_dot_product_attention(q, k, v, **options)
    with ea.intercept.measure(model, ["exact"]) as measured, ea.intercept.capture(model, entry=1) as captured:
        assert torch.equal(model(q, k, v, **options), expected)
    (site,) = measured.sites.values()
    assert (site.mask, site.exact_because) == (mask, {}) and site.errors["exact"] < 1e-5
    heads = tuple(x.shape[1] if x.ndim == 4 else 1 for x in (q, k))
    assert site.shape == (2, *heads, TOKENS, TOKENS, HEAD_DIM)
    with ea.intercept.replace(model, "exact", example=lambda: model(q, k, v, **options), strict=True):
        torch.testing.assert_close(model(q, k, v, **options), expected, rtol=1e-5, atol=1e-5)
    real = REAL[1] if "keys" in mask else slice(None)
    (stored,) = captured.sites.values()
    for tensor, copy in zip((q, k, v), stored, strict=True):
        entry = tensor[-1] if tensor.ndim == 4 else tensor[-1:]
        assert torch.equal(copy[0], entry[:, real])
    assert bool(captured.captured().patterns) == ("causal" in mask)


PATTERN = "its mask is no key mask and not causal"
LEARNED = torch.zeros(TOKENS, TOKENS, requires_grad=True)


@pytest.mark.parametrize(
    ("tensors", "options", "reason"),
    [
        ((Q, K, V), {"attn_mask": ROWS}, PATTERN),
        ((Q[0, 0, :5], K[0, 0], V[0, 0]), {}, "its tensors have 2 axes"),
        ((Q[:1], K[0], V[0]), {}, "its queries, keys and values have 4, 3 and 3 axes"),
        ((Q, K, V), {"attn_mask": LEARNED}, "its mask is learned (it requires a gradient)"),
    ],
)
def test_a_call_of_another_form_stays_exact_while_it_is_measured(tensors, options, reason):
    with ea.intercept.measure(backends=["exact"]) as measured, ea.intercept.capture() as captured:
        F.scaled_dot_product_attention(*tensors, **options)
    (site,) = measured.sites.values()
    assert site.exact_because == {"all": reason}
    assert list(captured.left_out.values()) == [reason]


@torch.no_grad()
def test_calls_of_one_site_are_measured_with_their_scale_and_only_with_their_causality():
    model, sites = Called(), []
    for calls in ([{}], [{}, {"is_causal": True}], [{}, {"scale": 0.9}, {"scale": 0.0}]):
        with ea.intercept.measure(model, {"exact": {}, "window": {"window": 5}}) as measured:
            for options in calls:
                model(Q, K, V, **options)
        sites += measured.sites.values()
    alone, causal, scaled = sites
    reason = "its causality is not that of its backend"
    assert causal.exact_because == {"exact": reason, "window(window=5)": reason}
    assert causal.errors == alone.errors
    assert scaled.errors["exact"] < 1e-5 and not scaled.exact_because
