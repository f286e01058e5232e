"""Features with calibrated parameters: what they estimate, how well, and what calibrating them does."""

import copy
import math

import numpy as np
import pytest
import torch
from reference import random_mask, random_qkv, reference_attention
from theory.dense_exponential import DenseExponential, fitted_full, fitted_oprf, objective

import efficient_attn as ea
from efficient_attn.ops.linear.kernel import Moments, fit_full, fit_oprf, moments

NAMES = ("performer-oprf", "performer-full")
BOTH = pytest.mark.parametrize("name", NAMES)


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


def test_a_parameter_that_is_given_needs_no_calibration_and_zero_is_the_positive_map():
    q, k, v = random_qkv()
    backend = ea.build("performer-oprf", head_dim=8, num_features=16, a=0.0).double()
    positive = ea.build("performer-positive", head_dim=8, num_features=16).double()
    torch.testing.assert_close(backend(q, k, v), positive(q, k, v), rtol=1e-12, atol=1e-13)
    backend.calibrate(q, k)
    expected = calibrated("performer-oprf", q=q, k=k, num_features=16)(q, k, v)
    torch.testing.assert_close(backend(q, k, v), expected)
    assert not torch.allclose(expected, positive(q, k, v))


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


Q, K, V = random_qkv()


def calibrate(q=Q, k=K, *, name="performer-full", **options):
    return ea.build(name, head_dim=8).calibrate(q, k, **options)


def oprf(a):
    return ea.build("performer-oprf", head_dim=8, a=a)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (
            lambda: ea.build("performer-full", head_dim=8, causal=True).extend(Q, K, V),
            ea.CalibrationError,
            r"call backend\.calibrate\(q, k\), or ea\.calibrate",
        ),
        (
            lambda: calibrate(key_mask=torch.zeros(2, 7, dtype=torch.bool)),
            ea.ShapeError,
            r"needs a query and a key that is not masked.* 0 keys are not",
        ),
        (lambda: calibrate(k=K / 0), ea.DataError, "k holds numbers that are not finite"),
        (lambda: calibrate(q=Q[:, :, :0]), ea.ShapeError, "needs a query"),
        (lambda: calibrate(q=Q[..., :3], k=K[..., :3]), ea.ShapeError, "q has 3 entries a vector"),
        (lambda: calibrate(mask=None), ea.UnknownNameError, "No argument of a backend is called 'mask'"),
        (lambda: calibrate(name="exact"), ea.UnsupportedError, "'exact' has nothing to calibrate"),
        (lambda: oprf(0.125), ea.OptionError, "a is finite and below 1/8, not"),
        (lambda: oprf(math.nan), ea.OptionError, "a is finite and below 1/8, not"),
        (lambda: oprf("x"), ea.DtypeError, "a is a number or None, not 'x'"),
    ],
)
def test_what_cannot_be_calibrated_or_used_before_is_refused(request_, error, message):
    with pytest.raises(error, match=message):
        request_()


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
