"""Errors against exact attention in float64, and the yardstick beside them."""

import math

import pytest
import torch

from efficient_attn.measure import error as measure
from efficient_attn.measure.error import exact_output, mean_of_values, output_error, unsafe_rows

SCALE = 0.5
ROUNDING = 1e-14


def random_qkv(heads=2, kv_heads=2, q_tokens=7, k_tokens=7):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, q_tokens, 4), (1, kv_heads, k_tokens, 4), (1, kv_heads, k_tokens, 3)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def attend_slowly(q, k, v, *, causal):
    """softmax(scale · q·k) v, one query of one head at a time."""
    output = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        for i in range(q.shape[2]):
            seen = k.shape[2] - q.shape[2] + i + 1 if causal else k.shape[2]
            logits = [float(SCALE * q[0, head, i] @ k[0, head // group, j]) for j in range(seen)]
            total = sum(math.exp(logit) for logit in logits)
            for j, logit in enumerate(logits):
                output[0, head, i] += math.exp(logit) / total * v[0, head // group, j]
    return output


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("entries", [1, 30, 1 << 20])
def test_the_exact_output_equals_the_definition_in_blocks_of_any_size(monkeypatch, causal, entries):
    monkeypatch.setattr(measure, "_ENTRIES_AT_ONCE", entries)
    q, k, v = random_qkv(heads=4, q_tokens=5)
    expected = attend_slowly(q, k, v, causal=causal)
    torch.testing.assert_close(
        exact_output(q, k, v, scale=SCALE, causal=causal), expected, rtol=ROUNDING, atol=ROUNDING
    )


def test_the_exact_output_of_low_precision_inputs_is_computed_in_float64():
    q, k, v = (x.half() for x in random_qkv())
    exact = exact_output(q, k, v, scale=SCALE)
    assert exact.dtype == torch.float64
    expected = attend_slowly(q.double(), k.double(), v.double(), causal=False)
    torch.testing.assert_close(exact, expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("causal", [False, True])
def test_the_yardstick_is_exact_attention_to_keys_that_are_all_alike(causal):
    q, k, v = random_qkv(heads=4, q_tokens=5)
    expected = exact_output(q, torch.zeros_like(k), v, scale=SCALE, causal=causal)
    torch.testing.assert_close(mean_of_values(q, v, causal=causal), expected, rtol=ROUNDING, atol=ROUNDING)


def test_relative_error_and_mean_squared_error_are_what_they_say():
    exact = torch.tensor([[[[3.0, 4.0]], [[0.0, 2.0]]]], dtype=torch.float64)
    output = exact + torch.tensor([[[[0.0, 0.0]], [[1.0, 0.0]]]])
    error = output_error(output, exact)
    assert error.relative == pytest.approx((1 / 29) ** 0.5)
    assert error.mse == pytest.approx(1 / 4)


def test_rows_with_a_denominator_of_zero_or_less_are_counted():
    assert unsafe_rows(torch.tensor([[1.0, 0.0, -2.0, 3.0]])) == 0.5
