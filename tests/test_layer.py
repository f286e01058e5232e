"""The attention layer: torch's own where exact, whose mask belongs to the keys, token by token."""

import pytest
import torch
from torch import Tensor, nn
from torch_peers import disturb

import efficient_attn as ea

DIM, HEADS, TOKENS, CONTEXT = 16, 4, 13, 9
SIZES = {
    "window": {"window": 5},
    "linformer": {"rank": 4},
    "performer-positive": {"num_features": 32},
    "performer-trig": {"num_features": 32},
    "performer-hyperbolic": {"num_features": 32},
    "performer-oprf": {"num_features": 32},
    "performer-full": {"num_features": 32},
}
# Entries of a layer's input, small so that signed features keep their denominators away from zero.
SCALE = 0.3


def options(name: str) -> dict[str, int]:
    return SIZES.get(name, {})


def sequence(tokens: int = TOKENS, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return SCALE * torch.randn(2, tokens, DIM, generator=generator, dtype=dtype)


def mask(tokens: int) -> Tensor:
    real = torch.ones(2, tokens, dtype=torch.bool)
    real[1, tokens // 2 :] = False
    return real


def layer(name: str = "exact", **arguments: object) -> ea.AttentionLayer:
    torch.manual_seed(0)
    made = ea.AttentionLayer(DIM, HEADS, name, max_tokens=TOKENS, **options(name), **arguments).double()
    ea.calibrate(made, sequence(seed=9))
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_exact_is_torchs_multihead_attention_with_the_same_state_dict(
    bias: bool, masked: bool, cross: bool
) -> None:
    theirs = nn.MultiheadAttention(DIM, HEADS, bias=bias, batch_first=True).double()
    disturb(theirs, seed=0)
    ours = layer(bias=bias)
    ours.load_state_dict(theirs.state_dict())
    x, context = sequence(), sequence(CONTEXT, seed=1) if cross else None
    keys = x if context is None else context
    key_mask = mask(keys.shape[1]) if masked else None
    padding = None if key_mask is None else ~key_mask
    expected, _ = theirs(x, keys, keys, key_padding_mask=padding, need_weights=False)
    torch.testing.assert_close(ours(x, context, key_mask=key_mask), expected, rtol=1e-12, atol=1e-12)


def test_causal_exact_is_torchs_multihead_attention_with_a_triangle() -> None:
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True).double()
    ours, x = layer(causal=True), sequence()
    ours.load_state_dict(theirs.state_dict())
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    expected, _ = theirs(x, x, x, attn_mask=later, need_weights=False)
    torch.testing.assert_close(ours(x), expected, rtol=1e-12, atol=1e-12)


def test_projections_begin_as_torchs_transformer_draws_them() -> None:
    torch.manual_seed(0)
    ours = ea.AttentionLayer(DIM, HEADS)
    for matrix in (ours.in_proj_weight, ours.out_proj.weight):
        bound = (6 / sum(matrix.shape)) ** 0.5
        assert 0.9 * bound < matrix.abs().max() <= bound
    assert not ours.in_proj_bias.any()
    assert not ours.out_proj.bias.any()


def test_few_key_heads_serve_groups_of_query_heads() -> None:
    few, all_heads = layer(num_kv_heads=2), layer()
    disturb(few, seed=1)
    q, k, v = few.in_proj_weight.split([DIM, DIM // 2, DIM // 2])
    bq, bk, bv = few.in_proj_bias.split([DIM, DIM // 2, DIM // 2])

    def twice(rows: Tensor) -> Tensor:
        """Rows of two heads, each head repeated for the second query head of its group."""
        return rows.unflatten(0, (2, -1)).repeat_interleave(2, dim=0).flatten(0, 1)

    with torch.no_grad():
        all_heads.in_proj_weight.copy_(torch.cat([q, twice(k), twice(v)]))
        all_heads.in_proj_bias.copy_(torch.cat([bq, twice(bk), twice(bv)]))
    all_heads.out_proj.load_state_dict(few.out_proj.state_dict())
    for context in (None, sequence(CONTEXT, seed=1)):
        expected = all_heads(sequence(), context)
        torch.testing.assert_close(few(sequence(), context), expected, rtol=1e-12, atol=1e-12)


# In Qwen3 and Gemma head_dim is not model_dim / num_heads either; the last two do not divide model_dim.
@pytest.mark.parametrize("heads", [(4, 2, 8), (3, 1, 10), (3, 3, 6)])
@pytest.mark.parametrize("cross", [False, True])
def test_heads_have_the_dim_that_is_given(heads: tuple[int, int, int], cross: bool) -> None:
    torch.manual_seed(0)
    num_heads, kv_heads, dim = heads
    ours = ea.AttentionLayer(DIM, num_heads, num_kv_heads=kv_heads, head_dim=dim, scale=0.2).double()
    disturb(ours, seed=1)
    x = sequence()
    keys = sequence(CONTEXT, seed=1) if cross else x
    sizes = [num_heads * dim, kv_heads * dim, kv_heads * dim]
    parts = zip(
        (x, keys, keys), ours.in_proj_weight.split(sizes), ours.in_proj_bias.split(sizes), strict=True
    )
    q, k, v = ((y @ weight.mT + bias).unflatten(-1, (-1, dim)).transpose(1, 2) for y, weight, bias in parts)
    k, v = (y.repeat_interleave(num_heads // kv_heads, dim=1) for y in (k, v))
    expected = ours.out_proj(((0.2 * q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
    got = ours(x, keys if cross else None)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in ea.list_backends() if ea.spec(n).capabilities.key_mask])
def test_a_masked_key_never_matters_to_real_tokens(name: str) -> None:
    ours, x, real = layer(name), sequence(), mask(TOKENS)
    expected = ours(x, key_mask=real)
    spoilt = x.masked_fill(~real[..., None], torch.nan)
    assert torch.equal(ours(spoilt, key_mask=real)[real], expected[real])


@pytest.mark.parametrize("name", [n for n in ea.list_backends() if ea.spec(n).capabilities.cross])
def test_the_mask_of_a_context_belongs_to_the_context(name: str) -> None:
    ours, x, context, real = layer(name), sequence(), sequence(CONTEXT, seed=1), mask(CONTEXT)
    spoilt = context.masked_fill(~real[..., None], torch.nan)
    assert torch.equal(ours(x, spoilt, key_mask=real), ours(x, context, key_mask=real))
    with pytest.raises(ea.ShapeError, match=r"key_mask .*belongs to the tokens of context.*\[2, 9\]"):
        ours(x, context, key_mask=mask(TOKENS))


@pytest.mark.parametrize("split", [(13,), (1,) * 13, (5, 1, 7), (0, 12, 1)])
@pytest.mark.parametrize("positions", [None, "rotary"])
@pytest.mark.parametrize("name", ea.list_backends(causal=True))
def test_a_layer_extended_at_any_split_gives_what_it_gives_at_once(
    name: str, positions: str | None, split: tuple[int, ...]
) -> None:
    ours, x, real = layer(name, causal=True, positions=positions), sequence(), mask(TOKENS)
    expected, state, parts, start = ours(x, key_mask=real), None, [], 0
    for tokens in split:
        part = slice(start, start + tokens)
        y, state = ours.extend(x[:, part], state, key_mask=real[:, part])
        parts.append(y)
        start += tokens
    error = (torch.cat(parts, dim=1) - expected).norm() / expected.norm()
    assert error < 1e-10
    assert state.tokens == TOKENS


@pytest.mark.parametrize("name", ea.list_backends())
def test_rotary_layers_know_how_far_tokens_are_apart_but_not_where_they_are(name: str) -> None:
    if name == "linformer":
        pytest.skip("its mixtures are made for positions and mix turned keys")
    ours, x = layer(name, positions="rotary"), sequence()
    turned, plain = ours(x), layer(name)(x)
    assert not torch.allclose(turned, plain)
    if ea.spec(name).capabilities.exact:
        # Masked tokens in front move all others without changing their differences.
        x = torch.cat([torch.zeros(2, 3, DIM).double(), x], dim=1)
        real = torch.arange(TOKENS + 3).expand(2, -1) >= 3
        torch.testing.assert_close(ours(x, key_mask=real)[:, 3:], turned, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ea.list_backends())
def test_gradients_reach_every_parameter_and_are_finite(name: str) -> None:
    ours, x = layer(name, positions="rotary"), sequence().requires_grad_()
    ours(x, key_mask=mask(TOKENS)).square().sum().backward()
    for leaf in (x, *ours.parameters()):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        assert leaf.grad.any()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_heads": 3}, ea.OptionError, "model_dim=16 is not divided by num_heads=3: give head_dim"),
        ({"num_kv_heads": 3}, ea.OptionError, "num_heads=4 is not divided by num_kv_heads=3"),
        ({"num_heads": 0}, ea.OptionError, "num_heads is at least 1"),
        ({"num_kv_heads": 0}, ea.OptionError, "num_kv_heads is at least 1"),
        ({"window": 3}, ea.UnknownNameError, "option of 'exact' is called 'window'"),
        ({"head_dim": 0}, ea.OptionError, "head_dim is at least 1"),
        ({"norm_eps": -1.0}, ea.OptionError, "norm_eps is a finite number above 0"),
        ({"backend": "linformer", "causal": True}, ea.UnsupportedError, "'linformer' cannot be causal"),
    ],
)
def test_layers_that_cannot_be_built_are_refused_in_one_line(
    arguments: dict, error: type, match: str
) -> None:
    with pytest.raises(error, match=match) as refusal:
        ea.AttentionLayer(**{"model_dim": DIM, "num_heads": HEADS, **arguments})
    assert "\n" not in str(refusal.value)


def test_inputs_that_do_not_fit_are_refused_in_one_line() -> None:
    ours, x = layer(), sequence()
    with pytest.raises(
        ea.ShapeError, match=r"x has shape \[13, 16\]; wanted is \[batch, tokens, model_dim=16\]"
    ):
        ours(x[0])
    with pytest.raises(ea.ShapeError, match=r"context has shape \[2, 13, 15\]"):
        ours(x, x[..., 1:])
    with pytest.raises(ea.DtypeError, match=r"x is torch.int64; wanted are embeddings"):
        ours(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ea.DtypeError, match=r"x is a torch tensor .*, not list"):
        ours([1.0])
    with pytest.raises(ea.ShapeError, match=r"key_mask has shape \[2, 9\] and belongs to the tokens of x"):
        ours(x, key_mask=mask(CONTEXT))
    with pytest.raises(ea.DtypeError, match=r"key_mask is bool .*int64"):
        ours(x, key_mask=mask(TOKENS).long())
    with pytest.raises(ea.UnsupportedError, match="extend needs a causal backend"):
        ours.extend(x)


def test_a_context_that_cannot_be_read_is_refused_in_one_line() -> None:
    x = sequence()
    with pytest.raises(ea.UnsupportedError, match="'window' cannot read another sequence"):
        layer("window")(x, x)
    with pytest.raises(ea.UnsupportedError, match=r"causal layer .* takes no context"):
        layer(causal=True)(x, x)
    with pytest.raises(ea.UnsupportedError, match="Rotary positions compare tokens of one sequence"):
        layer(positions="rotary")(x, x)
