"""The block as it is built today: RMS norm, gated networks, QK norm, rotary options, lists of backends."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import efficient_attn as ea
from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.transformer.positions import rotate

DIM, HEADS, WIDE, TOKENS = 32, 4, 48, 10
SMALL = {"num_layers": 4, "feed_forward_dim": WIDE}


def sequence(tokens: int = TOKENS, *, seed: int = 0) -> Tensor:
    return torch.randn(2, tokens, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight


@pytest.mark.parametrize(("activation", "gate"), [("swiglu", F.silu), ("geglu", F.gelu)])
def test_a_block_with_rms_norm_and_a_gated_network_is_its_formula(activation, gate):
    torch.manual_seed(0)
    block = ea.TransformerBlock(
        DIM, HEADS, feed_forward_dim=WIDE, activation=activation, norm="pre", norm_type="rms", bias=False
    ).double()
    for one in (block.attention_residual.norm, block.feed_forward_residual.norm):
        nn.init.uniform_(one.weight)
    x, network = sequence(), block.feed_forward
    y = x + block.attention(norm(x, block.attention_residual.norm.weight))
    z = norm(y, block.feed_forward_residual.norm.weight)
    expected = y + (gate(z @ network.gate.weight.mT) * (z @ network.up.weight.mT)) @ network.down.weight.mT
    torch.testing.assert_close(block(x), expected, rtol=1e-12, atol=1e-12)
    assert not any("bias" in name for name, _ in block.named_parameters())


@pytest.mark.parametrize(
    ("activation", "function"),
    [("gelu-tanh", lambda x: F.gelu(x, approximate="tanh")), ("silu", F.silu)],
)
def test_plain_networks_have_the_activation_of_their_name(activation, function):
    torch.manual_seed(0)
    block = ea.TransformerBlock(DIM, HEADS, feed_forward_dim=WIDE, activation=activation).double()
    network, x = block.feed_forward, sequence()
    torch.testing.assert_close(network(x), network.down(function(network.up(x))), rtol=1e-12, atol=1e-12)


def test_normed_queries_and_keys_bound_the_scores_whatever_the_input():
    torch.manual_seed(0)
    layer = ea.AttentionLayer(DIM, HEADS, qk_norm=True, num_kv_heads=2).double()
    x, seen = 1000 * sequence(), []
    layer.backend.register_forward_pre_hook(lambda module, tensors: seen.append(tensors))
    layer(x), layer(x, 1000 * sequence(7, seed=1))
    for q, k, _ in seen:
        for one in (q, k):
            torch.testing.assert_close(one.square().mean(dim=-1), torch.ones(one.shape[:-1]).double())
    plain = ea.AttentionLayer(DIM, HEADS, num_kv_heads=2).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    assert {*layer.state_dict()} - {*plain.state_dict()} == {"q_norm.weight", "k_norm.weight"}


@pytest.mark.parametrize("options", [{"rotary_base": 500_000.0}, {"rotary_scaling": 4.0}])
def test_rotary_options_change_the_angles_as_published(options):
    x = torch.randn(1, 1, 9, 8, dtype=torch.float64)
    base, scaling = options.get("rotary_base", 1e4), options.get("rotary_scaling", 1.0)
    angles = torch.arange(9.0).double()[:, None] / scaling * base ** (-torch.arange(0, 8, 2).double() / 8)
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((pairs.real, pairs.imag), dim=-1)
    torch.testing.assert_close(rotate(x, 0, base=base, scaling=scaling), expected, rtol=1e-12, atol=1e-12)
    torch.manual_seed(0)
    layer = ea.AttentionLayer(DIM, HEADS, positions="rotary", **options).double()
    seen = []
    layer.backend.register_forward_pre_hook(lambda module, tensors: seen.append(tensors))
    y = sequence()
    layer(y)
    q = layer._split(F.linear(y, layer.in_proj_weight, layer.in_proj_bias))[:, :HEADS]
    assert torch.equal(seen[0][0], rotate(q, 0, base=base, scaling=scaling))


def test_interpolated_positions_have_the_angles_of_the_trained_length():
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, 4096, scaling=4.0), rotate(x, 1024))


def test_a_list_of_backends_is_repeated_over_the_layers():
    linear = ("performer-positive", {"num_features": 16})
    encoder = ea.Encoder(
        DIM, HEADS, [linear, linear, linear, "exact"], **{**SMALL, "num_layers": 8}, causal=True
    )
    names = [block.attention.backend.spec.name for block in encoder.blocks]
    assert names == [*3 * ["performer-positive"], "exact", *3 * ["performer-positive"], "exact"]
    linears = [
        block.attention.backend
        for block in encoder.blocks
        if "performer" in block.attention.backend.spec.name
    ]
    assert len({backend.options.seed for backend in linears}) == 6
    decoder = ea.Decoder(DIM, HEADS, [linear, "exact"], **SMALL, cross_backend=None)
    assert [block.attention.backend.spec.name for block in decoder.blocks] == [
        "performer-positive",
        "exact",
    ] * 2
    model = ea.LanguageModel(DIM, HEADS, [linear, "window"], num_layers=2, vocabulary=11)
    ids = torch.randint(11, (1, 6))
    direct, (streamed, _) = model(ids), model.extend(ids)
    torch.testing.assert_close(direct, streamed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", ["rotary", "relative"])
def test_heads_of_a_stack_may_be_wider_than_its_model(positions):
    torch.manual_seed(0)
    stack = ea.Encoder(
        DIM, 3, **SMALL, num_kv_heads=1, head_dim=16, qk_norm=True, positions=positions, causal=True
    ).double()
    x = sequence()
    first, state = stack.extend(x[:, :4])
    second, _ = stack.extend(x[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), stack(x), rtol=1e-10, atol=1e-10)
    decoder = ea.Decoder(DIM, 3, **SMALL, head_dim=16).double()
    assert {m.head_dim for m in decoder.modules() if isinstance(m, ea.AttentionLayer)} == {16}
    assert decoder(x, x).shape == x.shape


def test_linformers_of_a_mixed_stack_share_their_projection_among_themselves():
    shared = ("linformer", {"rank": 4, "sharing": "layers"})
    encoder = ea.Encoder(DIM, HEADS, ["exact", shared], **SMALL, max_tokens=TOKENS)
    first, second = (encoder.blocks[index].attention.backend for index in (1, 3))
    assert first.core is second.core
    assert encoder.blocks[0].attention.backend.core is not first.core


@pytest.mark.parametrize("backend", [[], ["exact", "window", "exact"]])
def test_lists_that_do_not_divide_the_layers_are_refused(backend):
    with pytest.raises(OptionError, match="num_layers=4 is no multiple"):
        ea.Encoder(DIM, HEADS, backend, **SMALL)


@pytest.mark.parametrize("kind", [ea.Encoder, ea.Decoder])
def test_checkpoints_keep_gradients_and_recompute_activations(kind):
    torch.manual_seed(0)
    stack = kind(DIM, HEADS, "performer-positive", num_features=16, dropout=0.1, **SMALL)
    x = sequence().float().requires_grad_()
    inputs = (x,) if kind is ea.Encoder else (x, sequence(7).float())
    gradients, calls = [], []
    stack.blocks[0].feed_forward.register_forward_hook(lambda *args: calls.append(1))
    for stack.checkpoint in (False, True):
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(stack(*inputs).square().sum(), [x, *stack.parameters()]))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert len(calls) == 3
    with torch.no_grad():
        stack(*inputs)
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"activation": "swish"}, UnknownNameError, "activation"),
        ({"norm_type": "batch"}, UnknownNameError, "norm_type"),
        ({"rotary_base": 0.0}, OptionError, "rotary_base is a finite number above 0"),
        ({"rotary_scaling": float("inf")}, OptionError, "rotary_scaling is a finite number above 0"),
    ],
)
def test_wrong_options_name_the_argument(options, error, words):
    with pytest.raises(error, match=words):
        ea.Encoder(DIM, HEADS, **SMALL, **options)


VOCABULARY, END = 4, 3


def chain(seed: int):
    """A model whose next token depends on the last two, with its state as tensors of the batch."""
    table = torch.randn(
        VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)
    ).double()

    def step(ids: Tensor, state: Tensor | None):
        last = torch.zeros_like(ids[:, 0]) if state is None else state
        for column in ids.unbind(1):
            logits, last = table[last, column], column
        return logits[:, None], last

    return step, table.log_softmax(dim=-1)


def best_by_trying_all(log_probabilities: Tensor, first: int, tokens: int, end: int | None, penalty: float):
    """The best continuation of one token, by its definition."""
    scores = {}
    for path in itertools.product(range(VOCABULARY), repeat=tokens):
        stop = path.index(end) + 1 if end in path else tokens
        if any(token != end for token in path[stop:]):
            continue
        score, before, last = 0.0, 0, first
        for token in path[:stop]:
            score += float(log_probabilities[before, last, token])
            before, last = last, token
        scores[path] = score / ((5 + stop) / 6) ** penalty
    return max(scores, key=scores.__getitem__)


@pytest.mark.parametrize("end", [None, END])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
def test_a_beam_as_wide_as_the_tree_finds_the_best_continuation(end, penalty):
    for seed in range(5):
        step, log_probabilities = chain(seed)
        found = ea.beam_search(
            step, torch.tensor([[0], [1], [2]]), 4, beams=VOCABULARY**4, length_penalty=penalty, end=end
        )
        expected = [best_by_trying_all(log_probabilities, first, 4, end, penalty) for first in range(3)]
        assert found.tolist() == [list(path) for path in expected]


def test_one_beam_is_greedy_and_states_of_models_follow_their_beams():
    torch.manual_seed(0)
    for backend in ("exact", "window", "performer-positive"):
        model = ea.LanguageModel(DIM, HEADS, backend, num_layers=2, vocabulary=11).eval()
        first = torch.randint(11, (2, 5))
        assert torch.equal(
            ea.beam_search(model.extend, first, 6, beams=1), ea.generate(model.extend, first, 6)
        )

        def whole(ids, past, model=model):
            ids = ids if past is None else torch.cat((past, ids), dim=1)
            return model(ids), ids

        expected = ea.beam_search(whole, first, 6, beams=3)
        assert torch.equal(ea.beam_search(model.extend, first, 6, beams=3), expected)


def test_no_token_gives_an_empty_continuation_and_wrong_beams_are_refused():
    step, _ = chain(0)
    assert ea.beam_search(step, torch.tensor([[0]]), 0).shape == (1, 0)
    with pytest.raises(OptionError, match="beams"):
        ea.beam_search(step, torch.tensor([[0]]), 2, beams=0)
