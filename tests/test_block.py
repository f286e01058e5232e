"""The blocks: torch's own where exact, in time and output; one backend for another, nothing else changes."""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_peers import copy_weights

import efficient_attn as ea

DIM, HEADS, WIDE, TOKENS, CONTEXT = 32, 4, 48, 12, 7
SIZES = {
    "window": {"window": 5},
    "linformer": {"rank": 4},
    "performer-positive": {"num_features": 32},
    "performer-trig": {"num_features": 32},
    "performer-hyperbolic": {"num_features": 32},
    "performer-oprf": {"num_features": 32},
    "performer-full": {"num_features": 32},
}
MODES = [(norm, activation) for norm in ("post", "pre") for activation in ("relu", "gelu")]


def sequence(tokens: int = TOKENS, *, seed: int = 0) -> Tensor:
    # Small entries keep the denominators of signed features away from zero.
    return 0.3 * torch.randn(2, tokens, DIM, generator=torch.Generator().manual_seed(seed)).double()


def mask(tokens: int) -> Tensor:
    real = torch.ones(2, tokens, dtype=torch.bool)
    real[1, tokens // 2 :] = False
    return real


def block(name: str = "exact", **arguments: object) -> ea.TransformerBlock:
    torch.manual_seed(0)
    made = ea.TransformerBlock(
        DIM, HEADS, name, feed_forward_dim=WIDE, max_tokens=TOKENS, **SIZES.get(name, {}), **arguments
    )
    made = made.double()
    ea.calibrate(made, sequence(seed=9))
    return made


def decoder_block(name: str = "exact", **arguments: object) -> ea.DecoderBlock:
    torch.manual_seed(0)
    made = ea.DecoderBlock(
        DIM, HEADS, name, feed_forward_dim=WIDE, max_tokens=TOKENS, **SIZES.get(name, {}), **arguments
    )
    made = made.double()
    ea.calibrate(made, sequence(seed=9), sequence(CONTEXT, seed=8))
    return made


@pytest.mark.parametrize(("norm", "activation"), MODES)
def test_an_exact_block_is_torchs_encoder_layer(norm: str, activation: str) -> None:
    theirs = nn.TransformerEncoderLayer(
        DIM, HEADS, WIDE, 0.0, activation, batch_first=True, norm_first=norm == "pre"
    ).double()
    ours = block(norm=norm, activation=activation)
    copy_weights(theirs, ours)
    for real in (None, mask(TOKENS)):
        expected = theirs(sequence(), src_key_padding_mask=None if real is None else ~real)
        torch.testing.assert_close(ours(sequence(), key_mask=real), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("norm", "activation"), MODES)
def test_an_exact_decoder_block_is_torchs_decoder_layer(norm: str, activation: str) -> None:
    theirs = nn.TransformerDecoderLayer(
        DIM, HEADS, WIDE, 0.0, activation, batch_first=True, norm_first=norm == "pre"
    ).double()
    ours = decoder_block(norm=norm, activation=activation)
    copy_weights(theirs, ours)
    x, context, real, context_real = sequence(), sequence(CONTEXT, seed=1), mask(TOKENS), mask(CONTEXT)
    expected = theirs(
        x,
        context,
        tgt_mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1),
        tgt_key_padding_mask=~real,
        memory_key_padding_mask=~context_real,
    )
    got = ours(x, context, key_mask=real, context_mask=context_real)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ea.list_backends())
def test_the_backend_changes_nothing_but_the_attention(name: str) -> None:
    exact, other = block(), block(name)
    state = {key: value for key, value in exact.state_dict().items() if ".backend." not in key}
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert unexpected == []
    assert all(".backend." in key for key in missing)
    assert other(sequence(), key_mask=mask(TOKENS)).shape == (2, TOKENS, DIM)


@pytest.mark.parametrize("name", [n for n in ea.list_backends() if ea.spec(n).capabilities.exact])
def test_without_positions_swapping_tokens_swaps_outputs(name: str) -> None:
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    ours, x = block(name), sequence()
    torch.testing.assert_close(ours(x[:, order]), ours(x)[:, order], rtol=1e-12, atol=1e-12)
    turned = block(name, positions="rotary")
    # Rotary angles move with the tokens, by far more than rounding.
    assert not torch.allclose(turned(x[:, order]), turned(x)[:, order])


@pytest.mark.parametrize("name", ea.list_backends())
def test_gradients_of_a_block_are_finite_and_reach_every_parameter(name: str) -> None:
    ours = block(name)
    # A plain sum would be constant: the last norm takes the sum of every token's entries away.
    ours(sequence(), key_mask=mask(TOKENS)).pow(3).sum().backward()
    for parameter in ours.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_dropout_acts_on_residual_branches_in_training_and_never_on_attention_weights(norm: str) -> None:
    ours, x = block(norm=norm, dropout=0.5), sequence()
    assert ours.attention.backend.options.dropout == 0.0
    inside = ours.attention(x)
    assert torch.equal(ours.attention(x), inside)
    torch.manual_seed(0)
    assert not torch.equal(ours(x), ours(x))
    ours.eval()
    assert torch.equal(ours(x), block(norm=norm).eval()(x))


def test_everything_dropped_leaves_the_residual_stream() -> None:
    ours, x = block(norm="pre", dropout=0.5), sequence()
    for module in ours.modules():
        if isinstance(module, nn.Dropout):
            module.p = 1.0
    assert torch.equal(ours(x), x)


@pytest.mark.parametrize("split", [(1,) * 12, (4, 7, 1)])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("name", ea.list_backends(causal=True))
def test_a_decoder_block_extended_at_any_split_gives_what_it_gives_at_once(
    name: str, norm: str, split: tuple[int, ...]
) -> None:
    ours, x, context = decoder_block(name, norm=norm), sequence(), sequence(CONTEXT, seed=1)
    real, context_real = mask(TOKENS), mask(CONTEXT)
    expected = ours(x, context, key_mask=real, context_mask=context_real)
    parts, state, start = [], None, 0
    for tokens in split:
        part = slice(start, start + tokens)
        given = {} if state else {"context": context, "context_mask": context_real}
        y, state = ours.extend(x[:, part], state, key_mask=real[:, part], **given)
        parts.append(y)
        start += tokens
    assert (torch.cat(parts, dim=1) - expected).norm() < 1e-10 * expected.norm()


def test_a_context_given_again_is_the_same_as_the_one_in_the_state() -> None:
    ours, x, context, real = decoder_block(), sequence(), sequence(CONTEXT, seed=1), mask(CONTEXT)
    _, state = ours.extend(x[:, :5], None, context, context_mask=real)
    kept, _ = ours.extend(x[:, 5:], state)
    again, _ = ours.extend(x[:, 5:], state, context, context_mask=real)
    assert torch.equal(kept, again)


CROSS = [name for name in ea.list_backends() if ea.spec(name).capabilities.cross]


@pytest.mark.parametrize("name", CROSS)
def test_every_backend_that_promises_it_reads_a_context(name: str) -> None:
    ours = decoder_block(cross_backend=name, cross_options=SIZES.get(name, {}))
    x, context = sequence(), sequence(CONTEXT, seed=1)
    assert ours.cross_attention.backend.spec.name == name
    # Another context is another output, by far more than rounding.
    assert not torch.allclose(ours(x, context), ours(x, sequence(CONTEXT, seed=2)))


def test_a_cross_attention_may_know_another_longest_sequence() -> None:
    ours = decoder_block(cross_backend="linformer", cross_options={"rank": 2, "max_tokens": 40})
    assert ours(sequence(), sequence(40, seed=1)).shape == (2, TOKENS, DIM)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (
            {"backend": "linformer", "max_tokens": 300},
            ea.UnsupportedError,
            r"'linformer' cannot be causal.*exact",
        ),
        ({"cross_backend": "window"}, ea.UnsupportedError, "'window' cannot read another sequence"),
        ({"causal": False}, ea.OptionError, "decoder block is causal"),
        ({"norm": "middle"}, ea.UnknownNameError, r"choice of norm is called 'middle'.*post, pre"),
        (
            {"activation": "tanh"},
            ea.UnknownNameError,
            r"choice of activation is called 'tanh'.*gelu-tanh, relu",
        ),
        ({"dropout": 1.0}, ea.OptionError, "dropout is at least 0 and below 1"),
        ({"feed_forward_dim": 0}, ea.OptionError, "feed_forward_dim is at least 1"),
    ],
)
def test_blocks_that_cannot_be_built_are_refused_in_one_line(
    arguments: dict, error: type, match: str
) -> None:
    with pytest.raises(error, match=match) as refusal:
        ea.DecoderBlock(**{"model_dim": DIM, "num_heads": HEADS, "feed_forward_dim": WIDE, **arguments})
    assert "\n" not in str(refusal.value)


def test_a_context_without_cross_attention_and_the_reverse_are_refused_in_one_line() -> None:
    x, context = sequence(), sequence(CONTEXT, seed=1)
    with pytest.raises(ea.UnsupportedError, match="context was given to a decoder without cross-attention"):
        decoder_block(cross_backend=None)(x, context)
    with pytest.raises(
        ea.OptionError, match=r"has cross-attention and was given no context.*cross_backend=None"
    ):
        decoder_block()(x)
    with pytest.raises(ea.OptionError, match="was given no context"):
        decoder_block().extend(x)


def test_a_mask_of_the_wrong_side_is_refused_in_one_line() -> None:
    x, context = sequence(), sequence(CONTEXT, seed=1)
    with pytest.raises(
        ea.ShapeError, match=r"context_mask has shape \[2, 12\] .* tokens of context.*\[2, 7\]"
    ):
        decoder_block()(x, context, context_mask=mask(TOKENS))
    with pytest.raises(ea.ShapeError, match=r"key_mask has shape \[2, 7\] .* tokens of x.*\[2, 12\]"):
        decoder_block()(x, context, key_mask=mask(CONTEXT))


COMPILED = [
    (name, causal)
    for name in ea.list_backends()
    for causal in (False, True)
    if ea.spec(name).capabilities.compile and (ea.spec(name).capabilities.causal or not causal)
]


@pytest.mark.compile
@pytest.mark.parametrize(("name", "causal"), COMPILED)
def test_a_compiled_block_gives_the_same_output_and_gradients(name: str, causal: bool) -> None:
    torch._dynamo.reset()
    ours, x = block(name, causal=causal, positions="rotary"), sequence()

    def results(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = call(x)
        return [y.detach(), *torch.autograd.grad(y.pow(3).sum(), list(ours.parameters()))]

    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for got, expected in zip(results(compiled), results(ours), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("training", [True, False])
def test_a_block_takes_at_most_one_and_a_half_times_torchs_time_at_128_tokens(training: bool) -> None:
    dim, heads, wide, rounds, warm_up = 512, 8, 2048, 30, 3
    x = torch.randn(1, 128, dim, generator=torch.Generator().manual_seed(0))
    ours = ea.TransformerBlock(dim, heads, feed_forward_dim=wide).train(training)
    theirs = nn.TransformerEncoderLayer(dim, heads, wide, 0.0, batch_first=True).train(training)

    def time_s(module: nn.Module) -> float:
        start = time.perf_counter()
        # In evaluation without gradients torch's layer is one fused kernel.
        with torch.set_grad_enabled(training):
            y = module(x)
        if training:
            y.sum().backward()
        return time.perf_counter() - start

    ratios = []
    for turn in range(warm_up + rounds):
        first, second = (ours, theirs) if turn % 2 else (theirs, ours)
        taken = {first: time_s(first), second: time_s(second)}
        ratios.append(taken[ours] / taken[theirs])
    ratio = float(np.median(ratios[warm_up:]))
    print(f"training={training}: {ratio:.2f} times torch's time, median of {rounds} pairs")
    assert ratio <= 1.5
