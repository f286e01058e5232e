"""Random features estimate the softmax kernel without bias, with the variance that theory gives."""

import math

import pytest
import torch

from efficient_attn.ops.linear.features import DRAWS as DRAWS_OF_DIRECTIONS
from efficient_attn.ops.linear.features import MAPS, draw_directions, haar_rotations
from efficient_attn.theory.kernel import log_coupled_error

DRAWS, DIRECTIONS, DIM, ROTATIONS = 20_000, 4, 8, 4000
# For |x + y|² ≤ 1 the moments of the estimate are small enough to be measured by sampling.
PAIRS = {
    "aligned": ([0.4] + [0] * 7, [0.5] + [0] * 7),
    "orthogonal": ([0.7] + [0] * 7, [0, 0.7] + [0] * 6),
    "opposed": ([0.9] + [0] * 7, [-0.8] + [0] * 7),
    "oblique": ([0.3] * 8, [0.2, -0.3] * 4),
}


def estimates(kind, draw, vectors):
    """Estimates of exp(x·y), one per independent draw of the directions."""
    rows = draw_many(draw)
    left, right = (MAPS[kind].features(x.expand(1, DIM), rows) for x in vectors)
    values = [f.log_scale.exp() * (1 if f.values is None else f.values) for f in (left, right)]
    products = values[0] * values[1]
    if MAPS[kind].per_direction == 2:
        products = torch.stack(products.chunk(2, dim=-1)).sum(0)
    # The map divides by √(all rows); each draw has DIRECTIONS of them.
    return products.unflatten(-1, (DRAWS, DIRECTIONS)).sum(-1).flatten() * DRAWS


def draw_many(draw):
    """All draws below each other. Blocks of a coupled draw are independent, as draws are."""
    if draw == "iid":
        return draw_directions("iid", DRAWS * DIRECTIONS, DIM, seed=3)
    rows = draw_directions(draw, DRAWS * DIM, DIM, seed=3)
    return rows.unflatten(0, (DRAWS, DIM))[:, :DIRECTIONS].flatten(0, 1)


def squared_error(kind, draw, x, y):
    """Mean squared error: of independent directions by lemma 2 of Choromanski et al. 2021."""
    together, apart, kernel = (x + y).square().sum(), (x - y).square().sum(), (x @ y).exp()
    if draw != "iid":
        sizes = {"num_directions": DIRECTIONS, "head_dim": DIM}
        return math.exp(log_coupled_error(float(together), kind=kind, projection=draw, **sizes)) * kernel**2
    if kind == "positive":
        return together.exp() * kernel**2 * (1 - (-together).exp()) / DIRECTIONS
    if kind == "hyperbolic":
        return together.exp() * kernel**2 * (1 - (-together).exp()) ** 2 / (2 * DIRECTIONS)
    return together.exp() * kernel**-2 * (1 - (-apart).exp()) ** 2 / (2 * DIRECTIONS)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("draw", DRAWS_OF_DIRECTIONS)
@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "trigonometric"])
def test_features_estimate_the_kernel_without_bias_and_with_the_variance_of_the_closed_form(kind, draw, pair):
    x, y = torch.tensor(PAIRS[pair], dtype=torch.float64)
    sample, kernel = estimates(kind, draw, (x, y)), (x @ y).exp()
    assert (sample.mean() - kernel).abs() <= 4.5 * sample.std() / math.sqrt(DRAWS) + 1e-12
    # The closed form of coupled directions is one of positive features.
    if draw == "iid" or kind == "positive":
        squares = (sample - kernel).square()
        standard_error = squares.std() / math.sqrt(DRAWS)
        assert (squares.mean() - squared_error(kind, draw, x, y)).abs() <= 4.5 * standard_error


@pytest.mark.parametrize("kind", MAPS)
def test_pullbacks_are_the_derivatives_of_the_features(kind):
    directions = None if MAPS[kind].fixed else draw_directions("orthogonal", 6, 4, seed=0)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    features = MAPS[kind].features(x, directions)
    parts = [part for part in features if part is not None]
    by = [torch.randn(part.shape, dtype=torch.float64) for part in parts]
    # A scale that cancels has no derivative.
    used = [(part, weight) for part, weight in zip(parts, by, strict=True) if part.requires_grad]
    (expected,) = torch.autograd.grad([part for part, _ in used], x, [weight for _, weight in used])
    gradients = features._replace(**dict(zip(features._fields, by, strict=False)))
    assert (MAPS[kind].pullback(x, features, gradients, directions) - expected).abs().max() < 1e-12


def standard_errors(samples, expected):
    """How many standard errors the mean of independent samples lies from what is expected."""
    return ((samples.mean(0) - expected) / (samples.std(0) / len(samples) ** 0.5)).abs().max().item()


def test_rotations_are_uniform_to_fourth_moments_and_have_no_preferred_sign_as_a_bare_qr_has():
    rotations = haar_rotations(ROTATIONS, 8, torch.Generator().manual_seed(0))
    # Entries of a uniform rotation: E[r²] = 1/d and E[r⁴] = 3 / (d (d + 2)).
    assert standard_errors(rotations.square().flatten(1), 1 / 8) < 4.5
    assert standard_errors(rotations.pow(4).flatten(1), 3 / 80) < 4.5
    assert (rotations @ rotations.mT - torch.eye(8, dtype=torch.float64)).abs().max() < 1e-13
    assert standard_errors(rotations.diagonal(dim1=1, dim2=2), 0.0) < 4.5
    gaussian = torch.randn(ROTATIONS, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert standard_errors(torch.linalg.qr(gaussian).Q.diagonal(dim1=1, dim2=2), 0.0) > 20


@pytest.mark.parametrize("num_directions", [3, 20])
@pytest.mark.parametrize(("kind", "cosine"), [("orthogonal", 0.0), ("simplex", -1 / 7)])
def test_rows_have_one_angle_within_blocks_and_are_as_long_as_gaussian_vectors(kind, cosine, num_directions):
    dim, lengths = 8, []
    for seed in range(500):
        rows = draw_directions(kind, num_directions, dim, seed=seed)
        assert rows.shape == (num_directions, dim) and rows.dtype is torch.float64
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
    rows = torch.stack([draw_directions("simplex", 8, 8, seed=seed)[row] for seed in range(ROTATIONS)])
    # A fixed corner of the simplex has a preferred direction; only its rotation has none.
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert standard_errors(rows.pow(power), moment) < 4.5
    assert standard_errors(rows[:, :1] * rows[:, 1:], 0.0) < 4.5
    # In one dimension there is no simplex.
    assert torch.equal(draw_directions("simplex", 3, 1, seed=0), draw_directions("iid", 3, 1, seed=0))
