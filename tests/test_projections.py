"""Random directions are uniform rotations with Gaussian lengths, and a seed says which."""

import pytest
import torch

from efficient_attn.ops.linear.features import DRAWS as DRAWN
from efficient_attn.ops.linear.features import draw_directions, haar_rotations

DRAWS = 4000


def standard_errors(samples, expected):
    """How many standard errors the mean of independent samples lies from what is expected."""
    return ((samples.mean(0) - expected) / (samples.std(0) / len(samples) ** 0.5)).abs().max().item()


def test_rotations_have_no_preferred_sign_and_a_bare_qr_has():
    rotations = haar_rotations(DRAWS, 8, torch.Generator().manual_seed(0))
    assert standard_errors(rotations.diagonal(dim1=1, dim2=2), 0.0) < 4.5
    gaussian = torch.randn(DRAWS, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert standard_errors(torch.linalg.qr(gaussian).Q.diagonal(dim1=1, dim2=2), 0.0) > 20


def test_rotations_are_uniform_to_fourth_moments():
    rotations = haar_rotations(DRAWS, 6, torch.Generator().manual_seed(1))
    # Entries of a uniform rotation: E[r²] = 1/d and E[r⁴] = 3 / (d (d + 2)).
    assert standard_errors(rotations.square().flatten(1), 1 / 6) < 4.5
    assert standard_errors(rotations.pow(4).flatten(1), 3 / 48) < 4.5
    identity = torch.eye(6, dtype=torch.float64)
    assert (rotations @ rotations.mT - identity).abs().max() < 1e-13


@pytest.mark.parametrize("num_directions", [3, 8, 20])
@pytest.mark.parametrize(("kind", "cosine"), [("orthogonal", 0.0), ("simplex", -1 / 7)])
def test_rows_have_one_angle_within_blocks_and_are_as_long_as_gaussian_vectors(kind, cosine, num_directions):
    dim, lengths = 8, []
    for seed in range(500):
        rows = draw_directions(kind, num_directions, dim, seed=seed)
        assert rows.shape == (num_directions, dim)
        assert rows.dtype is torch.float64
        for block in rows.split(dim):
            units = block / block.norm(dim=-1, keepdim=True)
            expected = torch.full((len(block), len(block)), cosine, dtype=torch.float64)
            assert (units @ units.mT - expected.fill_diagonal_(1.0)).abs().max() < 1e-12
        lengths.append(rows.square().sum(-1))
    squares = torch.stack(lengths)
    # The square of a chi variable with d degrees has mean d and variance 2 d.
    assert standard_errors(squares, dim) < 4.5
    assert standard_errors((squares - dim).square(), 2 * dim) < 4.5


@pytest.mark.parametrize("row", [0, 7])
def test_every_row_of_a_simplex_alone_is_gaussian(row):
    rows = torch.stack([draw_directions("simplex", 8, 8, seed=seed)[row] for seed in range(DRAWS)])
    # A fixed corner of the simplex has a preferred direction; only its rotation has none.
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert standard_errors(rows.pow(power), moment) < 4.5
    assert standard_errors(rows[:, :1] * rows[:, 1:], 0.0) < 4.5


def test_a_simplex_of_one_dimension_is_a_gaussian_number():
    assert torch.equal(draw_directions("simplex", 3, 1, seed=0), draw_directions("iid", 3, 1, seed=0))


@pytest.mark.parametrize("kind", DRAWN)
def test_a_seed_means_the_same_rows_and_touches_no_global_generator(kind):
    before = torch.get_rng_state()
    one, same, other = (draw_directions(kind, 5, 4, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())
