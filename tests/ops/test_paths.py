"""Which kernels serve a device, a dtype and a call, and what follows a failure of the compiler."""

from types import SimpleNamespace

import pytest
import torch
from reference import random_mask, random_qkv
from torch._dynamo.exc import TorchDynamoException

import efficient_attn as ea
from efficient_attn.ops import paths
from efficient_attn.ops.linear import softmax_identity
from efficient_attn.ops.softmax import flex


def tensors(device="cpu", dtype=torch.float32, head_dim=16, value_dim=16, tokens=3):
    shapes = (2, 4, 3, head_dim), (2, 2, tokens, head_dim), (2, 2, tokens, value_dim)
    return [torch.empty(shape, device=device, dtype=dtype) for shape in shapes]


def test_flex_serves_dimensions_and_sizes_that_its_kernels_take(monkeypatch):
    monkeypatch.setattr(paths, "kernels", lambda device, dtype: "flex" if dtype.itemsize < 8 else "torch")
    for sizes in ({}, {"head_dim": 256, "value_dim": 24}, {"device": "meta", "tokens": 2**24}):
        assert flex.available(*tensors(**sizes)), sizes
    for sizes in (
        *({"head_dim": 8}, {"value_dim": 8}, {"head_dim": 257}, {"tokens": 0}, {"dtype": torch.float64}),
        {"device": "meta", "tokens": 2**25},
    ):
        assert not flex.available(*tensors(**sizes)), sizes
    assert not flex.available(*tensors()[:2], tensors(dtype=torch.bfloat16)[2])


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU, Triton and a C compiler."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(paths, "find_spec", lambda name: object())
    monkeypatch.setattr(paths.shutil, "which", lambda name: f"/bin/{name}" if name == "gcc" else None)
    for name in (paths.VARIABLE, "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(paths, "_FLEX_DTYPES", set(paths._FLEX_DTYPES))
    monkeypatch.setattr(paths, "_on_tensor_cores", lambda dtype: True)
    paths._compiles.cache_clear()
    yield monkeypatch
    paths._compiles.cache_clear()


def on(device, dtype=torch.bfloat16):
    paths._compiles.cache_clear()
    return paths.kernels(torch.device(device), dtype)


def test_kernels_are_named_for_each_device_and_dtype(machine):
    assert [on("cuda", x) for x in (torch.float32, torch.bfloat16, torch.float16)] == ["flex"] * 3
    assert on("cuda", torch.float64) == on("mps") == on("meta") == "torch"
    assert on("cpu") == on("cpu", torch.float64) == "cpu"
    x = torch.ones(1)
    assert paths.tuned_for_cpu(x) and not paths.tuned_for_cpu(x.to("meta"))
    machine.setattr(paths, "_on_tensor_cores", lambda dtype: dtype is torch.bfloat16)
    assert [on("cuda", x) for x in (torch.float32, torch.bfloat16)] == ["torch", "flex"]
    machine.setenv(paths.VARIABLE, "torch")
    assert on("cuda") == on("cpu") == "torch" and not paths.tuned_for_cpu(x)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (torch.cuda, "is_available", lambda: False),
        (torch.cuda, "get_device_capability", lambda device: (7, 5)),
        (paths, "find_spec", lambda name: None),
        (paths.shutil, "which", lambda name: None),
    ],
    ids=["no driver", "Turing", "no Triton", "no C compiler"],
)
def test_a_machine_that_cannot_compile_uses_operators(machine, place, name, value):
    machine.setattr(place, name, value)
    assert on("cuda") == "torch"
    # A C compiler may be named by the environment.
    machine.setenv("CC", "/opt/cc")
    assert (on("cuda") == "flex") == (name == "which")


def test_float32_is_served_with_tf32_alone(machine):
    machine.undo()
    assert [paths._on_tensor_cores(x) for x in (torch.bfloat16, torch.float16)] == [True, True]
    for precision, allowed in (("high", True), ("medium", True), ("highest", False)):
        machine.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        machine.setattr(torch.backends.cuda, "matmul", object())
        assert paths._on_tensor_cores(torch.float32) == allowed
    # Where PyTorch has a setting for each backend, it decides.
    for precision, allowed in (("tf32", True), ("ieee", False)):
        machine.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=precision))
        machine.setattr(torch, "get_float32_matmul_precision", lambda: pytest.fail("not asked"))
        assert paths._on_tensor_cores(torch.float32) == allowed


def test_a_precision_of_the_cpu_alone_does_not_keep_other_devices_from_float32():
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this PyTorch has one setting for all devices")
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        assert paths.kernels(torch.device("cuda"), torch.float32) == "torch"
    finally:
        matmul.fp32_precision = before


@pytest.fixture
def served(machine):
    """FlexAttention serves the CPU until it is forgone."""
    machine.setattr(paths, "kernels", lambda _, dtype: "flex" if dtype in paths._FLEX_DTYPES else "cpu")
    machine.setattr(softmax_identity, "_multiprocessors", lambda device: 8)
    flex._compiled.cache_clear()
    yield machine
    flex._compiled.cache_clear()


def call():
    """Output of a backend that FlexAttention serves."""
    q, k, v = (x.float() for x in random_qkv(2, 4, 2, 50, 75, head_dim=16, value_dim=24))
    return ea.build("performer-positive", head_dim=16, num_features=64)(q, k, v, key_mask=random_mask(2, 75))


def test_operators_serve_a_call_while_compilation_is_turned_off(served):
    served.setattr(torch, "compile", lambda call, **options: call)
    with (
        pytest.warns(UserWarning, match="float32 runs on PyTorch's operators.* is turned off"),
        paths.observed_kernels() as names,
    ):
        out = call()
    assert names == set()
    served.undo()
    # The formula is the same to the rounding of float32.
    assert (out - call()).abs().max() <= 1e-5


def test_a_failure_of_the_compiler_is_told_once_and_decides(served):
    def fails(*_):
        raise TorchDynamoException("Failed to find C compiler.\nSpecify CC.\n\nSet TORCHDYNAMO_VERBOSE=1")

    served.setattr(torch, "compile", lambda call, **options: fails)
    with pytest.warns(UserWarning, match="float32 runs .*: Failed to find C compiler. Specify CC.$"):
        call()
    assert [on("cuda", x) for x in (torch.float32, torch.bfloat16)] == ["cpu", "flex"]
    out = call()
    served.setattr(paths, "kernels", lambda device, dtype: "cpu")
    assert torch.equal(out, call())


def test_a_capture_without_a_call_before_is_told_and_decides_nothing(machine):
    machine.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with (
        pytest.warns(UserWarning, match="bfloat16 .*no such call came before the capture"),
        pytest.raises(flex.NotCompiledError, match="capture"),
    ):
        flex._compiled(torch.device("cuda"), torch.bfloat16, 4, 2, 16, 16)
    assert on("cuda") == "flex"
