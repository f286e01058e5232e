"""The window by FlexAttention: its blocks, and its scores on the CPU, where it runs uncompiled."""

import pytest
import torch
from eager_flex import uncompiled_by_itself
from reference import first_and_second_derivatives, largest_difference, random_mask, random_qkv
from torch.nn.attention import flex_attention

import efficient_attn as ea
from efficient_attn.ops import naive, paths
from efficient_attn.ops.softmax import flex
from efficient_attn.ops.window import attention
from efficient_attn.ops.window import flex as window_flex

# Both sides of a window, at and around the edges of blocks of 128.
SIDES = [
    *[(0, 0), (1, 1), (127, 127), (128, 128), (129, 129), (254, 254), (300, 300)],
    *[(2, 0), (127, 0), (128, 0), (256, 0), (383, 0), (384, 0), (64, 400), (5000, 5000)],
]


def definition(*inputs, **options):
    return naive.softmax_attention(*inputs, scale=inputs[0].shape[-1] ** -0.5, **options)


def pairs(number, index, size):
    """How often each pair of blocks is listed, [size size]."""
    listed = torch.arange(index.shape[-1]) < number[0, 0, :, None]
    return torch.zeros(size, size).scatter_add_(1, index[0, 0].long(), listed.float())


@pytest.mark.parametrize(("back", "ahead"), SIDES)
@pytest.mark.parametrize("tokens", [5, 128, 129, 500])
def test_the_blocks_are_those_of_all_pairs_of_tokens(tokens, back, ahead):
    def visible(entry, head, query, key):
        return (key >= query - back) & (key <= query + ahead)

    torchs = flex_attention.create_block_mask(visible, 1, 1, tokens, tokens, device="cpu")
    size, cpu = -(-tokens // 128), torch.device("cpu")
    for sides, masked, whole in (
        ((back, ahead), torchs.as_tuple()[2:4], torchs.as_tuple()[4:6]),
        ((ahead, back), torchs.as_tuple()[6:8], torchs.as_tuple()[8:10]),
    ):
        listed = window_flex.blocks(tokens, *sides, whole=True, device=cpu)
        assert torch.equal(pairs(*listed[:2], size), pairs(*masked, size))
        assert torch.equal(pairs(*listed[2:], size), pairs(*whole, size))
        listed = window_flex.blocks(tokens, *sides, whole=False, device=cpu)
        assert torch.equal(pairs(*listed[:2], size), pairs(*masked, size) + pairs(*whole, size))
        assert listed[2:] == (None, None)


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
    ("window", "causal", "tokens"), [(1, False, 9), (257, False, 300), (2, True, 130), (257, True, 300)]
)
def test_the_window_and_its_gradients_equal_the_dense_band(uncompiled, tokens, window, causal, heads, masked):
    q, k, v = random_qkv(2, *heads, tokens, tokens, 16, 24)
    mask = random_mask(2, tokens) if masked else None
    if masked:
        # Rows of the second sequence see no key, and masked keys are NaN.
        mask[1, tokens // 3 :] = False
        k, v = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = ea.build("window", head_dim=16, window=window, causal=causal)(*inputs, key_mask=mask)
    expected = definition(*inputs, window=window, causal=causal, key_mask=mask)
    assert len(uncompiled) == 1
    assert largest_difference(out, expected, inputs) <= 1e-12


def test_second_derivatives_are_those_of_the_formula(uncompiled):
    inputs = [x.requires_grad_() for x in random_qkv(1, 2, 1, 20, 20, 16, 16)]
    calls = ea.build("window", head_dim=16, window=5), lambda *x: definition(*x, window=5)
    for actual, expected in zip(*(first_and_second_derivatives(x, inputs) for x in calls), strict=True):
        assert (actual - expected).abs().max() <= 1e-12 * expected.abs().max()


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


def test_operators_serve_what_is_not_compiled(uncompiled, monkeypatch):
    def refuse(*key):
        raise flex.NotCompiledError("no compiler")

    monkeypatch.setattr(window_flex, "_compiled", refuse)
    inputs = [x.requires_grad_() for x in random_qkv(1, 2, 2, 20, 20, 16, 16)]
    out = ea.build("window", head_dim=16, window=5)(*inputs)
    assert largest_difference(out, definition(*inputs, window=5), inputs) <= 1e-12
