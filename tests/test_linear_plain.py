"""Causal chunks without guards: where exponents are moderate, and only there, and what follows them."""

import math

import pytest
import torch
from reference import random_qkv, reference_linear, worst_row

import efficient_attn as ea
from efficient_attn.ops.linear import causal_exponential
from efficient_attn.ops.paths import VARIABLE


@pytest.fixture
def taken(monkeypatch):
    """Whether each chunk was taken without guards, in order."""
    told, moderate = [], causal_exponential.moderate
    monkeypatch.setenv(VARIABLE, "")

    def asked(*exponents_and_values):
        told.append(moderate(*exponents_and_values))
        return told[-1]

    monkeypatch.setattr(causal_exponential, "moderate", asked)
    monkeypatch.setattr(causal_exponential, "CHUNK", 16)
    return told


def output(q, k, v, **options):
    backend = ea.build("performer-positive", head_dim=16, causal=True, num_features=64)
    expected = reference_linear(
        q, k, v, backend.core.features.projection, "positive", scale=0.25, causal=True, **options
    )
    return backend(q, k, v, **options), expected


def test_a_call_leaves_the_moderate_for_good_and_goes_on_from_its_sums(taken):
    q, k, v = (x.float() for x in random_qkv(1, 2, 1, 96, 96, head_dim=16))
    q[..., 40:50, :] *= 20
    k[..., 40:50, :] *= 20
    mask = torch.arange(96)[None] != 41
    out, expected = output(q, k, v, key_mask=mask)
    # Chunks 0 and 1 are moderate; after the third nobody asks.
    assert taken == [True, True, False]
    # What float32 is promised at norms of 20 times Gaussian.
    assert worst_row(out, expected).max() < 1e-3
    calm = worst_row(out, expected)[..., :32]
    # Exponents below 32 are rounded to 32 · 6e-8, and a row's weights are off by a few of these.
    assert calm.max() < 8 * 32 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_values_that_would_leave_the_range_of_floats_are_guarded(taken, size):
    q, k, v = (x.float() for x in random_qkv(1, 1, 1, 32, 32, head_dim=16))
    out, expected = output(q, k, v * size)
    assert taken == [False]
    assert worst_row(out.double() / size, expected / size).max() < 1e-4


@pytest.mark.parametrize("size", [2.0**-13, 1.0, 2.0**13])
def test_exponents_of_any_moderate_size_keep_all_digits(taken, size):
    q, k, v = (x.float() for x in random_qkv(1, 1, 1, 48, 48, head_dim=16))
    # Products of features as small and as large as are let through, in one row.
    direction = ea.build(
        "performer-positive", head_dim=16, causal=True, num_features=64
    ).core.features.projection[0]
    q[..., 5, :], q[..., 20, :], k[..., 7, :] = 1.9 * direction, -1.9 * direction, 1.2 * direction
    out, expected = output(q, k, v * size)
    assert taken == [True, True, True]
    assert worst_row(out.double() / size, expected / size).max() < 8 * 40 * torch.finfo(torch.float32).eps


def test_nan_is_not_moderate():
    one = torch.ones(1, 2, 2)
    assert causal_exponential.moderate(one, one, one)
    assert causal_exponential.moderate(one, one, 0 * one)
    for number in range(3):
        some = [one.clone() for _ in range(3)]
        some[number][0, 0, 0] = torch.nan
        assert not causal_exponential.moderate(*some)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponents_whose_sums_would_leave_the_range_of_floats_are_not_moderate(dtype):
    one = torch.ones(1, 2, 2, dtype=dtype)
    # Sums of 2^30 products of two features and a value of 2^16.
    large = one * (math.log2(torch.finfo(dtype).max) - 30 - 16) / 2 + 1
    assert not causal_exponential.moderate(large, one, one)
    assert not causal_exponential.moderate(one, -large, one)
