"""Random features estimate the softmax kernel as theory says, also with parameters that are calibrated."""

import copy
import math

import pytest
import torch
from backend_definitions import transformed
from reference import random_mask, random_qkv, reference_attention

import efficient_attn as ea
from efficient_attn.ops.linear.features import DRAWS as DRAWS_OF_DIRECTIONS
from efficient_attn.ops.linear.features import MAPS, Features, draw_directions, haar_rotations
from efficient_attn.ops.linear.inputs import ExpKernel, LinearInputs
from efficient_attn.ops.linear.kernel import LENGTHS, Moments, fit_full, fit_oprf, moments
from efficient_attn.ops.linear.trigonometric import TrigKernel
from efficient_attn.theory.kernel import ERRORS, log_orthogonal_error

DRAWS, DIRECTIONS, DIM, ROTATIONS = 20_000, 4, 8, 4000
# For |x + y|² ≤ 1 the moments of the estimate are small enough to be measured by sampling.
PAIRS = {"aligned": ([0.4] + [0] * 7, [0.5] + [0] * 7), "opposed": ([0.9] + [0] * 7, [-0.8] + [0] * 7)}
PAIRS["oblique"] = [0.3] * 8, [0.2, -0.3] * 4


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
    """Mean squared error by the closed forms, which tests/theory/test_kernel.py holds against integrals."""
    square = float((x - y if kind == "trigonometric" else x + y).square().sum())
    if draw == "iid":
        error = ERRORS[kind](square, num_directions=DIRECTIONS)
    else:
        error = log_orthogonal_error(square, kind=kind, num_directions=DIRECTIONS, head_dim=DIM)
    return math.exp(error) * (x @ y).exp() ** 2


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("draw", DRAWS_OF_DIRECTIONS)
@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "trigonometric"])
def test_features_estimate_the_kernel_without_bias_and_with_the_variance_of_the_closed_form(kind, draw, pair):
    x, y = torch.tensor(PAIRS[pair], dtype=torch.float64)
    sample, kernel = estimates(kind, draw, (x, y)), (x @ y).exp()
    assert (sample.mean() - kernel).abs() <= 4.5 * sample.std() / math.sqrt(DRAWS) + 1e-12
    # The closed form of coupled directions is one of orthogonal ones.
    if draw != "simplex":
        squares = (sample - kernel).square()
        standard_error = squares.std() / math.sqrt(DRAWS)
        assert (squares.mean() - squared_error(kind, draw, x, y)).abs() <= 4.5 * standard_error


def standard_errors(samples, expected):
    """How many standard errors the mean of independent samples lies from what is expected."""
    return ((samples.mean(0) - expected) / (samples.std(0) / len(samples) ** 0.5)).abs().max().item()


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("kind", ["positive", "hyperbolic"])
def test_exponents_in_powers_of_two_are_those_of_the_feature_map(kind, scale):
    q, k, v = random_qkv(1, 2, 2, 9, 9, head_dim=DIM)
    weights = torch.randn(2, 1, 2 * DIRECTIONS if kind == "hyperbolic" else DIRECTIONS, dtype=torch.float64)
    w = draw_directions("iid", DIRECTIONS, DIM, seed=0)
    inputs = LinearInputs(q, k, v, None, w, weights, None, kind, scale)
    kernel, all_rows = ExpKernel(inputs), slice(None)
    keys = kernel.real_key_exponents(k.flatten(0, 1), slice(None)) * math.log(2)
    torch.testing.assert_close(keys, inputs.key_features(inputs.key_rows(all_rows), all_rows).log_scale[0])
    queries = kernel.query_exponents(q.flatten(0, 1)) * math.log(2)
    torch.testing.assert_close(queries, inputs.query_features(inputs.query_rows(all_rows)).log_scale[0])


def test_cosines_and_sines_by_tangents_are_those_of_the_feature_map():
    q, k, v = random_qkv(1, 2, 2, 9, 9, head_dim=DIM)
    w = draw_directions("iid", DIRECTIONS, DIM, seed=0)
    inputs = LinearInputs(q, k, v, None, w, None, None, "trigonometric", -0.3)
    kernel, rows = TrigKernel(inputs), inputs.query_rows(slice(None))
    features = kernel.features(q.flatten(0, 1), kernel.queries, q.new_ones(())) / math.sqrt(DIRECTIONS)
    torch.testing.assert_close(features, MAPS["trigonometric"].features(rows, w).values[0])


@pytest.mark.parametrize("kind", [kind for kind, feature_map in MAPS.items() if feature_map.plain])
def test_plain_features_are_the_same_map(kind):
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    x[0, 0, :2] = torch.tensor([0.0, -60.0])
    full, plain = MAPS[kind], MAPS[MAPS[kind].plain]
    features, values = full.features(x, None), plain.features(x, None)
    torch.testing.assert_close(values.values, features.log_scale.exp())
    grad = torch.randn_like(x)
    # ∂ log φ = ∂φ / φ.
    by_log = full.pullback(x, features, Features(grad * values.values, None), None)
    torch.testing.assert_close(plain.pullback(x, values, Features(values.log_scale, grad), None), by_log)


def test_rotations_are_uniform_to_fourth_moments_and_have_no_preferred_sign():
    rotations = haar_rotations(ROTATIONS, 8, torch.Generator().manual_seed(0))
    # Entries of a uniform rotation: E[r²] = 1/d and E[r⁴] = 3 / (d (d + 2)).
    assert standard_errors(rotations.square().flatten(1), 1 / 8) < 4.5
    assert standard_errors(rotations.pow(4).flatten(1), 3 / 80) < 4.5
    assert (rotations @ rotations.mT - torch.eye(8, dtype=torch.float64)).abs().max() < 1e-13
    assert standard_errors(rotations.diagonal(dim1=1, dim2=2), 0.0) < 4.5


@pytest.mark.parametrize(("kind", "cosine"), [("orthogonal", 0.0), ("simplex", -1 / 7)])
def test_rows_have_one_angle_within_blocks_and_are_as_long_as_gaussian_vectors(kind, cosine):
    dim, lengths = 8, []
    for seed in range(200):
        # Two blocks, and a part of one.
        rows = draw_directions(kind, 20, dim, seed=seed)
        assert rows.shape == (20, dim) and rows.dtype is torch.float64
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


def calibrated(name, q, k, **options):
    backend = ea.build(name, head_dim=8, num_features=64, **options).double()
    backend.calibrate(q, k)
    return backend


def typical():
    """Queries and keys with means, and axes of different length."""
    q, k, v = random_qkv(q_tokens=20, k_tokens=20)
    lengths = torch.linspace(0.4, 1.2, 8, dtype=torch.float64)
    return q * lengths + 0.3, k * lengths.flip(0) - 0.5, v


def optimal_exponent(square):
    """A* = (1 − 2L − √((2L + 1)² + 8L))/16 of Likhosherstov et al. (2022), L the mean of (x + y)²."""
    return (1 - 2 * square - ((2 * square + 1) ** 2 + 8 * square).sqrt()) / 16


def test_fits_are_those_of_the_closed_forms():
    generator, lengths = torch.Generator().manual_seed(0), 0.2 * torch.arange(1.0, 7.0).double()
    x = lengths * torch.randn(500, 6, generator=generator, dtype=torch.float64)
    y = lengths.flip(0) * torch.randn(400, 6, generator=generator, dtype=torch.float64) + 0.5
    of_x, of_y = (moments(z[None, None], len(z)) for z in (x, y))
    expected = optimal_exponent((x[:, None] + y).square().mean())
    torch.testing.assert_close(fit_oprf(of_x, of_y).curvatures[0], expected.expand(6), rtol=1e-12, atol=0)
    # With many vectors behind the same moments the one that is added weighs nothing.
    full = fit_full(*(Moments(m.mean, m.second, 10**13) for m in (of_x, of_y)))
    x, y = x @ full.query_transform[0].T, (y - full.shift[0]) @ full.key_transform[0].T
    # ADERF of Likhosherstov et al. (2023): one diagonal covariance; SDERF: an exponent for each of its axes.
    covariances = [z.T.cov(correction=0) for z in (x, y)]
    axes = covariances[0].diagonal()
    for covariance in covariances:
        torch.testing.assert_close(covariance, axes.diag(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(full.curvatures[0], optimal_exponent(2 * axes), rtol=1e-9, atol=0)
    # One shift of the keys makes the mean of x' + y' zero.
    assert (x.mean(dim=0) + y.mean(dim=0)).abs().max() < 1e-12


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
    backend = calibrated(name, *CALIBRATED_ON[vectors](q, k), scale=scale)
    fit = backend.core.features
    assert (fit.curvatures < 1 / 8).all() and fit.curvatures.isfinite().all()
    expected = reference_attention(q, k, v, scale=backend.problem.factor)
    for head, part in enumerate(expected.chunk(2, dim=1)):
        x, y = transformed(fit, q, k, head, scale=backend.problem.factor)
        estimated = reference_attention(x, y, v[:, head : head + 1], scale=1.0)
        torch.testing.assert_close(estimated, part, rtol=1e-8, atol=1e-8)
    assert backend(q, k, v).isfinite().all()
    assert backend.float()(q.float(), k.float(), v.float()).isfinite().all()


@BOTH
def test_a_fit_of_fewer_heads_serves_groups_of_neighbours_and_others_are_refused(name):
    q, k, v = typical()
    backend = calibrated(name, q, k)
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


@pytest.mark.parametrize("kind", DRAWS_OF_DIRECTIONS)
def test_fixed_norms_keep_the_directions_of_the_draw(kind):
    rows, fixed = (draw_directions(kind, 20, 8, seed=1, norms=norms) for norms in ("chi", "fixed"))
    torch.testing.assert_close(fixed.norm(dim=-1), torch.full((20,), 8**0.5, dtype=torch.float64))
    torch.testing.assert_close(torch.nn.functional.normalize(rows), fixed / 8**0.5)


@pytest.mark.parametrize("causal", [False, True])
@BOTH
def test_fixed_norms_get_the_length_of_the_largest_correlation_in_each_key_head(name, causal):
    q, k, v = typical()
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 13:] = False
    backend = ea.build(name, head_dim=8, num_features=64, causal=causal, norms="fixed").double()
    backend.calibrate(q, k, v, key_mask=mask)
    features = backend.core.features
    lengths = features.factors[:, 0] / (1 - 4 * features.curvatures[:, 0]).sqrt()
    visible = mask[:, None, None].expand(2, 4, 20, 20)
    visible = visible & torch.ones(20, 20, dtype=torch.bool).tril() if causal else visible
    shares = visible.double() / visible.sum(dim=-1, keepdim=True)
    uniform = shares @ v.masked_fill(~mask[:, None, :, None], 0.0).repeat_interleave(2, dim=1)
    right = reference_attention(q, k, v, scale=8**-0.5, causal=causal, key_mask=mask) - uniform
    correlations = []
    for length in LENGTHS:
        features.factors = length * (1 - 4 * features.curvatures).sqrt()
        ours = backend(q, k, v, key_mask=mask) - uniform
        pairs = [(ours[:, 2 * head :][:, :2], right[:, 2 * head :][:, :2]) for head in range(2)]
        correlations.append([float((x * y).sum() / x.norm() / y.norm()) for x, y in pairs])
    best = torch.tensor(correlations).argmax(dim=0)
    torch.testing.assert_close(lengths, torch.tensor(LENGTHS, dtype=torch.float64)[best])
    # Saved with the model, and used when a sequence goes on.
    backend.calibrate(q, k, v, key_mask=mask)
    again = ea.build(name, head_dim=8, num_features=64, causal=causal, norms="fixed").double()
    again.load_state_dict(backend.state_dict())
    assert torch.equal(again(q, k, v), backend(q, k, v))
    if causal:
        state, parts = None, []
        for start in range(20):
            part, state = backend.extend(*(x[:, :, start : start + 1] for x in (q, k, v)), state)
            parts.append(part)
        torch.testing.assert_close(torch.cat(parts, dim=2), backend(q, k, v), rtol=1e-9, atol=1e-9)


def test_without_values_the_length_is_fitted_on_random_ones():
    q, k, v = typical()
    backend = calibrated("performer-full", q, k, norms="fixed")
    random = torch.randn(k.shape, generator=torch.Generator().manual_seed(0)).double()
    with_values = ea.build("performer-full", head_dim=8, num_features=64, norms="fixed").double()
    with_values.calibrate(q, k, random)
    assert torch.equal(backend(q, k, v), with_values(q, k, v))
