"""The attention layer and its block: torch's where exact, heads of any size, positions, normed heads."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformer_modules import CONTEXT, DIM, HEADS, ROUNDING, TOKENS, build, disturb, mask, sequence

import efficient_attn as ea
from efficient_attn.transformer.positions import add_sinusoidal_positions


@pytest.mark.parametrize("bias", [True, False])
def test_exact_is_torchs_multihead_attention_with_the_same_state_dict(bias):
    theirs = nn.MultiheadAttention(DIM, HEADS, bias=bias, batch_first=True).double()
    disturb(theirs, seed=0)
    ours, causal = build(ea.AttentionLayer, bias=bias), build(ea.AttentionLayer, bias=bias, causal=True)
    ours.load_state_dict(theirs.state_dict())
    causal.load_state_dict(theirs.state_dict())
    x = sequence()
    for context, masked in product((None, sequence(CONTEXT, seed=1)), (False, True)):
        keys = x if context is None else context
        real = mask(keys.shape[1]) if masked else None
        padding = None if real is None else ~real
        expected, _ = theirs(x, keys, keys, key_padding_mask=padding, need_weights=False)
        torch.testing.assert_close(ours(x, context, key_mask=real), expected, **ROUNDING)
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    expected, _ = theirs(x, x, x, attn_mask=later, need_weights=False)
    torch.testing.assert_close(causal(x), expected, **ROUNDING)


def test_projections_begin_as_torchs_transformer_draws_them():
    layer = build(ea.AttentionLayer)
    for matrix in (layer.in_proj_weight, layer.out_proj.weight):
        bound = (6 / sum(matrix.shape)) ** 0.5
        assert 0.9 * bound < matrix.abs().max() <= bound
    assert not layer.in_proj_bias.any() and not layer.out_proj.bias.any()


# In Qwen3 and Gemma head_dim is not model_dim / num_heads either; the last two do not divide model_dim.
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim"), [(4, 2, 8), (3, 1, 10), (3, 3, 6)])
@pytest.mark.parametrize("context", [None, sequence(CONTEXT, seed=1)], ids=["self", "cross"])
def test_heads_of_any_size_and_groups_of_query_heads_are_the_formula(num_heads, kv_heads, head_dim, context):
    layer = ea.AttentionLayer(DIM, num_heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=0.2).double()
    disturb(layer, seed=1)
    x = sequence()
    inputs = (x, *(2 * [x if context is None else context]))
    sizes = [num_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    rows = zip(inputs, layer.in_proj_weight.split(sizes), layer.in_proj_bias.split(sizes), strict=True)
    q, k, v = ((y @ w.mT + bias).unflatten(-1, (-1, head_dim)).transpose(1, 2) for y, w, bias in rows)
    k, v = (y.repeat_interleave(num_heads // kv_heads, dim=1) for y in (k, v))
    expected = layer.out_proj(((0.2 * q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, context), expected, **ROUNDING)


def seen_by_the_backend(layer, *inputs):
    """q, k and v of a call."""
    seen = []
    with layer.backend.register_forward_pre_hook(lambda module, tensors: seen.append(tensors)):
        layer(*inputs)
    return seen[0]


@pytest.mark.parametrize("options", [{}, {"rotary_base": 500_000.0}, {"rotary_scaling": 4.0}])
def test_rotary_layers_rotate_queries_and_keys_by_the_published_angles(options):
    layer, x = build(ea.AttentionLayer, positions="rotary", **options), sequence()
    base, scaling = options.get("rotary_base", 1e4), options.get("rotary_scaling", 1.0)
    angles = torch.arange(TOKENS)[:, None] / scaling * base ** (-torch.arange(0, 8, 2).double() / 8)
    plain = seen_by_the_backend(build(ea.AttentionLayer), x)
    for turned, heads in zip(seen_by_the_backend(layer, x)[:2], plain, strict=False):
        pairs = torch.complex(*heads.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), dim=-1), **ROUNDING)


def test_normed_queries_and_keys_bound_the_scores_whatever_the_input():
    layer, x = build(ea.AttentionLayer, qk_norm=True, num_kv_heads=2), 1000 * sequence()
    for context in (None, 1000 * sequence(CONTEXT, seed=1)):
        for heads in seen_by_the_backend(layer, x, context)[:2]:
            torch.testing.assert_close(heads.square().mean(dim=-1), torch.ones(heads.shape[:-1]).double())


def test_sinusoidal_positions_are_the_formula_of_the_paper():
    rows = add_sinusoidal_positions(torch.zeros(40, 16, dtype=torch.float64), 3)
    for row, pos in enumerate(range(3, 43)):
        for i in range(8):
            angle = pos / 10000 ** (2 * i / 16)
            pair = rows[row, 2 * i : 2 * i + 2].tolist()
            assert pair == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-12)


@pytest.mark.parametrize("kind", [None, "sinusoidal", "learned", "rotary"])
def test_an_encoder_is_permutation_equivariant_only_without_positions(kind):
    encoder = build(ea.Encoder, positions=kind)
    for parameter in encoder.parameters():
        # Learned distances begin at zero, where they would be no positions.
        nn.init.normal_(parameter, std=0.5)
    x, order = sequence(), torch.randperm(TOKENS)
    equal = torch.allclose(encoder(x[:, order]), encoder(x)[:, order], rtol=0.0, atol=1e-10)
    assert equal is (kind is None)


@pytest.mark.parametrize(("activation", "gate"), [("swiglu", F.silu), ("geglu", F.gelu)])
def test_a_block_with_rms_norm_and_a_gated_network_is_its_formula(activation, gate):
    modern = {"activation": activation, "norm": "pre", "norm_type": "rms", "bias": False}
    block, x = build(ea.TransformerBlock, **modern), sequence()
    weights = [block.attention_residual.norm.weight, block.feed_forward_residual.norm.weight]
    for weight in weights:
        nn.init.uniform_(weight)

    def normed(x, weight):
        return x / (x.square().mean(dim=-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight

    network = block.feed_forward
    y = x + block.attention(normed(x, weights[0]))
    z = normed(y, weights[1])
    expected = y + (gate(z @ network.gate.weight.mT) * (z @ network.up.weight.mT)) @ network.down.weight.mT
    torch.testing.assert_close(block(x), expected, **ROUNDING)
    assert not any("bias" in name for name, _ in block.named_parameters())


@pytest.mark.parametrize(
    ("activation", "function"),
    [("gelu-tanh", lambda x: F.gelu(x, approximate="tanh")), ("silu", F.silu)],
)
def test_plain_networks_have_the_activation_of_their_name(activation, function):
    network, x = build(ea.TransformerBlock, activation=activation).feed_forward, sequence()
    torch.testing.assert_close(network(x), network.down(function(network.up(x))), **ROUNDING)
