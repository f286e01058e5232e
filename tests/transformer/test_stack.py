"""Blocks and stacks: torch's where exact, trainable, decoded in parts, with a draw for each layer."""

import copy

import pytest
import torch
from torch import nn
from transformer_modules import CONTEXT, DIM, HEADS, LAYERS, STACK, TOKENS, build, mask, options, sequence

import efficient_attn as ea

# Without parameters, with random features, and with learned ones; each backend has its own checks.
CAUSAL = ("exact", "window", "performer-positive", "linear-hedgehog")


def backends_of(module):
    return [part for part in module.modules() if isinstance(part, ea.Backend)]


def test_the_base_model_has_its_44_million_parameters():
    base = ea.Transformer(device="meta")
    # A pre-norm stack ends in its final norm: a gain and a bias for each of 512 entries.
    stacks = (base.encoder, base.decoder, ea.Encoder(norm="pre", device="meta"))
    sizes = [sum(parameter.numel() for parameter in stack.parameters()) for stack in stacks]
    assert sizes == [18_914_304, 25_224_192, 18_914_304 + 2 * 512]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("final_norm", [False, True])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_exact_stacks_load_weights_of_torchs_transformer_and_give_its_outputs(norm, final_norm, activation):
    torchs = {"activation": activation, "batch_first": True, "norm_first": norm == "pre"}
    theirs = nn.Transformer(DIM, HEADS, LAYERS, LAYERS, STACK["feed_forward_dim"], 0.0, **torchs)
    theirs.encoder.use_nested_tensor = False
    if not final_norm:
        theirs.encoder.norm = theirs.decoder.norm = None
    common = {"norm": norm, "final_norm": final_norm, "activation": activation, "positions": None}
    ours = ea.Transformer(DIM, HEADS, **STACK, **common)
    # No bias is 0 and no norm is 1.
    noisy = {name: x + 0.05 * torch.randn_like(x) for name, x in theirs.state_dict().items()}
    theirs.load_state_dict(noisy)
    ours.load_state_dict(theirs.state_dict())
    source, target = sequence(CONTEXT, dtype=torch.float32), sequence(seed=1, dtype=torch.float32)
    later = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    assert torch.equal(ours(source, target), theirs(source, target, tgt_mask=later))
    real, target_real = mask(CONTEXT), mask(TOKENS)
    padding = {f"{name}_key_padding_mask": ~real for name in ("src", "memory")}
    padding["tgt_key_padding_mask"] = ~target_real
    for training in (True, False):
        theirs.train(training), ours.train(training)
        with torch.set_grad_enabled(training):
            output = ours(source, target, source_mask=real, target_mask=target_real)
            expected = theirs(source, target, tgt_mask=later.bool(), **padding)
        assert (output - expected).norm() < 1e-6 * expected.norm()
    alone = ea.Decoder(DIM, HEADS, **STACK, **common, cross_backend=None)
    alone.load_state_dict(theirs.encoder.state_dict())
    expected = theirs.encoder(target, mask=later, is_causal=True)
    torch.testing.assert_close(alone(target), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*CAUSAL, "linformer", "performer-full"])
def test_a_backend_changes_nothing_but_the_attention_and_all_parameters_learn(name):
    cross = name if ea.spec(name).capabilities.cross else "exact"
    arguments = {"cross_backend": cross, "cross_options": options(cross)}
    if not ea.spec(name).capabilities.causal:
        arguments["decoder_backend"] = "exact"
    model = build(ea.Transformer, name, **arguments)
    exact, state = build(ea.Transformer), model.state_dict()
    assert all(torch.equal(x, state[key]) for key, x in exact.state_dict().items() if "weight" in key)
    missing, unexpected = model.load_state_dict(exact.state_dict(), strict=False)
    assert unexpected == [] and all(".backend." in key for key in missing)
    source, target, real = sequence(CONTEXT, seed=1), sequence(), mask(CONTEXT)
    y = model(source, target, source_mask=real, target_mask=mask(TOKENS))
    # A plain sum would be constant: the last norm takes the sum of every token's entries away.
    y.pow(3).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any()
    assert not torch.allclose(model(sequence(CONTEXT, seed=2), target), model(source, target))


# Heads that are wider than the model, as in Qwen3.
WIDE_HEADS = {"head_dim": 16, "num_kv_heads": 2, "qk_norm": True, "positions": "rotary"}


# All backends, with positions inside, and all kinds of positions and norm around exact attention.
@pytest.mark.parametrize(
    ("backend", "arguments"),
    [
        *((name, {"positions": "rotary", "norm": "pre"}) for name in CAUSAL),
        *(("exact", {"positions": positions}) for positions in ("sinusoidal", "learned", None)),
        ("exact", WIDE_HEADS),
    ],
)
def test_decoding_in_parts_gives_what_decoding_at_once_gives(backend, arguments):
    ours = build(ea.Transformer, backend, **arguments)
    source, target, real, target_real = sequence(CONTEXT, seed=1), sequence(), mask(CONTEXT), mask(TOKENS)
    expected = ours(source, target, source_mask=real, target_mask=target_real)
    for split in ((1,) * TOKENS, (5, 0, 1, 6)):
        parts, state, start = [], None, 0
        for tokens in split:
            part = slice(start, start + tokens)
            read = {} if state else {"source": source, "source_mask": real}
            y, state = ours.extend(target[:, part], state, target_mask=target_real[:, part], **read)
            parts.append(y)
            start += tokens
        assert (torch.cat(parts, dim=1) - expected).norm() < 1e-10 * expected.norm()
        assert state.tokens == TOKENS


def test_each_layer_has_a_draw_that_the_seed_and_its_number_fix():
    name = "performer-positive"
    cross = {"cross_backend": name, "cross_options": options(name)}

    def draws(**arguments):
        parts = build(ea.Transformer, name, **cross, **arguments).state_dict().items()
        return {key: value for key, value in parts if key.endswith("projection")}

    first, again, other, deep = draws(seed=3), draws(seed=3), draws(seed=4), draws(seed=3, num_layers=4)
    # Two layers of the encoder, and two of the decoder with two attentions each.
    assert len(first) == 3 * LAYERS
    assert all(torch.equal(draw, again[key]) and torch.equal(draw, deep[key]) for key, draw in first.items())
    everything = (*first.values(), *other.values())
    assert len({tuple(draw.flatten().tolist()) for draw in everything}) == 6 * LAYERS


@pytest.mark.parametrize("backend", ["linformer", ["exact", ("linformer", {"rank": 4, "sharing": "layers"})]])
def test_linformers_share_one_projection_where_they_are_told_to_and_keep_it_in_copies(backend):
    sharing = {"sharing": "layers"} if backend == "linformer" else {}
    shared = build(ea.Encoder, backend, **sharing, num_layers=4)
    again = build(ea.Encoder, backend, **sharing, num_layers=4)
    nn.init.normal_(next(x for name, x in again.named_parameters() if "mix_keys" in name))
    copied = copy.deepcopy(shared).float().double()
    again.load_state_dict(shared.state_dict())
    for stack in (shared, copied, again):
        cores = [part.core for part in backends_of(stack) if part.spec.name == "linformer"]
        assert len(cores) >= 2 and len({id(core) for core in cores}) == 1
        assert sum("mix_keys" in name for name in stack.state_dict()) == 1
        torch.testing.assert_close(stack(sequence()), shared(sequence()), rtol=1e-6, atol=1e-6)
    shared.blocks[-1](sequence()).pow(3).sum().backward()
    assert cores[0] is not backends_of(shared)[-1].core and backends_of(shared)[-1].core.mix_keys.grad.any()


def test_cross_attentions_share_their_projection_and_have_a_longest_context():
    shared = {"rank": 4, "sharing": "layers", "max_tokens": 40}
    ours = build(ea.Decoder, cross_backend="linformer", cross_options=shared)
    assert sum(key.endswith("mix_keys") for key, _ in ours.named_parameters()) == 1
    assert ours(sequence(), sequence(40)).shape == (2, TOKENS, DIM)


def test_dropout_reaches_embeddings_and_residual_branches_and_never_attention_weights():
    ours = build(ea.Transformer, dropout=0.25)
    dropouts = [module for module in ours.modules() if isinstance(module, nn.Dropout)]
    # Two inputs of embeddings; two branches in an encoder's block and three in a decoder's.
    assert [module.p for module in dropouts] == [0.25] * (2 + 5 * LAYERS)
    assert {part.options.dropout for part in backends_of(ours)} == {0.0}
    block, x = build(ea.TransformerBlock, norm="pre", dropout=0.5), sequence()
    for module in (*dropouts, block.attention_residual.dropout, block.feed_forward_residual.dropout):
        module.p = 1.0
    assert not ours.encoder.embedding_input(x).any()
    assert torch.equal(block(x), x)
    source, target = sequence(CONTEXT), sequence()
    assert torch.equal(ours.eval()(source, target), build(ea.Transformer).eval()(source, target))


@pytest.mark.parametrize("name", CAUSAL)
def test_a_stack_computes_in_bfloat16_and_under_autocast_near_what_it_computes_in_float64(name):
    ours = build(ea.Transformer, name, positions="rotary")
    source, target = sequence(CONTEXT), sequence(seed=1)
    expected = ours(source, target)
    narrow = copy.deepcopy(ours).bfloat16()(source.bfloat16(), target.bfloat16())
    assert narrow.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        mixed = copy.deepcopy(ours).float()(source.float(), target.float())
    assert mixed.dtype == torch.float32
    # 2^-9 for each of the dozen roundings on the way through five residual branches of two layers.
    for output in (narrow, mixed):
        assert (output.double() - expected).norm() < 12 * 2**-9 * expected.norm()


@pytest.mark.parametrize("norm_type", ["layer", "rms"])
def test_norms_of_a_stack_have_its_epsilon(norm_type):
    heads = {"qk_norm": True, "cross_options": {"qk_norm": True}}
    ours = build(ea.Transformer, norm="pre", norm_type=norm_type, norm_eps=1e-3, **heads)
    norms = [module for module in ours.modules() if isinstance(module, (nn.LayerNorm, nn.RMSNorm))]
    # Two norms, or three, and two of queries and keys for each attention; at last the norms of both stacks.
    assert len(norms) == 11 * LAYERS + 2 and {module.eps for module in norms} == {1e-3}


@pytest.mark.parametrize("kind", [ea.Transformer, ea.LanguageModel])
def test_stacks_are_built_in_a_dtype_and_on_a_device(kind):
    place = {"device": "meta", "dtype": torch.bfloat16}
    ours = kind(DIM, HEADS, "performer-positive", num_features=8, num_layers=LAYERS, **place)
    assert {x.device.type for x in (*ours.parameters(), *ours.buffers())} == {"meta"}
    # Random features stay in float32.
    assert {x.dtype for x in ours.parameters()} == {torch.bfloat16}


def test_a_list_of_backends_is_repeated_over_the_layers():
    linear = ("performer-positive", {"num_features": 16})
    for stack in (
        ea.Encoder(DIM, HEADS, [linear, "exact"], num_layers=4),
        ea.Decoder(DIM, HEADS, [linear, "exact"], num_layers=4, cross_backend=None),
        ea.LanguageModel(DIM, HEADS, [linear, "exact"], num_layers=4),
    ):
        backends = backends_of(stack)
        assert [part.spec.name for part in backends] == 2 * ["performer-positive", "exact"]
        assert backends[0].options.seed != backends[2].options.seed


@pytest.mark.parametrize("kind", [ea.Encoder, ea.Decoder])
def test_checkpoints_keep_gradients_and_recompute_activations(kind):
    stack = build(kind, "performer-positive", dropout=0.1)
    x = sequence().requires_grad_()
    inputs = (x,) if kind is ea.Encoder else (x, sequence(CONTEXT))
    gradients, calls = [], []
    stack.blocks[0].feed_forward.register_forward_hook(lambda *args: calls.append(1))
    for stack.checkpoint in (False, True):
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(stack(*inputs).square().sum(), [x, *stack.parameters()]))
    for direct, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(direct, recomputed)
    assert len(calls) == 3
    with torch.no_grad():
        stack(*inputs)
    assert len(calls) == 4


@pytest.mark.compile
@pytest.mark.parametrize("name", ["exact", "performer-positive", "linformer"])
def test_a_compiled_block_gives_the_same_output_and_gradients(name):
    torch._dynamo.reset()
    ours = build(ea.TransformerBlock, name, causal=name != "linformer", positions="rotary")
    x = sequence()

    def results(call):
        y = call(x)
        return [y.detach(), *torch.autograd.grad(y.pow(3).sum(), list(ours.parameters()))]

    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for output, expected in zip(results(compiled), results(ours), strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
