"""Which kernels serve a call, and linear attention as two attentions by FlexAttention on the CPU."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cpu_flex_attention import eager_flex
from kernel_launches import counted
from reference import assert_near, output_and_gradients, random_qkv
from small_backends import small_backend
from torch._dynamo.exc import TorchDynamoException

import efficient_attn as ea
from efficient_attn.ops import paths, verdict
from efficient_attn.ops.linear import softmax_identity
from efficient_attn.ops.softmax import cpu_flash, flex

EXPONENTIAL = ("performer-positive", "performer-hyperbolic", "performer-oprf", "performer-full")
# Keys and their parts: eight of 10, the last with 5 keys of padding, and four equal parts.
PARTS = {75: 8, 76: 4}
SERVED = [("performer-positive", {"num_features": 64}), ("bigbird", {"block": 16})]
SERVED += [("window", {"window": 5}), ("window", {"window": 5, "global_tokens": 2})]


def inputs(keys, norm=1.0, dtype=torch.float64, queries=50):
    """Grouped queries across lengths, with values longer than keys, and a mask that hides whole parts."""
    q, k, v = random_qkv(2, 4, 2, queries, keys, head_dim=16, value_dim=24)
    q, k = (x / x.norm(dim=-1, keepdim=True) * (norm * 16**0.25) for x in (q, k))
    mask = torch.rand(2, keys, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[0, :30] = False
    return [x.to(dtype) for x in (q, k, v)], mask


def performer(name, **options):
    return small_backend(name, 64, head_dim=16, **options)


@pytest.fixture
def parts(monkeypatch):
    """The inputs of every call in parts, and the number of parts."""
    records, num_parts, mean_values = [], softmax_identity.num_parts, softmax_identity.mean_values_of_parts

    def numbered(*args):
        records.append(num_parts(*args))
        return records[-1]

    def recorded(inputs):
        records.append(inputs)
        return mean_values(inputs)

    monkeypatch.setattr(softmax_identity, "num_parts", numbered)
    monkeypatch.setattr(softmax_identity, "mean_values_of_parts", recorded)
    return records


def rounding(inputs):
    """Bound on errors: exponents of some size E are rounded to E · ε, a relative error of the weights."""
    q, k = (x.double().norm(dim=-1).max().item() * math.sqrt(inputs.scale) for x in (inputs.q, inputs.k))
    exponent = inputs.exponents().norm(dim=-1).max().item() * (q + k) + k**2 / 2
    if inputs.log_weights is not None:
        exponent += inputs.log_weights.abs().max().item()
    return 8 * (exponent + 1) * torch.finfo(inputs.q.dtype).eps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("norm", [pytest.param(1, marks=pytest.mark.slow), 20])
@pytest.mark.parametrize("keys", PARTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", EXPONENTIAL)
def test_two_fused_attentions_equal_the_path_of_the_cpu(name, masked, keys, norm, dtype, parts):
    (q, k, v), mask = inputs(keys, norm)
    mask = mask if masked else None
    backend = performer(name)
    expected = backend(q, k, v, key_mask=mask)
    with eager_flex():
        out = backend(*(x.to(dtype) for x in (q, k, v)), key_mask=mask)
    call, number = parts
    assert number == PARTS[keys]
    assert out.dtype is dtype
    assert out.is_contiguous()
    error = (out.double() - expected).norm(dim=-1).max() / v.norm(dim=-1).max()
    assert error <= rounding(call)
    if norm == 1 and dtype is torch.float64:
        assert error <= 1e-12


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", EXPONENTIAL)
def test_gradients_equal_those_of_the_path_of_the_cpu(name, masked):
    (q, k, v), mask = inputs(75)
    # No real key of a sequence, and masked keys of NaN.
    mask[1] = False
    if masked:
        k, v = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    # A negative scale turns the queries.
    backend = performer(name, scale=-0.3) if masked else performer(name)
    call = partial(backend, key_mask=mask if masked else None)
    expected = output_and_gradients(call, leaves)
    with eager_flex():
        actual = output_and_gradients(call, leaves)
    assert_near(actual, expected, 1e-12)
    assert not masked or not any(x[1].any() for x in actual)


def plain(inputs):
    """The two softmaxes in the dtype of the inputs, operator by operator."""
    w, root = inputs.directions, math.sqrt(inputs.scale)
    keys = root * w @ inputs.k.mT - (root * inputs.k).square().sum(-1).unsqueeze(-2) / 2
    queries = root * inputs.q @ w.mT + keys.logsumexp(-1).unsqueeze(-2).repeat_interleave(inputs.group, 1)
    return queries.softmax(-1) @ (keys.softmax(-1) @ inputs.v).repeat_interleave(inputs.group, 1)


@pytest.mark.parametrize("norm", [1, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_errs_at_most_twice_as_much_as_plain_operators_with_its_directions(dtype, norm, parts):
    tensors, _ = inputs(75, norm)
    tensors = [x.to(dtype).requires_grad_() for x in tensors]
    backend = performer("performer-positive")
    with eager_flex():
        out = backend(*tensors)
        actual = [out, *torch.autograd.grad(out.float().sin().sum(), tensors)]
    call = parts[0]
    assert call.directions.dtype is dtype
    wide = {x: getattr(call, x).detach().double().requires_grad_() for x in ("q", "k", "v")}
    exact = call._replace(**wide, directions=call.directions.double())
    results = []
    for source, leaves in ((call, tensors), (exact, exact[:3])):
        out = plain(source)
        results.append([out, *torch.autograd.grad(out.float().sin().sum(), leaves)])
    for x, same, truth in zip(actual, *results, strict=True):
        assert (x.double() - truth).norm() <= 2 * (same.double() - truth).norm()


@pytest.mark.parametrize(
    ("keys", "programs", "parts"),
    [
        # 16 heads of 256 directions on 132 multiprocessors: four programs for each.
        (65536, 32, 16),
        (65536, 10_000, 1),
        # At least 256 keys in a part.
        (4096, 2, 16),
        (1, 1, 1),
        # Eight equal parts are enough work, one is not.
        (65528, 32, 8),
        (65537, 32, 16),
    ],
)
def test_parts_occupy_the_multiprocessors_and_are_equal_where_that_suffices(keys, programs, parts):
    assert softmax_identity.num_parts(keys, programs, 132) == parts


def test_attention_with_a_bias_for_each_key_is_that_of_the_definition():
    q, k, v = random_qkv(2, 4, 2, 5, 7, head_dim=16, value_dim=24)
    bias = torch.linspace(-3, 3, 28, dtype=torch.float64).view(2, 2, 1, 7)
    bias[0, 1, 0, 2:] = -torch.inf
    bias[1, 0] = -torch.inf
    with eager_flex():
        out, log_sum = flex.flex_rows(q, k, v, bias, 0.3)
    keys, values, both = (x.repeat_interleave(2, 1) for x in (k, v, bias))
    scores = 0.3 * q @ keys.mT + both
    masked = (both == -torch.inf).all(-1)
    assert torch.allclose(log_sum, scores.logsumexp(-1).where(~masked, -1e30), rtol=1e-14)
    mean = values.mean(-2, keepdim=True)
    expected = torch.where(masked.unsqueeze(-1), mean, scores.softmax(-1).nan_to_num() @ values)
    assert (out - expected).abs().max() <= 1e-14


def test_the_operator_returns_the_state_and_logarithms_of_the_cpu(parts, monkeypatch):
    monkeypatch.setenv(paths.VARIABLE, "")
    (q, k, v), mask = inputs(75)
    mask[1] = False
    backend = performer("performer-oprf")
    with eager_flex():
        backend(q, k, v, key_mask=mask)
        actual = torch.ops.efficient_attn.full_linear(*parts[0])
    expected = torch.ops.efficient_attn.full_linear(*parts[0])
    assert (actual[4][1] == -torch.inf).all()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("masked", "launches"), [(False, 32), (True, 44)])
def test_launches_depend_on_no_length_and_nothing_waits_for_the_device(masked, launches, monkeypatch):
    def kernels(q, k, v, bias, factor, everything):
        # The attention, and its log-sum-exps as natural logarithms.
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), bias.new_zeros(q.shape[:-1])

    backend = performer("performer-positive")
    with eager_flex(), monkeypatch.context() as patched:
        patched.setattr(flex, "compiled", lambda function, *key: kernels)
        for keys in (80, 800):
            tensors, mask = inputs(keys, dtype=torch.bfloat16)
            count = counted(partial(backend, *tensors, key_mask=mask if masked else None))
            assert count.launches <= launches, count.operators
            assert not count.syncs


def tensors(device="cpu", dtype=torch.float32, head_dim=16, value_dim=16, tokens=3):
    shapes = (2, 4, 3, head_dim), (2, 2, tokens, head_dim), (2, 2, tokens, value_dim)
    return [torch.empty(shape, device=device, dtype=dtype) for shape in shapes]


def test_flex_serves_dimensions_and_sizes_that_its_kernels_take(monkeypatch):
    monkeypatch.setattr(paths, "flex_serves", lambda device, dtype: dtype.itemsize < 8)
    monkeypatch.setattr(verdict, "trusted", lambda *kernel: True)
    for sizes in ({}, {"head_dim": 256, "value_dim": 24}, {"device": "meta", "tokens": 2**24}):
        assert flex.available(*tensors(**sizes)), sizes
    beyond = [{"head_dim": 8}, {"value_dim": 8}, {"head_dim": 257}, {"tokens": 0}, {"dtype": torch.float64}]
    for sizes in (*beyond, {"device": "meta", "tokens": 2**25}):
        assert not flex.available(*tensors(**sizes)), sizes
    assert not flex.available(*tensors()[:2], tensors(dtype=torch.bfloat16)[2])
    monkeypatch.setattr(verdict, "trusted", lambda kernel, *_: kernel == "window-flex")
    assert not flex.available(*tensors()) and flex.available(*tensors(), kernel="window-flex")


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU, Triton and a C compiler."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(paths, "find_spec", lambda name: object())
    monkeypatch.setattr(paths.shutil, "which", lambda name: f"/bin/{name}" if name == "gcc" else None)
    for name in (paths.VARIABLE, "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(paths, "FLEX_DTYPES", set(paths.FLEX_DTYPES))
    monkeypatch.setattr(paths, "on_tensor_cores", lambda dtype: True)
    paths.compiles.cache_clear()
    yield monkeypatch
    paths.compiles.cache_clear()


def on(device, dtype=torch.bfloat16):
    paths.compiles.cache_clear()
    return paths.flex_serves(torch.device(device), dtype)


def test_flex_attention_serves_cuda_alone_and_no_double_precision(machine):
    assert all(on("cuda", x) for x in (torch.float32, torch.bfloat16, torch.float16))
    assert not any((on("cuda", torch.float64), on("mps"), on("meta"), on("cpu")))
    x = torch.ones(1)
    assert paths.tuned_for_cpu(x) and not paths.tuned_for_cpu(x.to("meta"))
    machine.setattr(paths, "on_tensor_cores", lambda dtype: dtype is torch.bfloat16)
    assert [on("cuda", x) for x in (torch.float32, torch.bfloat16)] == [False, True]
    machine.setenv(paths.VARIABLE, "torch")
    assert not on("cuda") and not paths.tuned_for_cpu(x)


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
    assert not on("cuda")
    # A C compiler may be named by the environment.
    machine.setenv("CC", "/opt/cc")
    assert on("cuda") == (name == "which")


def test_float32_is_served_with_tf32_alone(machine):
    machine.undo()
    assert [paths.on_tensor_cores(x) for x in (torch.bfloat16, torch.float16)] == [True, True]
    for precision, allowed in (("high", True), ("medium", True), ("highest", False)):
        machine.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        machine.setattr(torch.backends.cuda, "matmul", object())
        assert paths.on_tensor_cores(torch.float32) == allowed
    # Where PyTorch has a setting for each backend, it decides.
    for precision, allowed in (("tf32", True), ("ieee", False)):
        machine.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=precision))
        machine.setattr(torch, "get_float32_matmul_precision", lambda: pytest.fail("not asked"))
        assert paths.on_tensor_cores(torch.float32) == allowed


def test_a_precision_of_the_cpu_alone_does_not_keep_other_devices_from_float32():
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this PyTorch has one setting for all devices")
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        assert not paths.flex_serves(torch.device("cuda"), torch.float32)
    finally:
        matmul.fp32_precision = before


@pytest.fixture
def served(machine):
    """FlexAttention serves the CPU until it is forgone."""
    machine.setattr(paths, "flex_serves", lambda _, dtype: dtype in paths.FLEX_DTYPES)
    machine.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=8))
    machine.setattr(verdict, "trusted", lambda *kernel: True)
    machine.setattr(cpu_flash, "available", lambda *tensors: False)
    flex.compiled.cache_clear()
    yield machine
    flex.compiled.cache_clear()


@pytest.mark.parametrize(("name", "options"), SERVED)
def test_operators_serve_a_call_while_compilation_is_turned_off(served, name, options):
    tensors, _ = inputs(50, dtype=torch.float32)
    call = partial(ea.build(name, head_dim=16, **options), *tensors)
    served.setattr(torch, "compile", lambda call, **options: call)
    warned = pytest.warns(UserWarning, match="float32 runs on PyTorch's operators.* is turned off")
    with warned, paths.observed_kernels() as names:
        out = call()
    assert names == set()
    served.undo()
    # The formula is the same to the rounding of float32.
    assert (out - call()).abs().max() <= 1e-5


def test_a_failure_of_the_compiler_is_told_once_and_decides(served):
    def fails(*_):
        raise TorchDynamoException("Failed to find C compiler.\nSpecify CC.\n\nSet TORCHDYNAMO_VERBOSE=1")

    tensors, mask = inputs(75, dtype=torch.float32)
    call = partial(performer("performer-positive"), *tensors, key_mask=mask)
    served.setattr(torch, "compile", lambda call, **options: fails)
    with pytest.warns(UserWarning, match="float32 runs .*: Failed to find C compiler. Specify CC.$"):
        call()
    assert [on("cuda", x) for x in (torch.float32, torch.bfloat16)] == [False, True]
    out = call()
    served.setattr(paths, "flex_serves", lambda device, dtype: False)
    assert torch.equal(out, call())


def test_a_capture_without_a_call_before_is_told_and_decides_nothing(machine):
    machine.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    warned = pytest.warns(UserWarning, match="bfloat16 .*no such call came before the capture")
    with warned, pytest.raises(flex.NotCompiledError, match="capture"):
        flex.compiled(flex._attention, torch.device("cuda"), torch.bfloat16, 4, 2, 16, 16)
    assert on("cuda")
