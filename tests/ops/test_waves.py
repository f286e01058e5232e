"""Cosines and sines from the tangent of half the angle."""

import pytest
import torch
from reference import random_qkv

from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.trigonometric import TrigKernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_waves_are_right_to_a_few_roundings_of_one_at_every_angle(dtype):
    # One direction of length one, so that the rows are the angles, among them the poles of the tangent.
    turns = torch.arange(-40, 41, dtype=torch.float64)
    angles = torch.cat([turns * torch.pi / 2, turns * torch.pi / 4, torch.linspace(-300, 300, 20001)]).to(
        dtype
    )
    rows = angles[None, :, None]
    tokens = LinearInputs(
        rows[None], rows[None], rows[None], None, torch.ones(1, 1), None, "trigonometric", 1.0
    )
    features = TrigKernel(tokens).key_features(rows, torch.ones((), dtype=dtype))[0]
    expected = torch.stack([angles.double().cos(), angles.double().sin()], dim=-1)
    # In halves of an epsilon: the tangent's own ulp moves a wave by 2, the square, the sum and the quotient
    # of at most 2 by 6, the difference by 1.
    assert (features.double() - expected).abs().max() <= 9 * torch.finfo(dtype).eps / 2


def test_the_factor_multiplies_and_a_scale_below_zero_turns_the_queries():
    q, k, v = random_qkv(1, 2, 2, 3, 4)
    directions = torch.randn(5, 8, dtype=torch.float64)
    kernel = TrigKernel(LinearInputs(q, k, v, None, directions, None, "trigonometric", -0.25))
    rows, factor = q.flatten(0, 1), torch.rand(2, 3, 1, dtype=torch.float64)
    angles = -0.5 * rows @ directions.mT
    expected = factor * torch.cat([angles.cos(), angles.sin()], dim=-1)
    torch.testing.assert_close(kernel.query_features(rows, factor), expected, rtol=0, atol=1e-14)
