"""The stacks: the base model's size, torch's own where exact, one draw a layer, token by token, trainable."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch_peers import copy_weights

import efficient_attn as ea

DIM, HEADS, WIDE, LAYERS, TOKENS, CONTEXT = 32, 4, 48, 2, 12, 7
SIZES = {
    "window": {"window": 5},
    "linformer": {"rank": 4},
    "performer-positive": {"num_features": 32},
    "performer-trig": {"num_features": 32},
    "performer-hyperbolic": {"num_features": 32},
    "performer-oprf": {"num_features": 32},
    "performer-full": {"num_features": 32},
}
SMALL = {"num_layers": LAYERS, "feed_forward_dim": WIDE, "max_tokens": TOKENS}
PERFORMERS = [name for name in ea.list_backends() if name.startswith("performer")]
# Post-norm stacks end in the norm of the last block; pre-norm ones have a norm of their own there.
NORMS = ["post", "pre"]


def sequence(tokens: int = TOKENS, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    # Small entries keep the denominators of signed features away from zero.
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(2, tokens, DIM, generator=generator, dtype=dtype)


def mask(tokens: int) -> Tensor:
    real = torch.ones(2, tokens, dtype=torch.bool)
    real[1, tokens // 2 :] = False
    return real


def encoder(name: str = "exact", **arguments: object) -> ea.Encoder:
    torch.manual_seed(0)
    made = ea.Encoder(DIM, HEADS, name, **{**SMALL, **SIZES.get(name, {}), **arguments}).double()
    ea.calibrate(made, sequence(seed=9))
    return made


def decoder(name: str = "exact", **arguments: object) -> ea.Decoder:
    torch.manual_seed(0)
    return ea.Decoder(DIM, HEADS, name, **{**SMALL, **SIZES.get(name, {}), **arguments}).double()


def transformer(name: str = "exact", **arguments: object) -> ea.Transformer:
    torch.manual_seed(0)
    made = ea.Transformer(DIM, HEADS, name, **{**SMALL, **SIZES.get(name, {}), **arguments}).double()
    ea.calibrate(made, sequence(CONTEXT, seed=9), sequence(seed=8))
    return made


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_base_model_has_its_44_million_parameters() -> None:
    base = ea.Transformer()
    assert num_parameters(base.encoder) == 18_914_304
    assert num_parameters(base.decoder) == 25_224_192
    assert num_parameters(base) == 44_138_496
    # A pre-norm stack ends in a norm of its own: a gain and a bias for each of 512 entries.
    assert num_parameters(ea.Encoder(norm="pre")) == 18_914_304 + 2 * 512


def torchs_transformer(norm: str, final_norm: bool) -> nn.Transformer:
    """Torch's own stacks, with or without a norm after the last block."""
    common = {"dropout": 0.0, "batch_first": True, "norm_first": norm == "pre"}
    ends = [nn.LayerNorm(DIM) if final_norm else None for _ in range(2)]
    encoder_layer = nn.TransformerEncoderLayer(DIM, HEADS, WIDE, **common)
    decoder_layer = nn.TransformerDecoderLayer(DIM, HEADS, WIDE, **common)
    return nn.Transformer(
        DIM,
        HEADS,
        custom_encoder=nn.TransformerEncoder(encoder_layer, LAYERS, ends[0], enable_nested_tensor=False),
        custom_decoder=nn.TransformerDecoder(decoder_layer, LAYERS, ends[1]),
        batch_first=True,
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_exact_stacks_are_torchs_transformer(norm: str, masked: bool, training: bool) -> None:
    theirs = torchs_transformer(norm, final_norm=norm == "pre")
    ours = ea.Transformer(DIM, HEADS, **SMALL, norm=norm, positions=None)
    copy_weights(theirs, ours)
    theirs.train(training), ours.train(training)
    source, target = sequence(CONTEXT, dtype=torch.float32), sequence(seed=1, dtype=torch.float32)
    real, target_real = (mask(CONTEXT), mask(TOKENS)) if masked else (None, None)
    with torch.set_grad_enabled(training):
        got = ours(source, target, source_mask=real, target_mask=target_real)
        expected = theirs(
            source,
            target,
            tgt_mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1),
            src_key_padding_mask=None if real is None else ~real,
            memory_key_padding_mask=None if real is None else ~real,
            tgt_key_padding_mask=None if target_real is None else ~target_real,
        )
    assert (got - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("final_norm", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_stacks_load_the_weights_of_torchs_and_give_its_outputs_bit_by_bit(
    norm: str, final_norm: bool
) -> None:
    theirs = torchs_transformer(norm, final_norm)
    common = {"norm": norm, "final_norm": final_norm, "positions": None}
    ours = ea.Encoder(DIM, HEADS, **SMALL, **common), ea.Decoder(DIM, HEADS, **SMALL, **common)
    for theirs_, ours_ in zip((theirs.encoder, theirs.decoder), ours, strict=True):
        copy_weights(theirs_, ours_)
    source, target = sequence(CONTEXT, dtype=torch.float32), sequence(seed=1, dtype=torch.float32)
    later = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    context = theirs.encoder(source)
    assert torch.equal(ours[0](source), context)
    assert torch.equal(ours[1](target, context), theirs.decoder(target, context, tgt_mask=later))


def test_a_decoder_without_cross_attention_loads_torchs_encoder() -> None:
    theirs, x = torchs_transformer("pre", final_norm=True).encoder, sequence(dtype=torch.float32)
    ours = ea.Decoder(DIM, HEADS, **SMALL, norm="pre", positions=None, cross_backend=None)
    copy_weights(theirs, ours)
    later = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    assert torch.equal(ours(x), theirs(x, mask=later, is_causal=True))


# Every backend, with positions inside it, and every kind of positions and norm around one backend.
@pytest.mark.parametrize(
    ("backend", "positions", "norm"),
    [(name, "rotary", "pre") for name in ea.list_backends(causal=True) if name != "exact"]
    + [
        ("exact", positions, norm)
        for positions in ("sinusoidal", "learned", "rotary", None)
        for norm in NORMS
    ],
)
def test_decoding_in_parts_gives_what_decoding_at_once_gives(
    backend: str, positions: str | None, norm: str
) -> None:
    ours = transformer(backend, positions=positions, norm=norm)
    source, target, real = sequence(CONTEXT, seed=1), sequence(), mask(CONTEXT)
    target_real = mask(TOKENS)
    expected = ours(source, target, source_mask=real, target_mask=target_real)
    for split in ((1,) * TOKENS, (5, 1, 6)):
        parts, state, start = [], None, 0
        for tokens in split:
            part = slice(start, start + tokens)
            given = {} if state else {"source": source, "source_mask": real}
            y, state = ours.extend(target[:, part], state, target_mask=target_real[:, part], **given)
            parts.append(y)
            start += tokens
        assert (torch.cat(parts, dim=1) - expected).norm() < 1e-10 * expected.norm()
        assert state.tokens == TOKENS


@pytest.mark.parametrize("name", ea.list_backends(causal=True))
def test_a_causal_encoder_is_a_language_model_that_extends(name: str) -> None:
    ours, x = encoder(name, causal=True, positions="rotary"), sequence()
    first, state = ours.extend(x[:, :5])
    # A state is never written to: it can be extended twice.
    for _ in range(2):
        second, _ = ours.extend(x[:, 5:], state)
        whole = torch.cat([first, second], dim=1)
        assert (whole - ours(x)).norm() < 1e-10 * whole.norm()


@pytest.mark.parametrize("name", ea.list_backends())
def test_gradients_of_a_transformer_are_finite_and_reach_every_parameter(name: str) -> None:
    causal = ea.spec(name).capabilities.causal
    ours = transformer(name, decoder_backend=None if causal else "exact")
    y = ours(sequence(CONTEXT, seed=1), sequence(), source_mask=mask(CONTEXT), target_mask=mask(TOKENS))
    y.pow(3).sum().backward()
    for parameter in ours.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()


def draws(module: nn.Module) -> list[Tensor]:
    return [value for key, value in module.state_dict().items() if key.endswith("projection")]


@pytest.mark.parametrize("name", PERFORMERS)
def test_every_layer_has_a_draw_of_its_own_that_the_seed_fixes(name: str) -> None:
    cross = {"cross_backend": name, "cross_options": SIZES[name]}
    once, again, other = (transformer(name, **cross, seed=seed) for seed in (3, 3, 4))
    # Two layers of the encoder, and two of the decoder with two attentions each.
    assert len(draws(once)) == 3 * LAYERS
    everything = [*draws(once), *draws(other)]
    assert all(torch.equal(one, same) for one, same in zip(draws(once), draws(again), strict=True))
    for i, one in enumerate(everything):
        assert not any(torch.equal(one, later) for later in everything[i + 1 :])


@pytest.mark.parametrize("name", PERFORMERS)
def test_a_deeper_stack_keeps_the_draws_of_its_first_layers(name: str) -> None:
    shallow, deep = encoder(name), encoder(name, num_layers=4)
    assert all(torch.equal(one, same) for one, same in zip(draws(shallow), draws(deep), strict=False))


def test_linformers_of_a_stack_share_one_projection_where_they_are_told_to() -> None:
    apart, shared = encoder("linformer", sharing="key-value"), encoder("linformer", sharing="layers")
    rank, one = SIZES["linformer"]["rank"], TOKENS * SIZES["linformer"]["rank"]
    assert num_parameters(apart) - num_parameters(shared) == (LAYERS - 1) * one
    mixing = [(key, x) for key, x in shared.state_dict().items() if key.endswith("mix_keys")]
    assert [key for key, _ in mixing] == ["blocks.0.attention.backend.core.mix_keys"]
    assert mixing[0][1].shape == (rank, TOKENS)


def test_a_shared_projection_learns_from_all_layers_and_survives_copying_moving_and_loading() -> None:
    shared = encoder("linformer", sharing="layers")
    other = encoder("linformer", sharing="layers", init="gaussian")
    copied = copy.deepcopy(shared).float().double()
    other.load_state_dict(shared.state_dict())
    for ours in (shared, copied, other):
        first, last = (ours.blocks[i].attention.backend.core for i in (0, -1))
        assert first.mix_keys is last.mix_keys
        assert first.mix_keys is not shared.blocks[0].attention.backend.core.mix_keys or ours is shared
    for ours in (copied, other):
        torch.testing.assert_close(ours(sequence()), shared(sequence()), rtol=1e-6, atol=1e-6)
    shared.blocks[-1](sequence()).pow(3).sum().backward()
    assert shared.blocks[0].attention.backend.core.mix_keys.grad.any()


def test_linformer_keeps_its_sharing_among_cross_attentions_too() -> None:
    options = {"rank": 4, "sharing": "layers"}
    ours = decoder(cross_backend="linformer", cross_options=options)
    assert sum(key.endswith("mix_keys") for key, _ in ours.named_parameters()) == 1
    assert ours(sequence(), sequence(CONTEXT)).shape == (2, TOKENS, DIM)


def test_dropout_of_a_stack_reaches_embeddings_and_every_residual_branch() -> None:
    ours = transformer(dropout=0.25)
    rates = [module.p for module in ours.modules() if isinstance(module, nn.Dropout)]
    # Two inputs of embeddings; two branches in an encoder's block and three in a decoder's.
    assert rates == [0.25] * (2 + 5 * LAYERS)
    ours.encoder.embedding_input.dropout.p = 1.0
    assert not ours.encoder.embedding_input(sequence()).any()
    source, target = sequence(CONTEXT), sequence()
    ours.eval()
    assert torch.equal(ours(source, target), transformer().eval()(source, target))


def test_without_positions_an_encoder_swaps_outputs_where_tokens_are_swapped() -> None:
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    x, blind = sequence(), encoder(positions=None)
    torch.testing.assert_close(blind(x[:, order]), blind(x)[:, order], rtol=1e-12, atol=1e-12)
    for positions in ("sinusoidal", "learned", "rotary"):
        seeing = encoder(positions=positions)
        assert not torch.allclose(seeing(x[:, order]), seeing(x)[:, order])


def test_a_backend_may_be_an_object_of_the_users() -> None:
    def mean_of_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.mean(dim=2, keepdim=True).expand(*q.shape[:3], -1)

    ours, x = encoder(mean_of_values, positions=None), sequence()
    assert ours(x).shape == x.shape
    with pytest.raises(ea.UnsupportedError, match="takes no key_mask"):
        ours(x, key_mask=mask(TOKENS))


@pytest.mark.parametrize("name", ea.list_backends(causal=True))
def test_a_stack_computes_in_bfloat16_and_under_autocast_near_what_it_computes_in_float64(name: str) -> None:
    ours, source, target = transformer(name, positions="rotary"), sequence(CONTEXT), sequence(seed=1)
    expected = ours(source, target)
    narrow = copy.deepcopy(ours).bfloat16()(source.bfloat16(), target.bfloat16())
    assert narrow.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        mixed = copy.deepcopy(ours).float()(source.float(), target.float())
    assert mixed.dtype == torch.float32
    # 2^-9 for each of the dozen roundings on the way through five residual branches of two layers.
    for got in (narrow, mixed):
        assert (got.double() - expected).norm() < 12 * 2**-9 * expected.norm()


@pytest.mark.parametrize("stack", [decoder, transformer])
def test_a_decoder_refuses_a_backend_that_cannot_be_causal_in_one_line(stack: object) -> None:
    with pytest.raises(ea.UnsupportedError, match=r"'linformer' cannot be causal.*exact.*window") as refusal:
        stack("linformer")
    assert "\n" not in str(refusal.value)


def test_contexts_that_do_not_fit_the_decoder_are_refused_in_one_line() -> None:
    x, context = sequence(), sequence(CONTEXT)
    with pytest.raises(ea.UnsupportedError, match="context was given to a decoder without cross-attention"):
        decoder(cross_backend=None)(x, context)
    with pytest.raises(ea.OptionError, match="was given no context"):
        decoder()(x)
    with pytest.raises(ea.OptionError, match="extend needs the source in its first call"):
        transformer().extend(x)
    with pytest.raises(ea.OptionError, match="give a cross_backend"):
        transformer(cross_backend=None)


def test_masks_of_the_wrong_side_are_refused_in_one_line() -> None:
    source, target, ours = sequence(CONTEXT), sequence(), transformer()
    with pytest.raises(ea.ShapeError, match=r"source_mask has shape \[2, 12\] .* tokens of source.*\[2, 7\]"):
        ours(source, target, source_mask=mask(TOKENS))
    with pytest.raises(ea.ShapeError, match=r"target_mask has shape \[2, 7\] .* tokens of target.*\[2, 12\]"):
        ours(source, target, target_mask=mask(CONTEXT))
    with pytest.raises(ea.ShapeError, match=r"context_mask has shape \[2, 12\] .* tokens of context"):
        decoder()(target, source, context_mask=mask(TOKENS))


def test_what_is_no_stack_or_no_embedding_is_refused_in_one_line() -> None:
    with pytest.raises(ea.OptionError, match="num_layers is at least 1"):
        encoder(num_layers=0)
    with pytest.raises(ea.OptionError, match="dropout is at least 0 and below 1"):
        encoder(dropout=1.0)
    with pytest.raises(ea.DtypeError, match="seed is a whole number"):
        encoder(seed=0.5)
    with pytest.raises(ea.DtypeError, match=r"x is torch.int64; wanted are embeddings .*model_dim=32"):
        encoder()(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ea.UnsupportedError, match="extend needs a causal backend"):
        encoder().extend(sequence())


@pytest.mark.parametrize("kind", [ea.Encoder, ea.Decoder, ea.Transformer])
def test_norms_of_a_stack_have_the_epsilon_that_it_was_given(kind: type[nn.Module]) -> None:
    for norm_type in ("layer", "rms"):
        common = {"norm": "pre", "norm_type": norm_type, "qk_norm": True}
        ours = kind(DIM, HEADS, **SMALL, **common, norm_eps=1e-3)
        norms = [module for module in ours.modules() if isinstance(module, (nn.LayerNorm, nn.RMSNorm))]
        assert len(norms) > 4 * LAYERS and {module.eps for module in norms} == {1e-3}
    with pytest.raises(ea.OptionError, match="norm_eps is a finite number above 0"):
        kind(DIM, HEADS, **SMALL, norm_eps=0.0)


@pytest.mark.parametrize(
    "make",
    [
        ea.Encoder,
        ea.Decoder,
        ea.Transformer,
        lambda *sizes, max_tokens, feed_forward_dim, **rest: ea.LanguageModel(*sizes, **rest),
    ],
    ids=["encoder", "decoder", "transformer", "language model"],
)
def test_stacks_are_built_in_a_dtype_and_on_a_device(make: object) -> None:
    ours = make(
        DIM, HEADS, "performer-positive", num_features=8, **SMALL, device="meta", dtype=torch.bfloat16
    )
    assert {x.device.type for x in (*ours.parameters(), *ours.buffers())} == {"meta"}
    # Random features stay in float32.
    assert {x.dtype for x in ours.parameters()} == {torch.bfloat16}


MISSPELT = [
    (lambda **more: ea.Encoder(DIM, HEADS, **more), "num_layer", "Encoder", "num_layers"),
    (lambda **more: ea.Decoder(DIM, HEADS, **more), "cross_backnd", "Decoder", "cross_backend"),
    (lambda **more: ea.Transformer(DIM, HEADS, **more), "decoder_backnd", "Transformer", "decoder_backend"),
    (
        lambda **more: ea.LanguageModel(DIM, HEADS, num_layers=2, **more),
        "vocab",
        "LanguageModel",
        "vocabulary",
    ),
    (
        lambda **more: ea.Encoder(DIM, HEADS, ["exact", "window"], num_layers=2, **more),
        "windw",
        "Encoder",
        "window",
    ),
    (
        lambda **more: ea.TransformerBlock(DIM, HEADS, feed_forward_dim=WIDE, **more),
        "norm_kind",
        "TransformerBlock",
        "norm_type",
    ),
    (lambda **more: ea.AttentionLayer(DIM, HEADS, **more), "qk_nrm", "AttentionLayer", "qk_norm"),
]


@pytest.mark.parametrize(("make", "misspelt", "kind", "meant"), MISSPELT)
def test_an_argument_that_a_stack_lacks_is_refused_with_the_arguments_of_the_stack(
    make: object, misspelt: str, kind: str, meant: str
) -> None:
    with pytest.raises(
        ea.UnknownNameError, match=f"No argument of {kind} or option of 'exact'.*'{misspelt}'"
    ) as refusal:
        make(**{misspelt: 2})
    known = str(refusal.value).partition("Known: ")[2].rstrip(".").split(", ")
    assert {meant, "head_dim", "max_distance"} <= set(known)
