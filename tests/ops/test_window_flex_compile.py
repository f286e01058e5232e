"""The window by FlexAttention is compiled whatever it is called with: `pytest -m compile`."""

from functools import partial

import pytest
import torch
from reference import assert_near, random_mask, random_qkv
from torch._functorch import config as functorch_config
from torch.nn.attention import flex_attention

import efficient_attn as ea
from efficient_attn.ops import naive, paths
from efficient_attn.ops.window import attention
from efficient_attn.ops.window import flex as window_flex

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

# A gradient sums 257 products, each rounded.
ROUNDING = 257 * torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """FlexAttention serves the CPU, also with gradients, and nothing was compiled before."""
    monkeypatch.setattr(paths, "kernels", torch.compiler.assume_constant_result(lambda device, dtype: "flex"))
    monkeypatch.setattr(attention.cpu_flash, "_FORWARD", None)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    window_flex._compiled.cache_clear()
    yield
    window_flex._compiled.cache_clear()


@pytest.fixture
def graphs(monkeypatch):
    """Graphs of all versions, which run uncompiled."""
    versions = []

    def keep(graph, inputs):
        versions.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    return versions


def inputs_of(batch=2, tokens=300, *, heads=4, dim=16, requires_grad=False):
    inputs = random_qkv(batch, heads, 2, tokens, tokens, dim, 24)
    return [x.float().requires_grad_(requires_grad) for x in inputs]


def band(inputs, window=257, causal=False, mask=None):
    options = {"scale": inputs[0].shape[-1] ** -0.5, "window": window, "causal": causal, "key_mask": mask}
    return naive.softmax_attention(*(x.double() for x in inputs), **options).float()


def assert_right(out, inputs, window=257, mask=None):
    torch.testing.assert_close(out, band(inputs, window, mask=mask))


def test_lengths_and_batches_share_few_versions(graphs):
    backend = ea.build("window", head_dim=16, window=257)
    for batch in (2, 3, 1):
        for tokens in (140, 300, 128 * 5, 128 * 7 + 1, 128 * 9):
            inputs = inputs_of(batch, tokens)
            with torch.no_grad():
                assert_right(backend(*inputs), inputs)
    # Some blocks fewer than the window reads, or more; one sequence, or more.
    assert len(graphs) <= 4
    assert sum("flex_attention" in str(x.target) for x in graphs[0].graph.nodes) >= 1


def test_gradients_of_a_kept_graph_are_right_or_refused(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    inputs, mask = inputs_of(requires_grad=True), random_mask(2, 300)
    backend = ea.build("window", head_dim=16, window=257)
    expected = derivatives(band(inputs, mask=mask), inputs)
    out = backend(*inputs, key_mask=mask)
    with pytest.raises(RuntimeError, match="donated_buffer=False"):
        derivatives(out, inputs)
    # The setting that this error names; nothing is compiled anew.
    with functorch_config.patch(donated_buffer=False):
        assert_near(derivatives(out, inputs), expected, ROUNDING)
    assert_near(torch.autograd.grad(out.sin().sum(), inputs), expected[:3], ROUNDING)


def derivatives(out, inputs):
    """First and second derivatives."""
    first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
    return *first, *torch.autograd.grad(sum(x.square().sum() for x in first), inputs, retain_graph=True)


@pytest.mark.parametrize("masked", [False, True])
def test_compiled_code_of_a_caller_holds_the_kernel_itself(graphs, masked):
    inputs, mask = inputs_of(), random_mask(2, 300) if masked else None
    backend = ea.build("window", head_dim=16, window=257)
    compiled = torch.compile(backend, fullgraph=True)
    assert_right(compiled(*inputs, key_mask=mask), inputs, mask=mask)
    assert len(graphs) == 1
    assert any("flex_attention" in str(node.target) for node in graphs[0].graph.nodes)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("window", "causal", "tokens", "masked"), [(257, False, 700, False), (129, True, 640, True)]
)
def test_the_kernel_of_the_cpu_reads_the_same_blocks(monkeypatch, tokens, window, causal, masked):
    # That kernel, which skips blocks that are not listed, requires rows as long as there are blocks of keys.
    monkeypatch.setattr(window_flex, "min", max, raising=False)
    inputs, mask = inputs_of(tokens=tokens), random_mask(2, tokens) if masked else None
    with torch.no_grad():
        out = ea.build("window", head_dim=16, window=window, causal=causal)(*inputs, key_mask=mask)
    torch.testing.assert_close(out, band(inputs, window, causal, mask))
