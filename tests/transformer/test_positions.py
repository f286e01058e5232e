"""Positions: the formula of the paper, relative where promised, bounded where there is a table."""

import math

import pytest
import torch

import efficient_attn as ea
from efficient_attn.transformer.positions import (
    LearnedPositions,
    build_positions,
    rotate,
    sinusoidal_positions,
)

TOKENS, DIM = 40, 16


def test_sinusoidal_positions_are_the_formula_of_the_paper():
    rows = sinusoidal_positions(3, TOKENS, DIM, torch.device("cpu"))
    for row, pos in enumerate(range(3, 3 + TOKENS)):
        for i in range(DIM // 2):
            angle = pos / 10000 ** (2 * i / DIM)
            pair = rows[row, 2 * i : 2 * i + 2].tolist()
            assert pair == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-12)


def test_rotary_scores_depend_on_the_difference_of_positions_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, TOKENS, DIM, generator=generator, dtype=torch.float64).unbind()
    near = rotate(q, 0) @ rotate(k, 5).mT
    far = rotate(q, 100_000) @ rotate(k, 100_005).mT
    # Angles up to 1e5 are rounded to 1e5 · 2^-53 = 1e-11 radians, in products of norm below 50.
    torch.testing.assert_close(near, far, rtol=0.0, atol=1e-9)
    assert not torch.allclose(near, rotate(q, 0) @ rotate(k, 6).mT)
    assert rotate(q.bfloat16(), 0).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", None])
def test_positions_added_in_parts_are_the_positions_added_at_once(kind):
    positions = build_positions(kind, DIM, TOKENS)
    x = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
    parts = [positions(x[:, :7], 0), positions(x[:, 7:], 7)]
    torch.testing.assert_close(torch.cat(parts, dim=1), positions(x, 0), rtol=0.0, atol=1e-6)


def test_learned_positions_receive_gradients():
    positions = LearnedPositions(DIM, TOKENS)
    positions(torch.zeros(2, 5, DIM), 3).sum().backward()
    # Two batch entries read positions 3 to 7, and nothing reads the others.
    expected = torch.zeros(TOKENS, DIM)
    expected[3:8] = 2.0
    assert torch.equal(positions.table.grad, expected)


def test_a_position_beyond_the_learned_table_is_refused():
    table = {"positions": "learned", "max_tokens": 6}
    decoder = ea.Decoder(8, 2, num_layers=1, feed_forward_dim=8, cross_backend=None, **table)
    refused = r"x reaches 7 tokens .* 6 learned positions.*max_tokens=7"
    with pytest.raises(ea.ShapeError, match=refused):
        decoder(torch.zeros(1, 7, 8))
    _, state = decoder.extend(torch.zeros(1, 6, 8))
    with pytest.raises(ea.ShapeError, match=refused):
        decoder.extend(torch.zeros(1, 1, 8), state)


@pytest.mark.parametrize("kind", [None, "sinusoidal", "learned", "rotary"])
def test_an_encoder_is_permutation_equivariant_only_without_positions(kind):
    torch.manual_seed(0)
    encoder = ea.Encoder(DIM, 2, "exact", num_layers=2, positions=kind, max_tokens=TOKENS).double().eval()
    for parameter in encoder.parameters():
        # Learned distances begin at zero, where they would be no positions.
        torch.nn.init.normal_(parameter, std=0.5)
    x, order = torch.randn(1, TOKENS, DIM, dtype=torch.float64), torch.randperm(TOKENS)
    equal = torch.allclose(encoder(x[:, order]), encoder(x)[:, order], rtol=0.0, atol=1e-10)
    assert equal is (kind is None)
