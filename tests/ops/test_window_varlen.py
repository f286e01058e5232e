"""The window by FlashAttention's packed sequences, with a stand-in in plain operators for the kernel."""

import sys
from types import SimpleNamespace

import jaxtyping
import pytest
import torch
from launches import counted
from reference import assert_near, first_and_second_derivatives, largest_difference, random_qkv
from torch.autograd.function import once_differentiable

import efficient_attn as ea
from efficient_attn.measure import worker
from efficient_attn.measure.record import Case
from efficient_attn.ops import naive
from efficient_attn.ops.paths import VARIABLE
from efficient_attn.ops.window import attention, varlen
from efficient_attn.ops.window.attention import window_attention


def packed_attention(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False
):
    """`varlen_attn` as documented; the last query of a sequence is aligned with its last key."""
    assert query.ndim == key.ndim == value.ndim == 3 and query.stride(-1) == key.stride(-1) == 1
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q[0] == cu_seq_k[0] == 0
    assert (cu_seq_q[-1], cu_seq_k[-1]) == (len(query), len(key))
    assert (cu_seq_q.diff().max(), cu_seq_k.diff().max()) == (max_q, max_k)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = (size if size >= 0 else max_k for size in window_size)
    outs = []
    for rows, keys in zip(cu_seq_q.tolist()[:-1], cu_seq_k.tolist()[:-1], strict=True):
        q, k, v = query[rows : rows + max_q], key[keys : keys + max_k], value[keys : keys + max_k]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        distance = torch.arange(max_k) - torch.arange(max_q)[:, None] - (max_k - max_q)
        hidden = (distance < -left) | (distance > right)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outs)


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
        monkeypatch.setattr(varlen, "_function", lambda: function)

    monkeypatch.setattr(varlen, "_grouped", lambda: True)
    return use


@pytest.fixture
def packed(monkeypatch, stand_in):
    """Arguments of the calls of a stand-in, which serves the CPU and float64 too."""
    calls = []

    def called(*tensors, **options):
        calls.append((tensors, options))
        return Kernel.apply(lambda *x: packed_attention(*x, *tensors[3:], **options), *tensors[:3])

    stand_in(called)
    monkeypatch.setattr(varlen, "_DTYPES", (torch.float64, torch.bfloat16))
    monkeypatch.setattr(varlen, "_has_flash", lambda device: True)
    monkeypatch.setattr(attention.cpu_flash, "_FORWARD", None)
    return calls


def between_tokens(x):
    """The same numbers with heads between tokens in memory, as projections leave them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("layout", [torch.clone, between_tokens])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize(
    ("window", "causal", "queries", "tokens"),
    [(1, False, 9, 9), (7, False, 40, 40), (1, True, 9, 9), (6, True, 40, 40), (6, True, 5, 40)],
)
def test_the_kernel_is_asked_for_the_window(packed, window, causal, queries, tokens, heads, layout):
    inputs = [layout(x) for x in random_qkv(2, *heads, queries, tokens)]
    out = ea.build("window", head_dim=8, window=window, causal=causal)(*inputs)
    expected = naive.softmax_attention(*inputs, scale=8**-0.5, window=window, causal=causal)
    assert len(packed) == 1 and largest_difference(out, expected) <= 1e-12


def test_a_record_names_this_kernel_where_it_ran(packed):
    case = {"num_heads": 2, "head_dim": 8, "tokens": 16, "device": "cpu", "threads": 1, "kind": "memory"}
    for options, dtype, kernels in (
        ({"window": 5}, "float64", "varlen"),
        ({"window": 5}, "float32", "cpu"),
        # A window of all keys is exact attention.
        ({"window": 65}, "float64", "cpu"),
    ):
        record = worker.measure(Case(backend="window", label="w", options=options, dtype=dtype, **case))
        assert (record.status, record.kernels) == ("ok", kernels)


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.7])
def test_every_scale_is_served_by_a_positive_one(packed, scale):
    q, k, v = random_qkv(1, 1, 1, 9, 9)
    out = window_attention(q, k, v, scale=scale, back=2, ahead=2, key_mask=None)
    expected = naive.softmax_attention(q, k, v, scale=scale, window=5)
    assert packed[0][1]["scale"] > 0 and largest_difference(out, expected) <= 1e-12


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
def test_first_and_second_derivatives_are_those_of_the_formula(packed, causal):
    def definition(*x):
        return naive.softmax_attention(*x, scale=8**-0.5, window=5, causal=causal)

    inputs = [x.requires_grad_() for x in random_qkv(2, 4, 2, 20, 20)]
    backend = ea.build("window", head_dim=8, window=5, causal=causal)
    expected = first_and_second_derivatives(definition, inputs)
    assert_near(first_and_second_derivatives(backend, inputs), expected, 1e-12)
    assert packed
    # The kernel's own gradients serve the first order; inputs without a gradient get none.
    q, k, v = inputs
    out = backend(q, k.detach(), v).sin().sum()
    for _ in range(2):
        first = torch.autograd.grad(out, (q, v), retain_graph=True)
        assert first[0].grad_fn is None
        assert_near(first, (expected[0], expected[2]), 1e-12)


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:0", (torch.bfloat16, torch.float16)), ("cpu", ()), ("mps", ())]
)
def test_the_kernel_serves_half_precision_on_cuda(monkeypatch, stand_in, device, expected):
    def served(*, capability=(8, 0), function=packed_attention, kernels=""):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setenv(VARIABLE, kernels)
        stand_in(function)
        varlen._has_flash.cache_clear()
        dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        return tuple(dtype for dtype in dtypes if varlen._serves(torch.device(device), dtype))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert served() == served(capability=(9, 0)) == expected
    assert not (served(capability=(7, 5)) or served(function=None) or served(kernels="torch"))
    varlen._has_flash.cache_clear()


@pytest.mark.parametrize("grouped", [False, True])
def test_a_kernel_without_groups_serves_as_many_keys_as_queries(monkeypatch, packed, grouped):
    q, k, v = random_qkv(2, 4, 2 if grouped else 4, 20, 20)
    assert varlen.available(q, k, v, None)
    monkeypatch.setattr(varlen, "_grouped", lambda: False)
    assert varlen.available(q, k, v, None) != grouped


def test_what_the_kernel_cannot_do_goes_another_way(packed):
    q, k, v = random_qkv(2, 2, 2, 20, 20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    backend = ea.build("window", head_dim=8, window=5)
    assert (backend(q, k, v, key_mask=mask) - backend(q, k, v)).abs().max() <= 1e-12
    wide = torch.randn(1, 1, 20, 200, dtype=torch.float64)
    ea.build("window", head_dim=200, window=5)(wide, wide, wide)
    # Transforms of torch.func have no rule for the kernel.
    torch.func.vmap(lambda x: backend(x, x, x))(torch.randn(3, 1, 1, 20, 8, dtype=torch.float64))
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
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(varlen, "_has_flash", lambda device: True)
    monkeypatch.setattr(attention.cpu_flash, "_FORWARD", None)
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
