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
SIZES = {"num_features": 16, "rank": 4, "window": 5}


def built(name, *, causal=False, **options):
    size = ea.spec(name).size_option
    sizes = {size: SIZES[size]} if size in SIZES else {}
    return ea.build(name, head_dim=8, num_heads=2, max_tokens=16, causal=causal, **sizes, **options)


def calibrated(name, **problem):
    backend = built(name, **problem)
    if backend.needs_calibration:
        backend.calibrate(Q, K)
    return backend


def keeps(backend):
    return [name for name, _ in (*backend.named_parameters(), *backend.named_buffers())]


KEEPING = [name for name in ea.list_backends() if keeps(built(name))]


def test_the_backends_that_keep_something_are_known():
    random = {name for name in ea.list_backends() if hasattr(built(name).core, "features")}
    assert {"linformer", "performer-positive", "performer-full"} <= {*KEEPING}
    assert {"linformer"} <= {*KEEPING} <= {"linformer"} | random


@pytest.mark.parametrize("name", KEEPING)
def test_a_backend_on_meta_refuses_every_call_and_names_the_tensor(name):
    backend = calibrated(name, causal=ea.spec(name).capabilities.causal).to("meta")
    verbs = {
        "forward": lambda: backend(Q, K, V),
        "extend": lambda: backend.extend(Q, K, V),
        "attention_weights": lambda: backend.attention_weights(Q, K),
        "denominators": lambda: backend.denominators(Q, K),
        "kernel_ratios": lambda: backend.kernel_ratios(Q, K),
        "kernel_rows": lambda: backend.kernel_rows(Q, K),
        "calibrate": lambda: backend.calibrate(Q, K),
    }
    refused = []
    for verb, call in verbs.items():
        try:
            call()
        except ShapeError as error:
            refused.append((verb, str(error).partition(" of backend ")[0]))
        except UnsupportedError:
            pass  # the backend has no such verb
    promised = ea.spec(name).capabilities
    assert {"forward", "attention_weights"} <= {verb for verb, _ in refused}
    assert ("extend" in dict(refused)) == promised.streaming
    assert ("calibrate" in dict(refused)) == promised.needs_calibration
    assert {tensor for _, tensor in refused} <= {*keeps(backend)}


def test_random_features_on_meta_are_not_drawn_again():
    with pytest.raises(UnsupportedError, match="redraw: the random features lie on meta"):
        built("performer-positive").to("meta").redraw(3)


# Learned parameters come from a state dict, as those of any module built on meta.
@pytest.mark.parametrize("name", [name for name in KEEPING if not [*built(name).parameters()]])
def test_a_backend_that_is_built_on_meta_has_its_draw_as_soon_as_it_has_memory(name):
    expected = calibrated(name)
    with torch.device("meta"):
        backend = built(name)
    assert {x.device.type for x in backend.buffers()} == {"meta"}
    backend.to_empty(device="cpu")
    if backend.needs_calibration:
        backend.calibrate(Q, K)
    assert torch.equal(backend(Q, K, V), expected(Q, K, V))


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
