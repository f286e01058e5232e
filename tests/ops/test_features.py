"""Random features estimate the softmax kernel as theory says, also with parameters that are calibrated."""

import copy
import math

import numpy as np
import pytest
import torch
from reference import random_mask, random_qkv, reference_attention
from theory.dense_exponential import DenseExponential, fitted_full, fitted_oprf, objective

import efficient_attn as ea
from efficient_attn.ops.linear.features import DRAWS as DRAWS_OF_DIRECTIONS
from efficient_attn.ops.linear.features import MAPS, draw_directions, haar_rotations
from efficient_attn.ops.linear.kernel import Moments, fit_full, fit_oprf, moments
from efficient_attn.theory.kernel import log_orthogonal_error

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
        return math.exp(log_orthogonal_error(float(together), kind=kind, **sizes)) * kernel**2
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
    # The closed form of coupled directions is one of orthogonal positive features.
    if draw == "iid" or (draw, kind) == ("orthogonal", "positive"):
        squares = (sample - kernel).square()
        standard_error = squares.std() / math.sqrt(DRAWS)
        assert (squares.mean() - squared_error(kind, draw, x, y)).abs() <= 4.5 * standard_error


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


BOTH = pytest.mark.parametrize("name", ["performer-oprf", "performer-full"])


def calibrated(name, *, q, k, num_features=12, key_mask=None, **options):
    backend = ea.build(name, head_dim=q.shape[-1], num_features=num_features, **options).double()
    backend.calibrate(q, k, key_mask=key_mask)
    return backend


def typical(q_tokens=40, k_tokens=40, **sizes):
    """Queries and keys with means, and axes of different length."""
    q, k, v = random_qkv(q_tokens=q_tokens, k_tokens=k_tokens, **sizes)
    lengths = torch.linspace(0.4, 1.2, q.shape[-1], dtype=torch.float64)
    return q * lengths + 0.3, k * lengths.flip(0) - 0.5, v


def moved(backend, q, k):
    """x' and y', by the definition."""
    fit, root = backend.core.features, math.sqrt(abs(backend.problem.factor))
    x, y = q * root * math.copysign(1.0, backend.problem.factor), k * root
    if not len(fit.shift):
        return x, y
    group = q.shape[1] // k.shape[1]
    heads = [h // group for h in range(q.shape[1])]
    x = torch.stack([x[:, h] @ fit.query_transform[heads[h]].T for h in range(q.shape[1])], dim=1)
    inverse = torch.linalg.inv(fit.query_transform)
    y = torch.stack([(y[:, h] - fit.shift[h]) @ inverse[h] for h in range(k.shape[1])], dim=1)
    return x, y


def test_fits_are_those_of_the_closed_forms():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((500, 6)) * np.arange(1, 7) * 0.2
    y = generator.standard_normal((400, 6)) * np.arange(7, 1, -1) * 0.2 + 0.5
    of_x, of_y = (moments(torch.from_numpy(z)[None, None], len(z)) for z in (x, y))
    oprf = fit_oprf(of_x, of_y)
    np.testing.assert_allclose(oprf.curvatures[0].numpy(), fitted_oprf(x, y).parameters, rtol=1e-12)
    # With many vectors behind the same moments the one that is added weighs nothing.
    full = fit_full(*(Moments(m.mean, m.second, 10**13) for m in (of_x, of_y)))
    expected = fitted_full(x - x.mean(axis=0), y - y.mean(axis=0))
    np.testing.assert_allclose(np.sort(full.curvatures[0].numpy()), np.sort(expected.parameters), rtol=1e-9)
    ours = DenseExponential(
        transform=full.query_transform[0].numpy(), basis=np.eye(6), parameters=full.curvatures[0].numpy()
    )
    centred = x - x.mean(axis=0), y - y.mean(axis=0)
    assert objective(ours, *centred) == pytest.approx(objective(expected, *centred), rel=1e-9)
    # One shift of the keys makes the mean of x' + y' zero.
    mean = full.query_transform[0] @ of_x.mean[0] + full.key_transform[0] @ (of_y.mean[0] - full.shift[0])
    assert mean.abs().max() < 1e-12


CALIBRATED_ON = {
    "other vectors": lambda q, k: (5 * q.flip(0), k.flip(0) - 2),
    "one token": lambda q, k: (q[:1, :, :1], k[:1, :, :1]),
    "constant keys": lambda q, k: (q, k[:, :, :1].expand_as(k)),
    "fewer tokens than axes": lambda q, k: (q[:1, :, :3], k[:1, :, :3]),
    "an axis without queries": lambda q, k: (q * (torch.arange(8) > 0), k),
    "nothing but zeros": lambda q, k: (0 * q, 0 * k),
    "long vectors": lambda q, k: (1e4 * q, 1e4 * k),
    "short vectors": lambda q, k: (1e-6 * q, 1e-6 * k),
}


@pytest.mark.parametrize("scale", [None, -0.25])
@pytest.mark.parametrize("vectors", CALIBRATED_ON)
@BOTH
def test_what_is_estimated_is_softmax_attention_whatever_it_was_calibrated_on(name, vectors, scale):
    q, k, v = typical()
    fit_q, fit_k = CALIBRATED_ON[vectors](q, k)
    backend = calibrated(name, q=fit_q, k=fit_k, num_features=64, scale=scale)
    fit = backend.core.features
    assert (fit.curvatures < 1 / 8).all() and fit.curvatures.isfinite().all()
    x, y = moved(backend, q, k)
    expected = reference_attention(q, k, v, scale=backend.problem.factor)
    torch.testing.assert_close(reference_attention(x, y, v, scale=1.0), expected, rtol=1e-8, atol=1e-8)
    # The transforms of both sides are kept apart, and have to belong together.
    if len(fit.shift):
        identity = torch.eye(8, dtype=torch.float64).expand(2, 8, 8)
        torch.testing.assert_close(fit.query_transform.mT @ fit.key_transform, identity, rtol=0, atol=1e-8)
    assert backend(q, k, v).isfinite().all()
    assert backend.float()(q.float(), k.float(), v.float()).isfinite().all()


@BOTH
def test_a_fit_of_fewer_heads_serves_groups_of_neighbours_and_others_are_refused(name):
    q, k, v = typical()
    backend = calibrated(name, q=q, k=k)
    repeated = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    torch.testing.assert_close(backend(q, *repeated), backend(q, k, v), rtol=1e-11, atol=1e-12)
    with pytest.raises(ea.ShapeError, match="k has 1 heads; this backend was calibrated on keys of 2 heads"):
        backend(q, k[:, :1], v[:, :1])


def test_a_model_calibrates_every_backend_on_what_reaches_it():
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "feed_forward_dim": 16, "num_features": 8, "positions": None}
    model = ea.Encoder(16, 2, "performer-full", **sizes)
    x, mask = torch.randn(2, 9, 16), random_mask(2, 9)
    by_hand = copy.deepcopy(model)
    ea.calibrate(model, x, key_mask=mask)
    # Calibrated by hand one after the other: later layers see what calibrated ones make of the inputs.
    reaching, seen = x, []
    for block in by_hand.blocks:
        handle = block.attention.backend.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[:2]))
        try:
            block(reaching, key_mask=mask)
        except ea.CalibrationError:
            block.attention.backend.calibrate(*seen[-1], key_mask=mask)
        handle.remove()
        reaching = block(reaching, key_mask=mask)
    for value, expected in zip(model.state_dict().values(), by_hand.state_dict().values(), strict=True):
        assert torch.equal(value, expected)
    before = copy.deepcopy(model.state_dict())
    model(torch.randn(1, 4, 16))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    # A model without such backends is not even called.
    ea.calibrate(ea.Encoder(16, 2, "exact", num_layers=1, feed_forward_dim=16), "no tokens")
