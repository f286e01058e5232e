"""Tensors of several devices: refused, or made anew; and the path of a GPU, on a stand-in for torch.cuda."""

from contextlib import contextmanager

import pytest
import torch
from cpu_flex_attention import eager_flex
from synthetic_records import case

import efficient_attn as ea
from efficient_attn.errors import CalibrationError, ShapeError, UnsupportedError
from efficient_attn.measure import memory, worker
from efficient_attn.ops.linear.causal import causal_linear_attention
from efficient_attn.ops.linear.full import full_linear_attention
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.window.operator import fused_window
from efficient_attn.runs.workload import Workload, settle

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
    verbs = ("attention_weights", "denominators", "keys_read", "kernel_ratios", "kernel_rows", "calibrate")
    refused = {}
    for verb in ("forward", "extend", *verbs):
        tensors = (Q, K, V) if verb in ("forward", "extend") else (Q, K)
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
    tokens = LinearInputs(Q, K, V, None, directions, None, None, "positive", 1.0)
    for attention in (full_linear_attention, causal_linear_attention):
        with pytest.raises(ShapeError, match="directions lies on meta and q on cpu"):
            attention(tokens)
    with pytest.raises(ShapeError, match="v lies on meta and q on cpu"):
        fused_window(Q, K, V.to("meta"), None, 2, 2, 1.0)
    with pytest.raises(ShapeError, match="k lies on cpu and q on meta"):
        fused_window(Q.to("meta"), K, V, None, 2, 2, 1.0)


@pytest.fixture
def calls(monkeypatch):
    """What was called on a stand-in for torch.cuda, in order."""
    told = []

    @contextmanager
    def device(name):
        told.append(f"enter {name}")
        yield
        told.append(f"leave {name}")

    def allocated(name):
        told.append(f"allocated {name}")
        return 1000 + 512 * (told.count(f"allocated {name}") > 1)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda name: told.append(f"synchronise {name}"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda name: 5096)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda name: told.append(f"reset {name}"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("empty the cache"))
    return told


def test_the_peak_is_taken_above_what_was_there_once_the_device_has_nothing_left_to_do(calls):
    peak = memory.peak(lambda: calls.append("call"), device="cuda:1")
    assert peak == (4096, 512)
    before = ["synchronise cuda:1", "reset cuda:1", "allocated cuda:1"]
    assert calls == [*before, "call", "synchronise cuda:1", "allocated cuda:1"]


@pytest.fixture
def measured(calls, monkeypatch):
    """Records of cases of a GPU, whose tensors stay on the CPU: where they lie is not the question here."""
    move = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *args, device=None, **more: move(x, *args, **more))
    module = torch.nn.Module.to
    monkeypatch.setattr(torch.nn.Module, "to", lambda x, device=None, dtype=None: module(x, dtype=dtype))

    def measure(target):
        name = target if isinstance(target, str) else "own"
        planned = case("memory", name, 48, head_dim=16, device="cuda", threads=1)
        return worker.measure(planned, target=target)

    return measure


def test_after_a_failure_on_a_gpu_the_cache_is_given_back(calls, measured):
    assert measured(lambda q, k, v: None).status == "error" and calls[-1] == "empty the cache"


def test_an_illegal_access_to_memory_is_a_record_although_it_ends_the_use_of_the_device(
    measured, monkeypatch
):
    def use(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def broken(q, k, v):
        for name in ("synchronize", "empty_cache", "memory_allocated", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, use)
        use()

    for target in (broken, lambda q, k, v: v.clone()):
        record = measured(target)
        assert record.status == "error" and "an illegal memory access" in record.reason


@pytest.mark.parametrize(("backend", "kernels"), [("performer-positive", "flex"), ("exact", "torch")])
def test_a_record_names_the_kernels_that_ran(measured, backend, kernels):
    with eager_flex():
        assert measured(backend).kernels == kernels


@pytest.mark.parametrize(("supported", "dtype"), [(True, "bfloat16"), (False, "float16")])
def test_the_dtype_of_a_gpu_is_one_that_it_multiplies_without_emulation(calls, monkeypatch, supported, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported or including_emulation
    )
    assert settle(Workload(device="cuda:1")).dtype == dtype
    assert calls == ["enter cuda:1", "leave cuda:1"]
    assert settle(Workload(device="cuda:1", dtype="float32")).dtype == "float32"
