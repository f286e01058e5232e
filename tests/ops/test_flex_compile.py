"""FlexAttention is compiled whatever it is called with: `pytest -m compile`."""

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from eager_flex import eager_flex, on_flex, traced_flex
from reference import random_qkv
from torch.nn.attention import flex_attention

import efficient_attn as ea
from efficient_attn.ops import paths
from efficient_attn.ops.softmax import flex

pytestmark = pytest.mark.compile

compile_anything = torch.compile


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    flex._compiled.cache_clear()
    yield
    flex._compiled.cache_clear()


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
        for batch, rows, keys in itertools.product((2, 3, 5), (64, 128, 77), (64, 130, 300)):
            out = attend(batch, rows, keys)
    assert_as_uncompiled(out, batch=5, rows=77, keys=300)
    assert len(graphs) == 1
    # One fused attention, and its log-sum-exps as natural logarithms.
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    attention, *_, logarithm = [str(call) for call in calls]
    assert attention == "flex_attention"
    assert "mul" in logarithm
    assert len(calls) == 4


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


def test_turned_off_compilation_never_runs_the_form_that_writes_all_scores():
    with (
        on_flex(),
        torch.compiler.set_stance("force_eager"),
        pytest.warns(UserWarning, match="torch.compile is turned off"),
        pytest.raises(flex.NotCompiledError),
    ):
        attend()
    assert torch.float32 in paths._FLEX_DTYPES


def test_an_error_of_the_compiler_is_told(monkeypatch):
    def fails(graph, inputs):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fails))
    monkeypatch.setattr(paths, "_FLEX_DTYPES", {torch.float32, torch.bfloat16})
    with (
        on_flex(),
        pytest.warns(UserWarning, match="Failed to find C compiler"),
        pytest.raises(flex.NotCompiledError),
    ):
        attend()
    assert torch.float32 not in paths._FLEX_DTYPES


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


@torch.library.custom_op("efficient_attn_tests::attend", mutates_args=())
def attend_opaquely(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return flex.attend(q, k, v, bias, 0.3)[0]


@attend_opaquely.register_fake
def _(q, k, v, bias):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@pytest.mark.parametrize("nested", [False, True])
def test_the_compiler_of_pytorch_fuses_the_bias_of_each_key(nested, monkeypatch):
    attention = flex_attention.flex_attention

    def without_log_sums(*tensors, return_aux, **options):
        return attention(*tensors, **options), flex_attention.AuxOutput(lse=tensors[0].new_zeros(()))

    with eager_flex():
        expected, _ = attend(3, 70, 90)
    monkeypatch.setattr(flex_attention, "flex_attention", without_log_sums)
    call = torch.compile(attend_opaquely, fullgraph=True) if nested else attend_opaquely
    with on_flex(), torch.no_grad():
        out = call(*inputs(3, 70, 90))
    torch.testing.assert_close(out, expected)
