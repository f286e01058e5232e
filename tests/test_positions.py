"""Positions: rotations by frequency, relative where promised, bounded where there is a table."""

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

CPU = torch.device("cpu")
TOKENS, DIM = 40, 16


def test_sinusoidal_positions_are_the_formula_of_the_paper() -> None:
    got = sinusoidal_positions(3, TOKENS, DIM, CPU)
    for row, pos in enumerate(range(3, 3 + TOKENS)):
        for i in range(DIM // 2):
            angle = pos / 10000 ** (2 * i / DIM)
            assert got[row, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert got[row, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


@pytest.mark.parametrize("shift", [1, 7, 1000])
def test_a_shift_of_sinusoidal_positions_is_a_rotation_for_each_frequency(shift: int) -> None:
    # sin(a + b) = sin a cos b + cos a sin b, with an angle b that depends on the frequency alone.
    pairs = sinusoidal_positions(0, TOKENS, DIM, CPU).unflatten(-1, (-1, 2))
    later = sinusoidal_positions(shift, TOKENS, DIM, CPU).unflatten(-1, (-1, 2))
    turns = [shift / 10000 ** (2 * i / DIM) for i in range(DIM // 2)]
    turn = torch.tensor(
        [[[math.cos(b), math.sin(b)], [-math.sin(b), math.cos(b)]] for b in turns], dtype=torch.float64
    )
    moved = torch.einsum("ioc,tic->tio", turn, pairs)
    torch.testing.assert_close(moved, later, rtol=0.0, atol=1e-10)


def test_rotary_scores_depend_on_the_difference_of_positions_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, TOKENS, DIM, generator=generator, dtype=torch.float64).unbind()
    near = rotate(q, 0) @ rotate(k, 5).mT
    far = rotate(q, 100_000) @ rotate(k, 100_005).mT
    # Angles up to 1e5 are rounded to 1e5 · 2^-53 = 1e-11 radians, in products of norm below 50.
    torch.testing.assert_close(near, far, rtol=0.0, atol=1e-9)
    assert not torch.allclose(near, rotate(q, 0) @ rotate(k, 6).mT)


def test_rotary_positions_keep_norms_and_dtype_and_leave_position_zero() -> None:
    x = torch.randn(1, 2, TOKENS, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = rotate(x, 0)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0.0)
    assert torch.equal(turned[..., 0, :], x[..., 0, :])
    assert rotate(x.bfloat16(), 0).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", None])
def test_positions_added_in_parts_are_the_positions_added_at_once(kind: str | None) -> None:
    positions = build_positions(kind, DIM, TOKENS)
    x = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
    parts = [positions(x[:, :7], 0), positions(x[:, 7:], 7)]
    torch.testing.assert_close(torch.cat(parts, dim=1), positions(x, 0), rtol=0.0, atol=1e-6)


def test_learned_positions_receive_gradients() -> None:
    positions = LearnedPositions(DIM, TOKENS)
    positions(torch.zeros(2, 5, DIM), 3).sum().backward()
    assert positions.table.grad is not None
    # Two batch entries read positions 3 to 7, and nothing reads the others.
    expected = torch.zeros(TOKENS, DIM)
    expected[3:8] = 2.0
    assert torch.equal(positions.table.grad, expected)


def test_a_position_beyond_the_learned_table_is_refused_in_one_line() -> None:
    decoder = ea.Decoder(
        8, 2, num_layers=1, feed_forward_dim=8, positions="learned", max_tokens=6, cross_backend=None
    )
    with pytest.raises(ea.ShapeError, match=r"x reaches 7 tokens .* 6 learned positions.*max_tokens=7"):
        decoder(torch.zeros(1, 7, 8))
    _, state = decoder.extend(torch.zeros(1, 6, 8))
    with pytest.raises(ea.ShapeError, match=r"x reaches 7 tokens .* 6 learned positions"):
        decoder.extend(torch.zeros(1, 1, 8), state)


def test_positions_that_cannot_be_built_are_refused_in_one_line() -> None:
    with pytest.raises(ea.UnknownNameError, match=r"choice of positions.*'sinus'.*'sinusoidal'"):
        ea.Encoder(8, 2, positions="sinus")
    with pytest.raises(ea.OptionError, match="give max_tokens"):
        ea.Encoder(8, 2, positions="learned")
    with pytest.raises(ea.OptionError, match=r"model_dim=9 is odd.*8 or 10"):
        ea.Encoder(9, 3)
    with pytest.raises(ea.OptionError, match="head_dim=3 is odd, and rotary"):
        ea.Encoder(6, 2, positions="rotary")
    with pytest.raises(ea.UnknownNameError, match=r"positions in a block.*Known: relative, rotary"):
        ea.TransformerBlock(8, 2, feed_forward_dim=8, positions="sinusoidal")


@pytest.mark.parametrize("kind", [None, "sinusoidal", "learned", "rotary", "relative"])
def test_an_encoder_is_permutation_equivariant_only_without_positions(kind: str | None) -> None:
    torch.manual_seed(0)
    encoder = ea.Encoder(DIM, 2, "exact", num_layers=2, positions=kind, max_tokens=TOKENS).double().eval()
    for parameter in encoder.parameters():
        # Learned distances begin at zero, where they would be no positions.
        torch.nn.init.normal_(parameter, std=0.5)
    x, order = torch.randn(1, TOKENS, DIM, dtype=torch.float64), torch.randperm(TOKENS)
    equal = torch.allclose(encoder(x[:, order]), encoder(x)[:, order], rtol=0.0, atol=1e-10)
    assert equal is (kind is None)
