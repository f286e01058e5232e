"""Parameters, buffers and tensors of several devices: refused, or made anew, and never read as they come."""

import pytest
import torch

import efficient_attn as ea
from efficient_attn.errors import CalibrationError, ShapeError, UnsupportedError
from efficient_attn.ops.linear.causal import causal_linear_attention
from efficient_attn.ops.linear.full import full_linear_attention
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.window.operator import fused_window

Q, K, V = torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).unbind()
SIZES = {"linformer": {"rank": 4}, "performer-positive": {"num_features": 16}}
# A backend for each kind of tensor that a backend keeps: learned, drawn, drawn and fitted.
KEEPING = ("linformer", "performer-positive", "performer-full")


def built(name, *, causal=False, **options):
    sizes = SIZES.get(name, {})
    return ea.build(name, head_dim=8, num_heads=2, max_tokens=16, causal=causal, **sizes, **options)


def calibrated(name, **problem):
    backend = built(name, **problem)
    if backend.needs_calibration:
        backend.calibrate(Q, K)
    return backend


@pytest.mark.parametrize("name", KEEPING)
def test_a_backend_on_meta_refuses_every_call_and_names_the_tensor(name):
    promised = ea.spec(name).capabilities
    backend = calibrated(name, causal=promised.causal).to("meta")
    calls = {
        "forward": (Q, K, V),
        "extend": (Q, K, V),
        "attention_weights": (Q, K),
        "denominators": (Q, K),
        "kernel_ratios": (Q, K),
        "kernel_rows": (Q, K),
        "calibrate": (Q, K),
    }
    refused = {}
    for verb, tensors in calls.items():
        try:
            getattr(backend, verb)(*tensors)
        except ShapeError as error:
            refused[verb] = str(error).partition(" of backend ")[0]
        except UnsupportedError:
            pass  # the backend has no such verb
    assert {"forward", "attention_weights"} <= refused.keys()
    assert ("extend" in refused) == promised.streaming
    assert ("calibrate" in refused) == promised.needs_calibration
    stored = {tensor for tensor, _ in (*backend.named_parameters(), *backend.named_buffers())}
    assert {*refused.values()} <= stored


def test_random_features_on_meta_are_not_drawn_again():
    with pytest.raises(UnsupportedError, match="redraw: the random features lie on meta"):
        built("performer-positive").to("meta").redraw(3)


def test_a_backend_that_is_built_on_meta_has_its_draw_as_soon_as_it_has_memory():
    with torch.device("meta"):
        backend = built("performer-positive")
    assert {x.device.type for x in backend.buffers()} == {"meta"}
    backend.to_empty(device="cpu")
    assert torch.equal(backend(Q, K, V), built("performer-positive")(Q, K, V))


def test_a_backend_that_comes_from_meta_has_the_last_draw_and_no_fit():
    backend = built("performer-positive")
    backend.redraw(7)
    expected = backend(Q, K, V)
    assert torch.equal(backend.to("meta").to_empty(device="cpu")(Q, K, V), expected)
    fitted = calibrated("performer-full").to("meta").to_empty(device="cpu")
    assert fitted.needs_calibration
    with pytest.raises(CalibrationError):
        fitted(Q, K, V)


def test_a_state_dict_is_loaded_into_a_backend_that_was_built_on_meta():
    trained = calibrated("performer-full", seed=5)
    with torch.device("meta"):
        assigned, copied = built("performer-full"), built("performer-full")
    assigned.load_state_dict(trained.state_dict(), assign=True)
    copied.to_empty(device="cpu").load_state_dict(trained.state_dict())
    for backend in (assigned, copied):
        assert torch.equal(backend(Q, K, V), trained(Q, K, V))


def test_registered_operators_refuse_tensors_of_several_devices():
    directions = torch.randn(4, 8, device="meta")
    tokens = LinearInputs(Q, K, V, None, directions, None, "positive", 1.0)
    for attention in (full_linear_attention, causal_linear_attention):
        with pytest.raises(ShapeError, match="directions lies on meta and q on cpu"):
            attention(tokens)
    with pytest.raises(ShapeError, match="v lies on meta and q on cpu"):
        fused_window(Q, K, V.to("meta"), None, 2, 2, 1.0)
    with pytest.raises(ShapeError, match="k lies on cpu and q on meta"):
        fused_window(Q.to("meta"), K, V, None, 2, 2, 1.0)
