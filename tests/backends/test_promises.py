"""Promises of single backends: dropout, rows asked of the kernel, weights and memory in half precision."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from reference import random_mask, random_qkv, relative_error

import efficient_attn as ea
from efficient_attn.measure.memory import peak
from efficient_attn.options import recorded


@pytest.mark.parametrize("name", ["exact", "exact-dense"])
def test_dropout_drops_at_its_rate_in_training_and_never_in_eval(name):
    torch.manual_seed(0)
    q, k, _ = (x.float() for x in random_qkv(1, 4, 4, 40, 40))
    values = torch.eye(40).expand(1, 4, 40, 40)
    backend = ea.build(name, head_dim=8, dropout=0.25)
    dropped = (backend.train()(q, k, values) == 0).float()
    # Binomial: 6400 weights, each dropped with probability 1/4.
    assert abs(dropped.mean() - 0.25) < 4.5 * math.sqrt(0.25 * 0.75 / dropped.numel())
    before = torch.get_rng_state()
    assert (backend.eval()(q, k, values) != 0).all()
    assert torch.equal(before, torch.get_rng_state())


COMPUTED = [("exact", {}), ("window", {"window": 65}), ("window", {"window": 65, "global_tokens": 3})]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize(("backend", "options"), COMPUTED)
def test_a_compute_dtype_is_a_cast_of_inputs_and_output_to_the_bit(backend, options, name, causal):
    keys, problem = 700 if causal or backend == "exact" else 600, {"head_dim": 8, "causal": causal, **options}
    leaves = [x.float().requires_grad_() for x in random_qkv(2, 4, 2, 600, keys)]
    cast, mask = [x.to(getattr(torch, name)) for x in leaves], random_mask(2, keys)
    backend, plain = (ea.build(backend, **problem, compute_dtype=x) for x in (name, None))
    outs = backend(*leaves, key_mask=mask), plain(*cast, key_mask=mask).float()
    gradients = [torch.autograd.grad(out.square().sum(), leaves) for out in outs]
    for actual, expected in zip((outs[0], *gradients[0]), (outs[1], *gradients[1]), strict=True):
        assert actual.dtype == torch.float32 and torch.equal(actual, expected)


WITHOUT = sorted({*ea.list_backends(), "by-head"} - {"exact", "window"})
STEPPED = [("exact", {}), ("window", {"window": 4}), ("window", {"window": 3, "global_tokens": 2})]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "options"), STEPPED)
def test_steps_in_a_compute_dtype_keep_a_state_in_the_dtype_of_the_inputs(name, options, masked):
    tokens, outs = [x.float() for x in random_qkv()], []
    for cast, compute in ((torch.float32, "bfloat16"), (torch.bfloat16, None)):
        backend, state = ea.build(name, head_dim=8, causal=True, compute_dtype=compute, **options), None
        for step in (slice(0, 5), slice(5, 6), slice(6, 7)):
            mask = torch.arange(7)[step].expand(2, -1) > 1 if masked else None
            out, state = backend.extend(*(x[:, :, step].to(cast) for x in tokens), state, key_mask=mask)
            assert {out.dtype, *(x.dtype for x in state if x.dtype != torch.bool)} == {cast}
            outs.append(out.float())
    for actual, expected in zip(outs[:3], outs[3:], strict=True):
        assert torch.equal(actual, expected)


@torch.no_grad()
def test_each_head_computes_in_a_dtype_of_its_own():
    q, k, v = (x.float() for x in random_qkv())
    heads = {"0": ("exact", {"compute_dtype": "bfloat16"}), "1": "window"}
    out = ea.build("by-head", head_dim=8, causal=True, heads=heads)(q, k, v)
    half, full = (ea.build("exact", head_dim=8, causal=True, compute_dtype=x) for x in ("bfloat16", None))
    assert torch.equal(out[:, :2], half(q[:, :2], k[:, :1], v[:, :1]))
    torch.testing.assert_close(out[:, 2:], full(q[:, 2:], k[:, 1:], v[:, 1:]), rtol=0, atol=1e-6)


def test_a_window_at_the_default_of_a_compute_dtype_keeps_the_keys_of_stored_cases():
    chosen = ea.build("window", head_dim=8).options
    assert recorded(chosen) == {"window": 257}
    assert recorded(replace(chosen, compute_dtype="float16"))["compute_dtype"] == "float16"


def test_a_compute_dtype_costs_digits_and_no_other_dtypes_and_backends_have_it():
    q, k, v = random_qkv(k_tokens=512)
    out = ea.attention(q.float(), k.float(), v.float(), compute_dtype="bfloat16")
    assert 1e-3 < relative_error(out, ea.attention(q, k, v)) < 1e-2
    for backend, name, message in (
        ("exact", "float32", "No choice of compute_dtype is called 'float32'"),
        ("window", "float64", "No choice of compute_dtype is called 'float64'"),
        *((x, "bfloat16", f"No option of backend '{x}' is called 'compute_dtype'") for x in WITHOUT),
    ):
        with pytest.raises(ea.UnknownNameError, match=message):
            ea.build(backend, head_dim=8, compute_dtype=name)


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_is_asked_for_no_row_without_a_key(monkeypatch, causal):
    masks, kernel = [], F.scaled_dot_product_attention

    def attend(*tensors, attn_mask, **options):
        masks.append(attn_mask)
        return kernel(*tensors, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    # A masked token between real ones needs a mask in causal attention too.
    mask = (torch.arange(7) >= torch.tensor([[3], [7]])) & (torch.arange(7) != 5)
    ea.build("exact", head_dim=8, causal=causal)(*random_qkv(2, 2, 1, 7, 7), key_mask=mask)
    assert masks and all(mask.any(dim=-1).all() for mask in masks)


def test_weights_of_half_precision_come_in_float32_unrounded():
    q, k, _ = (x.bfloat16() for x in random_qkv(1, 2, 1, 7, 7))
    backend = ea.build("exact", head_dim=8)
    assert torch.equal(backend.attention_weights(q, k), backend.attention_weights(q.float(), k.float()))


@pytest.mark.parametrize("name", ["performer-positive", "performer-full", "linear-hedgehog", "linformer"])
def test_a_backend_of_inference_mode_is_trained_outside_it(name):
    q, k, v = (x.float() for x in random_qkv(1, 2, 2, 7, 7))
    options = {"rank": 4} if name == "linformer" else {}
    with torch.inference_mode():
        backend, loaded = (ea.build(name, head_dim=8, max_tokens=7, **options) for _ in range(2))
        ea.calibrate(backend.double().float(), q.clone(), k.clone(), v.clone())
        loaded.load_state_dict(backend.state_dict())
        copied = copy.deepcopy(loaded).double()
        torch.testing.assert_close(copied(q.double(), k.double(), v.double()).float(), backend(q, k, v))
    for module in (backend, loaded):
        x = q.clone().requires_grad_()
        module(x, k, v).square().sum().backward()
        assert x.grad.abs().max() > 0 and not any(y.is_inference() for y in module.state_dict().values())


# Half precision is computed with in float32; the many operations of causal chunks take seconds.
LONG = [("performer-trig", False), ("performer-positive", True), ("performer-trig", True)]
CASES = [("linformer", False), ("performer-positive", False)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in LONG]


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_half_precision_takes_no_more_memory_than_float32_forward_or_backward(name, causal):
    backend = ea.build(name, head_dim=16, causal=causal, max_tokens=4096)

    def peaks(dtype):
        leaves = [torch.randn(1, 1, 4096, 16).to(dtype).requires_grad_() for _ in range(3)]
        with torch.no_grad():
            forward = peak(lambda: backend(*leaves), device="cpu").peak_bytes
        both = peak(lambda: torch.autograd.grad(backend(*leaves).sum(), leaves), device="cpu").peak_bytes
        return forward, both

    wide, half = peaks(torch.float32), peaks(torch.bfloat16)
    assert half[0] <= wide[0] and half[1] <= wide[1]


def test_all_heads_of_a_learned_map_start_from_the_identity():
    q, k, v = random_qkv()
    shared, each = (ea.build("linear-hedgehog", head_dim=8, num_heads=n).double() for n in (None, 4))
    assert torch.equal(each.core.features.key_weight, torch.eye(8).double().expand(4, 8, 8))
    torch.testing.assert_close(shared(q, k, v), each(q, k, v))
