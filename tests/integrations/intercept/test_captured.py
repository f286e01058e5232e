"""Calls of F.scaled_dot_product_attention: captured in any model, sites named, masks read back."""

import math

import pytest
import torch
import torch.nn.functional as F
from intercepted_models import DIM, LEFT, REAL, TOKENS, TRIANGLE, Called, OwnModel, padded_encoder
from torch import nn

import efficient_attn as ea
from efficient_attn.errors import DataError, OptionError
from efficient_attn.integrations import masks
from efficient_attn.measure.inputs import read_activations


@torch.no_grad()
def test_sites_are_named_by_their_module_and_keep_the_name_in_loops():
    padded, run_padded = padded_encoder()
    looped, x = nn.Sequential(*3 * [OwnModel().layers[0]]), torch.ones(1, TOKENS, DIM)
    for model, run, sites in (
        # The fused path of torch's layers is off.
        (padded, run_padded, ["layers.0.self_attn", "layers.1.self_attn"]),
        (looped, lambda: looped(x), ["0"]),
    ):
        with ea.intercept.capture(model) as captured:
            run()
        assert list(map(str, captured.sites)) == sites


@torch.no_grad()
def test_the_first_call_of_each_chosen_site_is_kept_and_no_other_site(monkeypatch):
    model, run = padded_encoder()
    with ea.intercept.capture(model, only="layers.1.*") as captured:
        run()
        ((site, first),) = captured.sites.items()
        monkeypatch.setattr("efficient_attn.integrations.capture.MOST_BYTES", captured._bytes)
        run()
    assert str(site) == "layers.1.self_attn" and captured.sites[site] is first


def test_a_capture_without_calls_or_of_too_many_bytes_is_refused(monkeypatch):
    model, run = padded_encoder()
    monkeypatch.setattr("efficient_attn.integrations.capture.MOST_BYTES", 100)
    with pytest.raises(OptionError, match="name fewer layers"), ea.intercept.capture(model):
        run()
    with pytest.raises(DataError, match=r"No call .* with its own softmax must call F\."):
        ea.intercept.capture(model).captured()


def bias(shown, low=-math.inf):
    return torch.zeros(shown.shape).masked_fill(~shown, low)


KEYS, ROWS = REAL[:, None, None], REAL[:1, None, :, None]


@pytest.mark.parametrize(
    ("mask", "keys", "causal"),
    [
        (bias(KEYS), REAL, False),
        (bias(KEYS.expand(2, 3, TOKENS, TOKENS), torch.finfo(torch.float32).min), REAL, False),
        (KEYS[:1], REAL[:1].expand(2, -1), False),
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
        assert shown == masks.PATTERN
        return
    assert shown.causal is causal
    assert (shown.key_mask is None) if keys is None else torch.equal(shown.key_mask, keys)


@torch.no_grad()
def test_a_mask_that_changes_unseen_by_torch_is_read_again():
    model, x, mask = OwnModel(layers=1).eval(), torch.randn(2, TOKENS, DIM), bias(KEYS)
    with ea.intercept.replace(model, "exact", example=lambda: model(x, mask)) as replaced:
        model(x, mask)
        mask.numpy()[0, ..., 3:] = -math.inf
        output = model(x, mask)
        assert replaced.calls == {"layers.0": {"served": 2}}
    torch.testing.assert_close(output, model(x, mask))


def qkv(*, heads=4, kv_heads=None):
    generator = torch.Generator().manual_seed(0)
    numbers = (heads, kv_heads or heads, kv_heads or heads)
    return tuple(torch.randn(2, number, TOKENS, 8, generator=generator) for number in numbers)


Q, K, V = qkv()
CALLS = {
    "keys, is_causal": ((Q, K, V), {"attn_mask": KEYS, "is_causal": True}),
    "triangle, is_causal": ((Q, K, V), {"attn_mask": bias(TRIANGLE), "is_causal": True}),
    "grouped heads": (qkv(kv_heads=1), {"is_causal": True, "enable_gqa": True}),
    "two heads": (qkv(heads=2), {"attn_mask": torch.stack([REAL, REAL], 1)[:, :, None]}),
    "[heads queries keys]": (qkv(heads=2), {"attn_mask": TRIANGLE.expand(2, -1, -1)}),
    "a scale of one entry": ((Q, K, V), {"scale": torch.tensor(0.9)}),
}


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_a_call_is_read_captured_in_half_precision_and_served_as_torch_computes_it(name, tmp_path):
    (q, k, v), options = CALLS[name]
    model, expected = Called(), F.scaled_dot_product_attention(q, k, v, **options)
    with ea.intercept.capture(model) as captured:
        assert torch.equal(model(q, k, v, **options), expected)
    with ea.intercept.replace(model, "exact", example=lambda: model(q, k, v, **options), strict=True):
        torch.testing.assert_close(model(q, k, v, **options), expected, rtol=1e-5, atol=1e-5)
    captured.save(tmp_path / "qkv.safetensors")
    stored = read_activations(tmp_path / "qkv.safetensors")
    masked = "attn_mask" in options and options["attn_mask"].shape[-2] == 1
    for tensor, half in zip((q, k, v), stored.layers[0], strict=True):
        # Real tokens of the first entry.
        assert torch.equal(half[0], (tensor[0][:, REAL[0]] if masked else tensor[0]).half())
    assert bool(stored.patterns) == (options.get("is_causal") or "queries" in name)


FORM = "its tensors are not [batch heads tokens dim] with one batch size"
LEARNED = torch.zeros(TOKENS, TOKENS, requires_grad=True)


@pytest.mark.parametrize(
    ("tensors", "options", "reason"),
    [
        ((Q, K, V), {"attn_mask": ROWS}, "its mask is no key mask and not causal"),
        ((Q[:, 0], K[:, 0], V[:, 0]), {}, FORM),
        ((Q[:1], K, V), {}, FORM),
        ((Q, K, V), {"attn_mask": LEARNED}, "its mask is learned (it requires a gradient)"),
    ],
)
def test_a_call_of_another_form_stays_exact_while_it_is_captured(tensors, options, reason):
    with ea.intercept.capture() as captured:
        F.scaled_dot_product_attention(*tensors, **options)
    assert list(captured.left_out.values()) == [reason]
