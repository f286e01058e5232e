"""FlexAttention is compiled whatever it is called with: `pytest -m compile`."""

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from eager_flex import eager_flex, on_flex, traced_flex
from reference import random_mask, random_qkv
from torch.nn.attention import flex_attention

import efficient_attn as ea
from efficient_attn.ops import naive, paths, verdict
from efficient_attn.ops.softmax import flex
from efficient_attn.ops.window import attention
from efficient_attn.ops.window import flex as window_flex

pytestmark = pytest.mark.compile

compile_anything = torch.compile


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    for cached in (flex._compiled, window_flex._compiled):
        cached.cache_clear()
    yield
    for cached in (flex._compiled, window_flex._compiled):
        cached.cache_clear()


def inputs(batch=2, rows=5, keys=7, *, transposed=False, heads=4, head_dim=16, dtype=torch.float32):
    def layout(x):
        return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) if transposed else x.to(dtype)

    q, k, v = random_qkv(batch, heads, 2, rows, keys, head_dim=head_dim, value_dim=24)
    bias = torch.linspace(-1, 1, batch * 2 * keys).view(batch, 2, 1, keys)
    return layout(q), layout(k), layout(v), bias


def attend(*args, **options):
    return flex.attend(*inputs(*args, **options), 0.3)


def assert_as_uncompiled(actual, **sizes):
    with eager_flex():
        expected = attend(**sizes)
    torch.testing.assert_close(actual, expected)


def test_all_lengths_and_batches_share_one_version():
    with traced_flex() as graphs:
        for batch, rows, keys in itertools.product((2, 3, 5), (64, 77), (64, 130, 300)):
            out = attend(batch, rows, keys)
    assert_as_uncompiled(out, batch=5, rows=77, keys=300)
    assert len(graphs) == 1
    # One fused attention, and its log-sum-exps as natural logarithms.
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    names = [str(call) for call in calls]
    assert names[0] == "flex_attention" and "mul" in names[-1] and len(names) == 4


def test_more_versions_than_torch_keeps_by_default_are_all_compiled():
    with traced_flex() as graphs:
        for batch, rows, keys, transposed in itertools.product((1, 2), (1, 5), (1, 7), (False, True)):
            assert_as_uncompiled(
                attend(batch, rows, keys, transposed=transposed), batch=batch, rows=rows, keys=keys
            )
    assert torch._dynamo.config.recompile_limit < len(graphs) <= 16


def test_each_configuration_is_compiled_once_with_dimensions_as_constants():
    configurations = [
        {"heads": heads, "head_dim": head_dim, "dtype": dtype}
        for heads in (2, 4, 8)
        for head_dim in (16, 24)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    with traced_flex() as graphs:
        for _ in range(2):
            for sizes in configurations:
                attend(**sizes)
    assert len(graphs) == len(configurations)
    for graph, sizes in zip(graphs, configurations, strict=True):
        tensors = (x.meta["example_value"] for x in graph.graph.nodes if x.op == "placeholder")
        q = next(x for x in tensors if isinstance(x, torch.Tensor))
        dimensions = [q.shape[1], q.shape[3]]
        assert dimensions == [sizes["heads"], sizes["head_dim"]]
        assert [type(x) for x in dimensions] == [int, int]


@pytest.mark.parametrize("gradients", [False, True])
def test_a_backend_in_compiled_code_compiles_it_too(gradients):
    tensors = random_qkv(2, 4, 2, 50, 76, head_dim=16, value_dim=24)
    q, k, v = (x.float().requires_grad_(gradients) for x in tensors)
    backend = ea.build("performer-positive", head_dim=16, num_features=64)
    with eager_flex():
        expected = backend(q, k, v)
    with traced_flex(operators=True) as graphs:
        out = compile_anything(backend, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(out, expected)
    assert len(graphs) == 2


# The compiler's own first call uses a deprecated function.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_operators_serve_what_the_compiler_of_pytorch_refuses(monkeypatch):
    # For the CPU it has no log-sum-exps.
    monkeypatch.setattr(paths, "_FLEX_DTYPES", set(paths._FLEX_DTYPES))
    q, k, v = (x.float() for x in random_qkv(2, 4, 2, 50, 76, head_dim=16, value_dim=24))
    backend = ea.build("performer-positive", head_dim=16, num_features=64)
    with on_flex(), pytest.warns(UserWarning, match="not compiled: .*`return_lse` is not supported yet"):
        out = backend(q, k, v)
    assert (out - backend(q, k, v)).abs().max() <= 1e-5
    assert torch.float32 not in paths._FLEX_DTYPES


def test_the_compiler_of_pytorch_fuses_the_bias_of_each_key(monkeypatch):
    attention = flex_attention.flex_attention

    def without_log_sums(*tensors, return_aux, **options):
        return attention(*tensors, **options), flex_attention.AuxOutput(lse=tensors[0].new_zeros(()))

    with eager_flex():
        expected, _ = attend(3, 70, 90)
    monkeypatch.setattr(flex_attention, "flex_attention", without_log_sums)
    with on_flex(), torch.no_grad():
        out, _ = attend(3, 70, 90)
    torch.testing.assert_close(out, expected)


@pytest.fixture
def window_on_cpu(monkeypatch):
    """FlexAttention serves windows on the CPU, also with gradients."""
    monkeypatch.setattr(paths, "kernels", torch.compiler.assume_constant_result(lambda device, dtype: "flex"))
    monkeypatch.setattr(verdict, "trusted", torch.compiler.assume_constant_result(lambda *kernel: True))
    monkeypatch.setattr(attention.cpu_flash, "_FORWARD", None)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)


@pytest.fixture
def graphs(window_on_cpu, monkeypatch):
    """Graphs of all versions, which run uncompiled."""
    versions = []

    def keep(graph, inputs):
        versions.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    return versions


def assert_window(call, batch=2, tokens=300, *, window=257, causal=False, masked=False):
    """Compare a window with the band of the definition."""
    tensors = [x.float() for x in random_qkv(batch, 4, 2, tokens, tokens, 16, 24)]
    mask = random_mask(batch, tokens) if masked else None
    options = {"scale": 16**-0.5, "window": window, "causal": causal, "key_mask": mask}
    expected = naive.softmax_attention(*(x.double() for x in tensors), **options).float()
    with torch.no_grad():
        torch.testing.assert_close(call(*tensors, key_mask=mask), expected)


def test_windows_of_all_lengths_and_batches_share_few_versions(graphs):
    backend = ea.build("window", head_dim=16, window=257)
    for batch in (2, 3, 1):
        for tokens in (140, 300, 128 * 5, 128 * 7 + 1):
            assert_window(backend, batch, tokens)
    # Some blocks fewer than the window reads, or more; one sequence, or more.
    assert len(graphs) <= 4
    assert any("flex_attention" in str(node.target) for node in graphs[0].graph.nodes)


def test_compiled_code_of_a_caller_holds_the_kernel_of_windows_itself(graphs):
    compiled = torch.compile(ea.build("window", head_dim=16, window=257), fullgraph=True)
    assert_window(compiled, masked=True)
    assert len(graphs) == 1
    assert any("flex_attention" in str(node.target) for node in graphs[0].graph.nodes)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("window", "causal", "tokens", "masked"), [(257, False, 700, False), (129, True, 640, True)]
)
def test_the_kernel_of_the_cpu_reads_the_same_blocks(
    window_on_cpu, monkeypatch, tokens, window, causal, masked
):
    # That kernel, which skips blocks that are not listed, requires rows as long as there are blocks of keys.
    monkeypatch.setattr(window_flex, "min", max, raising=False)
    sizes = {"window": window, "causal": causal}
    with paths.observed_kernels() as names:
        assert_window(ea.build("window", head_dim=16, **sizes), tokens=tokens, masked=masked, **sizes)
    assert names == {"flex"}
