"""Errors against exact attention in float64, and the yardstick beside them."""

import pytest
import torch

import efficient_attn as ea
from efficient_attn.measure import error as measure
from efficient_attn.measure.error import (
    exact_output,
    mean_of_values,
    read_shares,
    relative_error,
)

SCALE = 0.5
ROUNDING = {"rtol": 1e-14, "atol": 1e-14}


def random_qkv():
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 5, 4), (1, 2, 7, 4), (1, 2, 7, 3)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def attend_slowly(q, k, v, *, causal):
    """softmax(scale · q·k) v, one query of one head at a time."""
    output = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        for i in range(q.shape[2]):
            seen = k.shape[2] - q.shape[2] + i + 1 if causal else k.shape[2]
            weights = torch.stack(
                [(SCALE * q[0, head, i] @ k[0, head // group, j]).exp() for j in range(seen)]
            )
            for j, weight in enumerate(weights / weights.sum()):
                output[0, head, i] += weight * v[0, head // group, j]
    return output


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("entries", "dtype"), [(1, torch.float64), (30, torch.float16), (1 << 20, torch.float64)]
)
def test_the_exact_output_is_the_definition_in_float64_in_blocks_of_any_size(
    monkeypatch, causal, entries, dtype
):
    monkeypatch.setattr(measure, "_ENTRIES_AT_ONCE", entries)
    q, k, v = (x.to(dtype) for x in random_qkv())
    exact = exact_output(q, k, v, scale=SCALE, causal=causal)
    expected = attend_slowly(q.double(), k.double(), v.double(), causal=causal)
    torch.testing.assert_close(exact, expected, **ROUNDING)


@pytest.mark.parametrize("causal", [False, True])
def test_the_yardstick_is_exact_attention_to_keys_that_are_all_alike(causal):
    q, k, v = random_qkv()
    expected = exact_output(q, torch.zeros_like(k), v, scale=SCALE, causal=causal)
    torch.testing.assert_close(mean_of_values(q, v, causal=causal), expected, **ROUNDING)


def test_the_relative_error_is_a_ratio_of_norms():
    exact = torch.tensor([[[[3.0, 4.0]], [[0.0, 2.0]]]], dtype=torch.float64)
    x = exact + torch.tensor([[[[0.0, 0.0]], [[1.0, 0.0]]]])
    assert relative_error(x, exact) == pytest.approx((1 / 29) ** 0.5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("entries", "rows"), [(1, None), (1 << 20, None), (30, [0, 3, 4])])
def test_density_and_covered_mass_are_shares_of_pairs_and_of_exact_weights(
    monkeypatch, causal, entries, rows
):
    monkeypatch.setattr(measure, "_ENTRIES_AT_ONCE", entries)
    q, k, _ = random_qkv()
    q = q if causal else torch.cat([q, q[:, :, :2]], dim=2)
    # Outputs of unit vectors as values are the weights.
    weights = attend_slowly(q, k, torch.eye(7, dtype=torch.float64).expand(1, 2, 7, 7), causal=causal)
    distance = torch.arange(7) - torch.arange(7 - q.shape[2], 7)[:, None]
    weights, near = (x[:, :, rows or slice(None)] for x in (weights, weights * (distance.abs() <= 1)))
    backend = ea.build("window", head_dim=4, window=2 if causal else 3, causal=causal, scale=SCALE)
    density, mass = read_shares(backend, q, k, None if rows is None else torch.tensor(rows))
    assert density == int((near > 0).sum()) / int((weights > 0).sum())
    assert mass == pytest.approx(float(near.sum(dim=-1).mean()))
