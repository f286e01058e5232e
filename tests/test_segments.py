"""Causal linear attention segment by segment, against its definition in float64."""

import math
from itertools import pairwise

import pytest
import torch
from reference import random_mask, random_qkv

import efficient_attn as ea
from efficient_attn.ops import paths
from efficient_attn.ops.linear import scaled_chunks as chunks
from efficient_attn.ops.linear import scaled_chunks as scan
from efficient_attn.ops.linear import weak_chunks
from efficient_attn.ops.linear.features import MAPS
from efficient_attn.ops.linear.scaled_chunks import running_states
from efficient_attn.ops.linear.state import LinearState
from efficient_attn.ops.paths import VARIABLE, tuned_for_cpu

LINEAR = [name for name in ea.list_backends() if name.startswith(("linear-", "performer-"))]


def built(name, scale=None):
    size = ea.spec(name).size_option
    backend = ea.build(name, head_dim=4, causal=True, scale=scale, **({size: 8} if size else {})).double()
    if backend.needs_calibration:
        backend.calibrate(*random_qkv(1, 4, 2, 32, 32, 4, seed=9)[:2])
    return backend


def by_definition(backend, q, k, v, mask):
    """Σ_j φ(q)·φ(k_j) v_j / Σ_j φ(q)·φ(k_j) over visible keys, from differentiable features; 0: no key."""
    features = backend.core.features
    directions = getattr(features, "projection", None)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    of_q, of_k = (
        MAPS[features.kind].features(
            x * math.sqrt(backend.problem.factor), None if directions is None else directions.double()
        )
        for x in (q, k)
    )
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    visible = visible & mask[:, None, None]
    if of_q.values is None:
        weights = (of_q.log_scale.unsqueeze(-2) + of_k.log_scale.unsqueeze(-3)).exp().sum(dim=-1)
    else:
        weights = of_q.values @ (of_k.values * of_k.log_scale.exp()).mT
    weights = weights.masked_fill(~visible, 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    return weights @ v / total.masked_fill(~visible.any(dim=-1, keepdim=True), 1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("name", "path"), [("linear-elu", ""), ("linear-elu", "torch"), ("performer-positive", "torch")]
)
def test_scales_far_from_zero_lose_no_digits(name, path, dtype, monkeypatch):
    monkeypatch.setenv(VARIABLE, path)
    backend = built(name)
    tensors = [x.to(dtype).requires_grad_() for x in random_qkv(2, 4, 2, 192, 192, head_dim=4)]
    found = backend.to(dtype)(*tensors)
    precise = [x.detach().double().requires_grad_() for x in tensors]
    wanted = by_definition(backend.double(), *precise, torch.ones(2, 192, dtype=torch.bool))
    grad = torch.randn_like(wanted).to(dtype)
    # Some roundings of exponents below 4 and of sums of 192 terms; exponents of 300 or 40 would have more.
    bound = 16 * torch.finfo(dtype).eps
    for one, other in zip(
        (found, *torch.autograd.grad(found, tensors, grad)),
        (wanted, *torch.autograd.grad(wanted, precise, grad.double())),
        strict=True,
    ):
        assert (one - other).norm() <= bound * other.norm()


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("path", ["", "torch"])
@pytest.mark.parametrize("name", ["linear-elu", "linear-relu", "performer-positive", "performer-trig"])
def test_outputs_and_gradients_over_ragged_segments_are_those_of_the_definition(
    name, path, weak, monkeypatch
):
    monkeypatch.setenv(VARIABLE, path)
    backend = built(name)
    q, k, v = (x.requires_grad_() for x in random_qkv(2, 4, 2, 45, 53, head_dim=4))
    # Chunks of 8 tokens, 4 of them in the first segment and 13 tokens in the second; a scan in groups of 2.
    for constant, size in {"CHUNK": 8, "_LARGE_CHUNK": 8, "_MULTIPLE": 4}.items():
        monkeypatch.setattr(chunks, constant, size)
    inputs = backend.core.features(q, k, v, None, 1.0)
    for module, constant in ((chunks, "_CACHED"), (paths, "HELD")):
        monkeypatch.setattr(module, constant, 32 * 2 * 4 * inputs.num_features)
    assert chunks.segments(inputs) == [slice(0, 32), slice(32, 45)]
    monkeypatch.setattr(scan, "_RADIX", 2)
    monkeypatch.setattr(weak_chunks, "_BLOCK", 2)
    if weak:
        # Every row of exponential features is weak.
        monkeypatch.setitem(weak_chunks._WEAK, torch.float64, 1e4)
    # No key is visible to the rows of the first three chunks.
    mask = random_mask(2, 53)
    mask[1, :34] = False
    wanted = by_definition(backend, q, k, v, mask)
    found = backend(q, k, v, key_mask=mask)
    for one, other in zip(
        (found, *torch.autograd.grad(found.sin().sum(), (q, k, v))),
        (wanted, *torch.autograd.grad(wanted.sin().sum(), (q, k, v))),
        strict=True,
    ):
        # Relative to the largest: trigonometric rows near a zero sum dominate.
        assert (one - other).abs().max() <= 1e-10 * other.abs().max()


@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 9])
def test_running_states_are_sums_over_the_chunks_up_to_each(number, features, monkeypatch):
    # Groups of groups of two.
    monkeypatch.setattr(scan, "_RADIX", 2)
    generator = torch.Generator().manual_seed(number)
    sums = torch.randn(2, number, 3, 4, generator=generator, dtype=torch.float64)
    scales = 5 * torch.randn(2, number, 1, features, generator=generator, dtype=torch.float64)
    scales[0, :2], sums[0, :2] = -torch.inf, 0.0
    for reverse in (False, True):
        found = running_states(LinearState(sums, scales), reverse=reverse)
        for chunk in range(number):
            some = slice(chunk, None) if reverse else slice(0, chunk + 1)
            largest = scales[:, some].amax(dim=1, keepdim=True)
            factors = (scales[:, some] - largest.clamp_min(-1e30)).exp().mT
            assert torch.equal(found.log_scale[:, chunk], largest[:, 0])
            # Nine terms of at most four, each with the rounding of a power and of a product.
            wanted = (factors * sums[:, some]).sum(dim=1)
            assert (found.sums[:, chunk] - wanted).abs().max() <= 9 * 4 * 8 * torch.finfo(sums.dtype).eps


@pytest.mark.parametrize(
    ("path", "scale", "masked"),
    [("", None, False), ("", -0.4, False), ("", None, True), ("torch", None, False), ("torch", -0.4, True)],
)
@pytest.mark.parametrize("name", LINEAR)
def test_tokens_after_a_state_have_the_rows_of_one_call(name, path, scale, masked, monkeypatch):
    monkeypatch.setenv(VARIABLE, path)
    backend, given = built(name, scale), random_qkv(2, 4, 2, 24, 24, head_dim=4)
    mask = random_mask(2, 24) if masked else None
    wanted = backend(*given, key_mask=mask)
    for constant, size in {"CHUNK": 8, "_LARGE_CHUNK": 8, "_MULTIPLE": 4}.items():
        monkeypatch.setattr(chunks, constant, size)
    state, rows = None, []
    # Two chunks with padding, decoding steps, and padding again.
    for start, stop in pairwise([0, 9, 10, 11, 24]):
        some = None if mask is None else mask[:, start:stop]
        out, state = backend.extend(*(x[..., start:stop, :] for x in given), state, key_mask=some)
        rows.append(out)
    assert (torch.cat(rows, dim=-2) - wanted).abs().max() <= 1e-11 * wanted.abs().max()


def test_a_share_of_all_chunks_is_computed_again_on_other_devices(monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")
    monkeypatch.setattr(weak_chunks, "_FEATURES", 1)
    (found,) = weak_chunks.weak_chunks(torch.ones(2, 64, 4, 1, dtype=torch.bool), 8)
    assert len(found) == 2 * 64 // weak_chunks._SHARE


@pytest.mark.parametrize(("path", "masked"), [("", False), ("torch", False), ("torch", True)])
@pytest.mark.parametrize("name", LINEAR)
def test_gradients_through_a_state_are_those_of_one_call(name, path, masked, monkeypatch):
    monkeypatch.setenv(VARIABLE, path)
    backend = built(name)
    given = [x.requires_grad_() for x in random_qkv(2, 4, 2, 24, 24, head_dim=4)]
    # The first keys of a batch entry are masked, one more than the first call has.
    mask = (torch.arange(24) > torch.tensor([[-1], [9]])) if masked else None
    masks = (None, None) if mask is None else mask.split([9, 15], dim=1)
    wanted = torch.autograd.grad(backend(*given, key_mask=mask).sin().sum(), given)
    first, state = backend.extend(*(x[..., :9, :] for x in given), key_mask=masks[0])
    second, _ = backend.extend(*(x[..., 9:, :] for x in given), state, key_mask=masks[1])
    found = torch.autograd.grad(torch.cat([first, second], dim=-2).sin().sum(), given)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-10 * other.abs().max()


@pytest.mark.parametrize("path", ["", "torch"])
def test_gradients_through_a_state_stay_finite_where_keys_grow(path, monkeypatch):
    monkeypatch.setenv(VARIABLE, path)
    q, k, v = (x.float() for x in random_qkv(1, 2, 2, 40, 40, head_dim=4))
    given = [x.requires_grad_() for x in (q, k * torch.linspace(0.05, 60, 40)[:, None], v)]
    for name in LINEAR:
        backend = built(name).float()
        _, state = backend.extend(*(x[..., :10, :] for x in given))
        out, _ = backend.extend(*(x[..., 10:, :] for x in given), state)
        for one in torch.autograd.grad(out.sin().sum(), given):
            assert one.isfinite().all(), name


def test_the_variable_chooses_the_path_of_other_devices(monkeypatch):
    x = torch.ones(1)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert tuned_for_cpu(x)
    assert not tuned_for_cpu(x.to("meta"))
    monkeypatch.setenv(VARIABLE, "torch")
    assert not tuned_for_cpu(x)
