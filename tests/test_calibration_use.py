"""Calibrating a backend or a model: what counts, what is kept, and what is refused."""

import copy
import math

import pytest
import torch
from calibrating import BOTH, calibrated, typical
from reference import random_mask, random_qkv

import efficient_attn as ea


@BOTH
def test_masked_keys_take_no_part_whatever_they_hold(name):
    q, k, _ = typical()
    mask = random_mask(2, 40)
    real = calibrated(name, q=q, k=k.masked_fill(~mask[:, None, :, None], math.nan), key_mask=mask)
    # The same keys without the others; one sequence, so that both have as many.
    one = calibrated(name, q=q[:1], k=k[:1, :, mask[0]])
    other = calibrated(name, q=q[:1], k=k[:1], key_mask=mask[:1])
    for key, value in one.core.features.named_buffers():
        torch.testing.assert_close(getattr(other.core.features, key, value), value, rtol=1e-9, atol=1e-12)
    assert all(value.isfinite().all() for value in real.state_dict().values())


@BOTH
def test_a_state_is_loaded_into_a_backend_that_was_never_calibrated(name):
    q, k, v = typical()
    backend = calibrated(name, q=q, k=k)
    other = ea.build(name, head_dim=8, num_features=12, seed=3).double()
    assert other.needs_calibration and not backend.needs_calibration
    other.load_state_dict(backend.state_dict())
    assert torch.equal(other(q, k, v), backend(q, k, v))
    assert torch.equal(copy.deepcopy(other)(q, k, v), backend(q, k, v))
    narrow = backend.bfloat16().core.features
    assert {x.dtype for x in narrow.buffers()} == {torch.float64}


@BOTH
def test_a_fit_of_fewer_heads_serves_groups_of_neighbours_and_others_are_refused(name):
    q, k, v = typical()
    backend = calibrated(name, q=q, k=k)
    repeated = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    torch.testing.assert_close(backend(q, *repeated), backend(q, k, v), rtol=1e-11, atol=1e-12)
    with pytest.raises(ea.ShapeError, match="k has 1 heads; this backend was calibrated on keys of 2 heads"):
        backend(q, k[:, :1], v[:, :1])


@BOTH
def test_nothing_is_computed_before_calibration_and_what_cannot_be_calibrated_on_is_refused(name):
    q, k, v = random_qkv()
    backend = ea.build(name, head_dim=8, causal=True)
    for call in (backend, backend.extend):
        with pytest.raises(ea.CalibrationError, match=r"call backend\.calibrate\(q, k\), or ea\.calibrate"):
            call(q, k, v)
    with pytest.raises(ea.DataError, match="q holds numbers that are not finite"):
        backend.calibrate(q * math.nan, k)
    with pytest.raises(ea.DataError, match="k holds numbers that are not finite"):
        backend.calibrate(q, k / 0)
    with pytest.raises(ea.ShapeError, match=r"needs a query and a key that is not masked.* 0 keys are not"):
        backend.calibrate(q, k, key_mask=torch.zeros(2, 7, dtype=torch.bool))
    with pytest.raises(ea.ShapeError, match="needs a query"):
        backend.calibrate(q[:, :, :0], k)
    with pytest.raises(ea.ShapeError, match="q has 3 entries a vector"):
        backend.calibrate(q[..., :3], k[..., :3])
    with pytest.raises(ea.UnknownNameError, match="No argument of a backend is called 'mask'"):
        backend.calibrate(q, k, mask=None)
    assert backend.needs_calibration


def test_other_backends_have_nothing_to_calibrate_and_a_parameter_is_below_an_eighth():
    q, k, _ = random_qkv()
    for name in ("exact", "performer-positive"):
        with pytest.raises(ea.UnsupportedError, match=f"'{name}' has nothing to calibrate"):
            ea.build(name, head_dim=8).calibrate(q, k)
    for a in (0.125, math.nan, -math.inf):
        with pytest.raises(ea.OptionError, match="a is finite and below 1/8, not"):
            ea.build("performer-oprf", head_dim=8, a=a)
    with pytest.raises(ea.DtypeError, match="a is a number or None, not 'x'"):
        ea.build("performer-oprf", head_dim=8, a="x")


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
        handle = block.attention.backend.register_forward_pre_hook(lambda _, given: seen.append(given[:2]))
        try:
            block(reaching, key_mask=mask)
        except ea.CalibrationError:
            block.attention.backend.calibrate(*seen[-1], key_mask=mask)
        handle.remove()
        reaching = block(reaching, key_mask=mask)
    for one, other in zip(model.state_dict().values(), by_hand.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    before = copy.deepcopy(model.state_dict())
    model(torch.randn(1, 4, 16))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_missing_argument_of_the_call_is_named():
    backend = ea.build("performer-full", head_dim=8, num_features=8)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'v'"):
        ea.calibrate(backend, torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8))


def test_a_model_without_such_backends_is_left_alone():
    model = ea.Encoder(16, 2, "exact", num_layers=1, feed_forward_dim=16)
    ea.calibrate(model, "not even called")
