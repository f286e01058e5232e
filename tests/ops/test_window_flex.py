"""The window by FlexAttention: its blocks, and its scores on the CPU, where it runs uncompiled."""

import pytest
import torch
from eager_flex import uncompiled_by_itself
from reference import random_mask, random_qkv
from test_window import dense_band
from torch.nn.attention import flex_attention

import efficient_attn as ea
from efficient_attn.ops import paths
from efficient_attn.ops.softmax import flex
from efficient_attn.ops.window import attention
from efficient_attn.ops.window import flex as window_flex

# Both sides of a window, at and around the edges of blocks of 128.
SIDES = [
    *[(0, 0), (1, 1), (127, 127), (128, 128), (129, 129), (254, 254), (300, 300)],
    *[(2, 0), (127, 0), (128, 0), (256, 0), (383, 0), (384, 0), (64, 400), (5000, 5000)],
]


def pairs(number, index, size):
    """How often each pair of blocks is listed, [size size]."""
    listed = torch.arange(index.shape[-1]) < number[0, 0, :, None]
    return torch.zeros(size, size).scatter_add_(1, index[0, 0].long(), listed.float())


@pytest.mark.parametrize(("back", "ahead"), SIDES)
@pytest.mark.parametrize("tokens", [1, 5, 127, 128, 129, 384, 500])
def test_the_blocks_are_those_of_all_pairs_of_tokens(tokens, back, ahead):
    def visible(entry, head, query, key):
        return (key >= query - back) & (key <= query + ahead)

    made = flex_attention.create_block_mask(visible, 1, 1, tokens, tokens, device="cpu")
    size, cpu = -(-tokens // 128), torch.device("cpu")
    for sides, masked, whole in (
        ((back, ahead), made.as_tuple()[2:4], made.as_tuple()[4:6]),
        ((ahead, back), made.as_tuple()[6:8], made.as_tuple()[8:10]),
    ):
        found = window_flex.blocks(tokens, *sides, whole=True, device=cpu)
        assert torch.equal(pairs(*found[:2], size), pairs(*masked, size))
        assert torch.equal(pairs(*found[2:], size), pairs(*whole, size))
        found = window_flex.blocks(tokens, *sides, whole=False, device=cpu)
        assert torch.equal(pairs(*found[:2], size), pairs(*masked, size) + pairs(*whole, size))
        assert found[2:] == (None, None)


def test_a_million_tokens_have_a_few_blocks_for_each_query():
    found = window_flex.blocks(2**20, 128, 128, whole=True, device=torch.device("cpu"))
    assert [x.shape[2:] for x in found] == [(8192,), (8192, 4)] * 2
    assert (found[0][0, 0, 1:-1] == 2).all() and (found[2] == 1).all()


@pytest.fixture
def uncompiled(monkeypatch):
    """Keys of the configurations that are served on the CPU, in any dtype and with gradients."""
    keys = []

    def compiled(*key):
        keys.append(key)
        return window_flex._attention

    monkeypatch.setattr(window_flex, "_compiled", compiled)
    monkeypatch.setattr(paths, "kernels", lambda device, dtype: "flex")
    monkeypatch.setattr(attention.cpu_flash, "_FORWARD", None)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    with uncompiled_by_itself():
        yield keys


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize(
    ("window", "causal", "tokens"),
    [
        *[(1, False, 9), (3, False, 130), (257, False, 300)],
        *[(1, True, 9), (2, True, 130), (257, True, 300)],
    ],
)
def test_the_window_and_its_gradients_equal_the_dense_band(uncompiled, tokens, window, causal, heads, masked):
    inputs = [x.requires_grad_() for x in random_qkv(2, *heads, tokens, tokens, 16, 24)]
    mask = random_mask(2, tokens) if masked else None
    out = ea.build("window", head_dim=16, window=window, causal=causal)(*inputs, key_mask=mask)
    reference = dense_band(*inputs, window, causal, mask)
    given = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, inputs, given) for x in (out, reference))
    assert len(uncompiled) == 1
    for one, other in zip((out, *found), (reference, *wanted), strict=True):
        assert (one - other).abs().max() <= 1e-12 * max(1.0, other.abs().max())


def test_rows_without_a_key_give_zeros_and_masked_keys_may_be_nan(uncompiled):
    q, k, v = random_qkv(1, 2, 2, 300, 300, 16, 16)
    mask = torch.ones(1, 300, dtype=torch.bool)
    mask[:, 100:240] = False
    k[:, :, 100:240] = v[:, :, 100:240] = torch.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = ea.build("window", head_dim=16, window=33)(*inputs, key_mask=mask)
    assert (out[:, :, 116:224] == 0).all() and (out[:, :, 115] != 0).any() and out.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), inputs)) and len(uncompiled) == 1


def test_second_derivatives_are_those_of_the_formula(uncompiled):
    def derivatives(call):
        first = torch.autograd.grad(call(*inputs).sin().sum(), inputs, create_graph=True)
        return *first, *torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    inputs = [x.requires_grad_() for x in random_qkv(1, 2, 1, 20, 20, 16, 16)]
    wanted = derivatives(lambda *x: dense_band(*x, 5, False, None))
    for one, other in zip(derivatives(ea.build("window", head_dim=16, window=5)), wanted, strict=True):
        assert (one - other).abs().max() <= 1e-12 * other.abs().max()


def test_a_configuration_does_not_depend_on_the_length(uncompiled):
    backend = ea.build("window", head_dim=16, window=257)
    for tokens in (5, 20, 300):
        inputs = [x.requires_grad_() for x in random_qkv(1, 2, 2, tokens, tokens, 16, 16)]
        backend(*inputs)
        with torch.no_grad():
            backend(*inputs)
        # The marks of a compiler do not reach the tensors of the caller.
        assert not any(hasattr(x, "_dynamo_weak_dynamic_indices") for x in inputs)
    assert len(uncompiled) == 4 and len(set(uncompiled)) == 1


def test_the_marks_of_a_compiler_do_not_reach_the_mask_of_the_caller(uncompiled):
    mask = torch.ones(1, 20, dtype=torch.bool)
    ea.build("window", head_dim=16, window=5)(*random_qkv(1, 2, 2, 20, 20, 16, 16), key_mask=mask)
    assert len(uncompiled) == 1 and not hasattr(mask, "_dynamo_weak_dynamic_indices")


def test_past_tokens_transforms_and_exported_programs_go_another_way(uncompiled):
    q, k, v = random_qkv(1, 2, 2, 5, 20, 16, 16)
    causal = ea.build("window", head_dim=16, window=4, causal=True)
    causal(q, k, v)
    torch.func.vmap(lambda x: causal(x, x, x))(k[None])
    program = torch.export.export(ea.build("window", head_dim=16, window=5), (k, k, k))
    assert not any("flex" in str(node.target) for node in program.graph.nodes)
    assert not uncompiled


def test_operators_serve_what_is_not_compiled(uncompiled, monkeypatch):
    def refuse(*key):
        raise flex.NotCompiledError("no compiler")

    monkeypatch.setattr(window_flex, "_compiled", refuse)
    inputs = [x.requires_grad_() for x in random_qkv(1, 2, 2, 20, 20, 16, 16)]
    out = ea.build("window", head_dim=16, window=5)(*inputs)
    reference = dense_band(*inputs, 5, False, None)
    assert (out - reference).abs().max() <= 1e-12
    found, wanted = (torch.autograd.grad(x.sum(), inputs)[0] for x in (out, reference))
    assert (found - wanted).abs().max() <= 1e-12
