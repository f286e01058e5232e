"""FlexAttention is compiled whatever it is called with: `pytest -m compile`."""

import itertools
from functools import partial

import pytest
import torch
from backend_definitions import by_definition
from cpu_flex_attention import eager_flex, on_flex, traced_flex
from reference import random_mask, random_qkv
from torch.nn.attention import flex_attention

import efficient_attn as ea
from efficient_attn.ops import paths
from efficient_attn.ops.softmax import flex
from efficient_attn.ops.window import attention
from efficient_attn.ops.window import flex as window_flex

pytestmark = pytest.mark.compile

compile_anything = torch.compile
WINDOWS = [(257, False, 700, False, 0), (129, True, 640, True, 0)]
WINDOWS += [(300, True, 1000, False, 4), (33, False, 700, False, 130)]


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    def forget():
        torch._dynamo.reset()
        flex.compiled.cache_clear()

    forget()
    yield
    forget()


def inputs(batch=2, rows=5, keys=7, *, transposed=False, heads=4, head_dim=16, dtype=torch.float32):
    def layout(x):
        return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) if transposed else x.to(dtype)

    q, k, v = random_qkv(batch, heads, 2, rows, keys, head_dim=head_dim, value_dim=24)
    bias = torch.linspace(-1, 1, batch * 2 * keys).view(batch, 2, 1, keys)
    return layout(q), layout(k), layout(v), bias


def attend(*args, **options):
    return flex.flex_rows(*inputs(*args, **options), 0.3)


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


def test_more_versions_than_torch_keeps_by_default_are_all_compiled():
    with traced_flex() as graphs:
        for batch, rows, keys, transposed in itertools.product((1, 2), (1, 5), (1, 7), (False, True)):
            out = attend(batch, rows, keys, transposed=transposed)
            assert_as_uncompiled(out, batch=batch, rows=rows, keys=keys)
    assert torch._dynamo.config.recompile_limit < len(graphs) <= 16


def test_each_configuration_is_compiled_once_with_dimensions_as_constants():
    configurations = list(itertools.product((2, 4, 8), (16, 24), (torch.float32, torch.bfloat16)))
    with traced_flex() as graphs:
        for heads, head_dim, dtype in 2 * configurations:
            attend(heads=heads, head_dim=head_dim, dtype=dtype)
    assert len(graphs) == len(configurations)
    for graph in graphs:
        tensors = (x.meta["example_value"] for x in graph.graph.nodes if x.op == "placeholder")
        q = next(x for x in tensors if isinstance(x, torch.Tensor))
        assert [type(q.shape[dim]) for dim in (1, 3)] == [int, int]


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
    monkeypatch.setattr(paths, "FLEX_DTYPES", set(paths.FLEX_DTYPES))
    q, k, v = (x.float() for x in random_qkv(2, 4, 2, 50, 76, head_dim=16, value_dim=24))
    backend = ea.build("performer-positive", head_dim=16, num_features=64)
    with on_flex(), pytest.warns(UserWarning, match="not compiled: .*`return_lse` is not supported yet"):
        out = backend(q, k, v)
    assert (out - backend(q, k, v)).abs().max() <= 1e-5
    assert torch.float32 not in paths.FLEX_DTYPES


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
    """FlexAttention serves windows on the CPU."""
    monkeypatch.setattr(attention.cpu_flash, "available", lambda *tensors: False)
    with on_flex():
        yield


@pytest.fixture
def graphs(window_on_cpu, monkeypatch):
    """Graphs of all versions, which run uncompiled."""
    versions = []

    def keep(graph, inputs):
        versions.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    return versions


def assert_window(backend, batch=2, tokens=300, *, masked=False, call=None):
    """Compare a window, or a call of it, with the definition."""
    tensors = [x.float() for x in random_qkv(batch, 4, 2, tokens, tokens, 16, 24)]
    mask = random_mask(batch, tokens) if masked else None
    expected = by_definition(backend, *(x.double() for x in tensors), key_mask=mask).float()
    call = backend if call is None else call
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
    backend = ea.build("window", head_dim=16, window=257)
    assert_window(backend, masked=True, call=torch.compile(backend, fullgraph=True))
    assert len(graphs) == 1
    assert any("flex_attention" in str(node.target) for node in graphs[0].graph.nodes)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(("window", "causal", "tokens", "masked", "global_tokens"), WINDOWS)
def test_the_kernel_of_the_cpu_reads_the_same_blocks(
    window_on_cpu, monkeypatch, tokens, window, causal, masked, global_tokens
):
    # That kernel, which skips blocks that are not listed, requires rows as long as there are blocks of keys.
    monkeypatch.setattr(window_flex, "min", max, raising=False)
    backend = ea.build("window", head_dim=16, window=window, causal=causal, global_tokens=global_tokens)
    with paths.observed_kernels() as names:
        assert_window(backend, tokens=tokens, masked=masked)
    assert names == {"flex"}
