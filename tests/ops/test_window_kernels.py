"""The window by FlexAttention and by packed sequences of FlashAttention, with stand-ins on the CPU."""

import sys
from functools import partial, wraps
from types import SimpleNamespace

import jaxtyping
import pytest
import torch
from backend_definitions import by_definition
from cpu_flex_attention import on_flex
from kernel_launches import counted
from reference import assert_near, first_and_second_derivatives, largest_difference, random_mask, random_qkv
from torch.autograd.function import once_differentiable
from torch.nn.attention import flex_attention

import efficient_attn as ea
from efficient_attn.ops import naive, paths
from efficient_attn.ops.window import attention, varlen
from efficient_attn.ops.window import flex as window_flex

# Both sides of a window, at and around the edges of blocks of 128, and numbers of global keys.
SIDES = [
    *[(0, 0), (1, 1), (127, 127), (128, 128), (129, 129), (254, 254), (300, 300)],
    *[(2, 0), (127, 0), (128, 0), (256, 0), (383, 0), (384, 0), (64, 400), (5000, 5000)],
    *[(0, 2), (0, 127), (0, 128), (0, 384), (400, 64)],
]
WINDOWS = [(1, False, 9), (7, False, 40), (257, False, 300), (2, True, 130), (257, True, 300)]
BESIDE_GLOBAL = [(33, False, 300), (32, True, 300), (2, True, 150), (257, True, 400)]
KERNELS = [("packed", False), ("uncompiled", False), ("uncompiled", True)]
WITH_GLOBAL = [(*sides, count) for sides in [(256, 0), (300, 0), (16, 16), (200, 200)] for count in (4, 130)]


def pairs(number, index, size):
    """How often each pair of blocks is listed, [size size]."""
    listed = torch.arange(index.shape[-1]) < number[0, 0, :, None]
    return torch.zeros(size, size).scatter_add_(1, index[0, 0].long(), listed.float())


@pytest.mark.parametrize(("back", "ahead", "count"), [*((*sides, 0) for sides in SIDES), *WITH_GLOBAL])
@pytest.mark.parametrize("tokens", [5, 128, 129, 500])
def test_the_blocks_are_those_of_all_pairs_of_tokens_and_each_is_listed_once(tokens, back, ahead, count):
    def visible(entry, head, query, key):
        near = (key >= query - back) & (key <= query + ahead)
        return near | ((key < count) & ((key <= query) | (ahead > 0)))

    def listed(*lists):
        return [pairs(*lists[:2], size), pairs(*lists[2:], size)]

    size, device = -(-tokens // 128), torch.device("cpu")
    torchs = flex_attention.create_block_mask(visible, 1, 1, tokens, tokens, device="cpu")
    expected = listed(*torchs.as_tuple()[2:6])
    apart = listed(*window_flex.blocks(tokens, back, ahead, whole=True, count=count, device=device))
    together = window_flex.blocks(tokens, back, ahead, whole=False, count=count, device=device)
    if count == 0:
        assert all(map(torch.equal, apart, expected))
    every = sum(expected)
    # A causal row of blocks lists the blocks of all global keys.
    every[:, : -(-count // 128)] = 1
    assert torch.equal(sum(apart), every)
    assert torch.equal(pairs(*together[:2], size), every) and together[2:] == (None, None)


@pytest.fixture
def uncompiled(monkeypatch):
    """Keys of the configurations that are served on the CPU, in any dtype and with gradients."""
    keys = []

    def compiled(function, *key):
        keys.append(key)
        return function

    monkeypatch.setattr(window_flex.flex, "compiled", compiled)
    monkeypatch.setattr(attention.cpu_flash, "available", lambda *tensors: False)
    # FlexAttention refuses gradients on the CPU.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    with on_flex():
        yield keys


def packed_attention(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False
):
    """`varlen_attn` as documented, of equal lengths; the last query is aligned with the last key."""
    assert query.ndim == key.ndim == value.ndim == 3 and query.stride(-1) == key.stride(-1) == 1
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    sequences = []
    for x, ends, length in ((query, cu_seq_q, max_q), (key, cu_seq_k, max_k), (value, cu_seq_k, max_k)):
        assert ends.dtype == torch.int32 and ends.tolist() == list(range(0, len(x) + 1, length))
        sequences.append(x.unflatten(0, (-1, length)).transpose(1, 2))
    left, right = window_size
    assert right in (0, left)
    window = left + 1 if right == 0 else 2 * left + 1
    out = naive.softmax_attention(*sequences, scale=scale, window=window, causal=right == 0)
    return out.transpose(1, 2).flatten(0, 1)


class Kernel(torch.autograd.Function):
    """A call whose gradients have no derivatives."""

    @staticmethod
    def forward(ctx, call, *tensors):
        with torch.enable_grad():
            ctx.leaves = [x.detach().requires_grad_() for x in tensors]
            ctx.out = call(*ctx.leaves)
        return ctx.out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return None, *torch.autograd.grad(ctx.out, ctx.leaves, gradient, retain_graph=True)


@pytest.fixture
def stand_in(monkeypatch):
    """A setter of the function that stands for `varlen_attn`; None: a PyTorch without it."""

    def use(function):
        name = "torch.nn.attention.varlen"
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(varlen_attn=function))
        # It remembers the function that this PyTorch has.
        monkeypatch.setattr(varlen, "_function", lambda: function)

    return use


@pytest.fixture
def packed(monkeypatch, stand_in):
    """Arguments of the calls of a stand-in, which serves the CPU and float64 too."""
    calls = []

    @wraps(packed_attention)
    def called(*tensors, **options):
        calls.append((tensors, options))
        return Kernel.apply(lambda *x: packed_attention(*x, *tensors[3:], **options), *tensors[:3])

    stand_in(called)
    # The CPU has no FlashAttention, and the kernel no float64.
    monkeypatch.setattr(varlen, "_serves", lambda device, dtype: dtype in (torch.float64, torch.bfloat16))
    monkeypatch.setattr(attention.cpu_flash, "available", lambda *tensors: False)
    return calls


def between_tokens(x):
    """The same numbers with heads between tokens in memory, as projections leave them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("layout", [torch.clone, between_tokens])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize(("window", "causal", "tokens"), WINDOWS)
@pytest.mark.parametrize(("kernel", "masked"), KERNELS)
def test_the_window_and_its_gradients_equal_the_dense_band(
    kernel, tokens, window, causal, heads, layout, masked, request
):
    calls = request.getfixturevalue(kernel)
    q, k, v = (layout(x) for x in random_qkv(2, *heads, tokens, tokens, 16, 24))
    mask = random_mask(2, tokens) if masked else None
    if masked:
        # Rows of the second sequence see no key, and masked keys are NaN.
        mask[1, tokens // 3 :] = False
        k, v = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    backend = ea.build("window", head_dim=16, window=window, causal=causal)
    with paths.observed_kernels() as names:
        out = backend(*inputs, key_mask=mask)
    expected = by_definition(backend, *inputs, key_mask=mask)
    assert len(calls) == 1 and names == {"varlen" if kernel == "packed" else "flex"}
    assert largest_difference(out, expected, inputs) <= 1e-12


@pytest.mark.parametrize(("window", "causal", "tokens"), BESIDE_GLOBAL)
@pytest.mark.parametrize("count", [4, 130])
def test_global_keys_take_one_call_without_gradients_and_masks(uncompiled, tokens, window, causal, count):
    q, k, v = random_qkv(2, 4, 2, tokens, tokens, 16, 24)
    backend = ea.build("window", head_dim=16, window=window, causal=causal, global_tokens=count)
    with paths.observed_kernels() as names:
        out = backend(q, k, v)
    assert names == {"flex"} and len(uncompiled) == 1
    assert largest_difference(out, by_definition(backend, q, k, v)) <= 1e-12
    # Operators serve the others.
    mask = random_mask(2, tokens)
    masked = by_definition(backend, q, k, v, key_mask=mask)
    assert largest_difference(backend(q, k, v, key_mask=mask), masked) <= 1e-12
    backend(q.requires_grad_(), k, v).sum().backward()
    assert len(uncompiled) == 1


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.7])
def test_every_scale_is_served_by_a_positive_one(packed, scale):
    inputs = random_qkv(1, 1, 1, 5, 9)
    backend = ea.build("window", head_dim=8, window=3, causal=True, scale=scale)
    assert largest_difference(backend(*inputs), by_definition(backend, *inputs)) <= 1e-12
    assert packed[0][1]["scale"] > 0


@pytest.mark.parametrize("layout", [torch.clone, between_tokens])
def test_no_token_is_copied_in_either_layout(packed, layout):
    inputs = [layout(torch.randn(2, 3, 40, 8, dtype=torch.float64)) for _ in range(3)]
    out = ea.build("window", head_dim=8, window=5)(*inputs)
    assert [x.data_ptr() for x in packed[0][0][:3]] == [x.data_ptr() for x in inputs]
    assert out.is_contiguous() == inputs[0].is_contiguous()


def test_a_call_takes_three_launches_beside_the_kernel(packed, stand_in):
    stand_in(lambda q, *rest, **options: torch.empty_like(q))
    q = torch.randn(2, 3, 40, 8, dtype=torch.float64)
    count = counted(lambda: ea.build("window", head_dim=8, window=5)(q, q, q))
    assert count.operators == {"arange": 1, "mul": 2} and not count.syncs


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["packed", "uncompiled"])
def test_first_and_second_derivatives_are_those_of_the_formula(kernel, causal, request):
    calls = request.getfixturevalue(kernel)
    inputs = [x.requires_grad_() for x in random_qkv(2, 4, 2, 20, 20, 16, 16)]
    backend = ea.build("window", head_dim=16, window=5, causal=causal)
    expected = first_and_second_derivatives(partial(by_definition, backend), inputs)
    assert_near(first_and_second_derivatives(backend, inputs), expected, 1e-12)
    assert calls
    # The kernel's own gradients serve the first order; inputs without a gradient get none.
    q, k, v = inputs
    out = backend(q, k.detach(), v).sin().sum()
    for _ in range(2):
        first = torch.autograd.grad(out, (q, v), retain_graph=True)
        assert first[0].grad_fn is None
        assert_near(first, (expected[0], expected[2]), 1e-12)


def test_a_configuration_does_not_depend_on_the_length(uncompiled):
    backend = ea.build("window", head_dim=16, window=257)
    for tokens in (5, 20, 300):
        inputs = [x.requires_grad_() for x in random_qkv(1, 2, 2, tokens, tokens, 16, 16)]
        mask = torch.ones(1, tokens, dtype=torch.bool)
        backend(*inputs, key_mask=mask)
        with torch.no_grad():
            backend(*inputs, key_mask=mask)
        # The marks of a compiler do not reach the tensors of the caller.
        assert not any(hasattr(x, "_dynamo_weak_dynamic_indices") for x in (*inputs, mask))
    assert len(uncompiled) == 4 and len(set(uncompiled)) == 1


def test_past_tokens_transforms_and_exported_programs_go_another_way(uncompiled):
    q, k, v = random_qkv(1, 2, 2, 5, 20, 16, 16)
    causal = ea.build("window", head_dim=16, window=4, causal=True)
    causal(q, k, v)
    torch.func.vmap(lambda x: causal(x, x, x))(k[None])
    program = torch.export.export(ea.build("window", head_dim=16, window=5), (k, k, k))
    assert not any("flex" in str(node.target) for node in program.graph.nodes)
    assert not uncompiled


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:0", (torch.bfloat16, torch.float16)), ("cpu", ()), ("mps", ())]
)
def test_the_kernel_serves_half_precision_on_cuda(monkeypatch, stand_in, device, expected):
    def served(*, capability=(8, 0), function=packed_attention, kernels=""):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setenv(paths.VARIABLE, kernels)
        stand_in(function)
        varlen._has_flash.cache_clear()
        dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        return tuple(dtype for dtype in dtypes if varlen._serves(torch.device(device), dtype))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert served() == served(capability=(9, 0)) == expected
    assert not (served(capability=(7, 5)) or served(function=None) or served(kernels="torch"))
    varlen._has_flash.cache_clear()


def test_what_the_kernel_cannot_do_goes_another_way(packed, stand_in):
    q, k, v = random_qkv(2, 2, 2, 20, 20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    backend = ea.build("window", head_dim=8, window=5)
    assert (backend(q, k, v, key_mask=mask) - backend(q, k, v)).abs().max() <= 1e-12
    wide = torch.randn(1, 1, 20, 200, dtype=torch.float64)
    ea.build("window", head_dim=200, window=5)(wide, wide, wide)
    # Transforms of torch.func have no rule for the kernel.
    torch.func.vmap(lambda x: backend(x, x, x))(torch.randn(3, 1, 1, 20, 8, dtype=torch.float64))
    stand_in(lambda *tensors, scale, window_size: pytest.fail("not made for grouped queries"))
    backend(*random_qkv(2, 4, 2, 20, 20))
    empty = torch.zeros(0, 2, 20, 8, dtype=torch.float64)
    assert backend(empty, empty, empty).shape == empty.shape
    assert len(packed) == 1


def test_a_missing_or_older_function_is_not_used(monkeypatch):
    module = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(module, "varlen_attn", lambda query, key, value, is_causal=False: None)
    assert varlen._function.__wrapped__() is None
    monkeypatch.delattr(module, "varlen_attn")
    assert varlen._function.__wrapped__() is None


@pytest.mark.compile
@pytest.mark.skipif(varlen._function() is None, reason="this PyTorch has no window of packed sequences")
def test_the_real_function_is_part_of_an_exported_and_of_a_compiled_graph(monkeypatch):
    # A compiler cannot trace the checks of shapes where sizes are unknown to it.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setenv(paths.VARIABLE, "")
    # The CPU has no FlashAttention.
    monkeypatch.setattr(varlen, "_has_flash", lambda device: True)
    monkeypatch.setattr(attention.cpu_flash, "available", lambda *tensors: False)
    q, k, v = torch.randn(3, 2, 2, 40, 8, dtype=torch.bfloat16).unbind()
    backend = ea.build("window", head_dim=8, window=5, causal=True)
    tokens = torch.export.Dim("tokens", min=8, max=4096)

    def keep(module, _):
        modules.append(module)
        return lambda *inputs: inputs[:1]

    modules = [torch.export.export(backend, (q, k, v), dynamic_shapes=({2: tokens},) * 3).graph_module]
    # Sizes are unknown to the compiler, as after calls of several shapes.
    torch.compile(backend, fullgraph=True, backend=keep, dynamic=True)(q, k, v)
    for module in modules:
        nodes = [node for part in module.modules() for node in getattr(part, "graph", torch.fx.Graph()).nodes]
        assert "torch_attn._varlen_attn" in " ".join(str(node.target) for node in nodes)
