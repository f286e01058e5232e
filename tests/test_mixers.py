"""Recurrent and convolutional layers beside attention: what they compute, and how far a token reaches."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from efficient_attn.errors import OptionError, ShapeError, UnsupportedError
from efficient_attn.measure.operations import count_operations
from efficient_attn.measure.paths import hops_to_the_first_token
from efficient_attn.theory import complexity
from efficient_attn.transformer.layer import AttentionLayer
from efficient_attn.transformer.mixers import (
    ConvolutionMixer,
    MixerBlock,
    RecurrentMixer,
    SeparableConvolutionMixer,
)

DIM = 4
MIXERS = {
    "recurrent": lambda: RecurrentMixer(DIM),
    "convolutional": lambda: ConvolutionMixer(DIM, kernel_size=3),
    "dilated": lambda: ConvolutionMixer(DIM, kernel_size=3, dilation=9, causal=True),
    "separable": lambda: SeparableConvolutionMixer(DIM, kernel_size=5),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_keeps_the_shape_alone_and_in_a_block(name: str, tokens: int) -> None:
    x = torch.randn(2, tokens, DIM)
    for norm in ("post", "pre"):
        assert MixerBlock(DIM, MIXERS[name](), feed_forward_dim=8, norm=norm)(x).shape == x.shape


def test_a_block_around_attention_is_the_transformer_block() -> None:
    from efficient_attn.transformer.block import TransformerBlock

    block = TransformerBlock(DIM, 2, feed_forward_dim=8, norm="pre")
    other = MixerBlock(DIM, block.attention, feed_forward_dim=8, norm="pre")
    other.feed_forward = block.feed_forward
    x, mask = torch.randn(2, 5, DIM), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    assert_close(other(x, key_mask=mask), block(x, key_mask=mask), rtol=0, atol=0)


def test_a_convolution_is_the_sum_over_its_neighbourhood() -> None:
    mixer = ConvolutionMixer(DIM, kernel_size=3, dilation=2).double()
    x = torch.randn(1, 6, DIM, dtype=torch.float64)
    weight, bias = mixer.convolution.weight, mixer.convolution.bias
    for i, row in enumerate(mixer(x)[0]):
        taps = {tap: i + 2 * (tap - 1) for tap in range(3)}
        parts = [weight[:, :, tap] @ x[0, j] for tap, j in taps.items() if 0 <= j < 6]
        assert_close(row, bias + sum(parts))


@pytest.mark.parametrize("mixer", [ConvolutionMixer, SeparableConvolutionMixer])
def test_a_masked_token_changes_nothing_even_if_it_is_nan(mixer: type[nn.Module]) -> None:
    layer, x = mixer(DIM, kernel_size=3), torch.randn(1, 5, DIM)
    mask = torch.tensor([[True, True, True, True, False]])
    broken = x.clone()
    broken[:, 4] = float("nan")
    assert_close(layer(broken, key_mask=mask), layer(x, key_mask=mask), rtol=0, atol=0)
    assert_close(layer(broken, key_mask=mask)[:, :4], layer(x[:, :4]))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(OptionError, match=r"kernel_size=4 has no middle; .* 3 or 5"):
        ConvolutionMixer(DIM, kernel_size=4)
    with pytest.raises(OptionError, match="dilation is at least 1, not 0"):
        ConvolutionMixer(DIM, kernel_size=3, dilation=0)
    with pytest.raises(UnsupportedError, match="without padding"):
        RecurrentMixer(DIM)(torch.randn(1, 3, DIM), key_mask=torch.ones(1, 3, dtype=torch.bool))
    for make in MIXERS.values():
        with pytest.raises(ShapeError, match="model_dim=4"):
            make()(torch.randn(1, 3, DIM + 1))


def test_a_recurrent_layer_is_as_many_steps_as_tokens() -> None:
    layer, x = RecurrentMixer(DIM).double(), torch.randn(2, 6, DIM, dtype=torch.float64)
    memory = x.new_zeros(2, *x.shape)
    outputs = [memory[0]]
    for _ in range(6):
        memory = layer.advance(x, memory)
        outputs.append(memory[0])
    assert_close(outputs[6], layer(x))
    # The first token is through after one step, the last one is not before all six.
    assert_close(outputs[1][:, 0], layer(x)[:, 0])
    assert (outputs[5][:, 5] != outputs[6][:, 5]).any()


def attention_layer(backend: str, **options: object) -> nn.Module:
    return AttentionLayer(DIM, 2, backend, **options).double()


def path(tokens: int, layer_at: object) -> int | None:
    return hops_to_the_first_token(layer_at, shape=(1, tokens, DIM), most=2 * tokens)


@pytest.mark.parametrize("tokens", [1, 2, 9, 10, 28])
def test_paths_are_as_long_as_the_table_says(tokens: int) -> None:
    full, near = attention_layer("exact"), attention_layer("window", window=5)
    recurrent = RecurrentMixer(DIM).double()

    def step(state: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(state[:1]), recurrent.advance(state[0], state[1:])])

    def dilated(hop: int) -> nn.Module:
        return ConvolutionMixer(DIM, kernel_size=3, dilation=3**hop, causal=True).double()

    wide = ConvolutionMixer(DIM, kernel_size=5).double()
    separable = SeparableConvolutionMixer(DIM, kernel_size=3).double()
    theory = complexity
    found = hops_to_the_first_token(lambda _: step, shape=(3, 1, tokens, DIM), most=2 * tokens, inputs=0)
    assert found == theory.recurrent(tokens, DIM).path_length
    assert path(tokens, lambda _: full) == theory.self_attention(tokens, DIM).path_length
    restricted = theory.restricted_self_attention(tokens, DIM, window=5)
    assert path(tokens, lambda _: near) == restricted.path_length
    assert path(tokens, lambda _: wide) == theory.convolutional(tokens, DIM, kernel_size=5).path_length
    narrow = theory.separable_convolutional(tokens, DIM, kernel_size=3)
    assert path(tokens, lambda _: separable) == narrow.path_length
    assert path(tokens, dilated) == theory.dilated_convolutional(tokens, DIM, kernel_size=3).path_length


def test_a_path_pulled_back_is_that_through_a_stack_of_blocks() -> None:
    blocks = [
        MixerBlock(DIM, ConvolutionMixer(DIM, kernel_size=3), feed_forward_dim=8).double() for _ in range(8)
    ]
    x = torch.randn(1, 6, DIM, dtype=torch.float64, requires_grad=True)
    for layers in range(1, 9):
        y = nn.Sequential(*blocks[:layers])(x)
        (gradient,) = torch.autograd.grad((y[:, -1] * torch.randn(DIM).double()).sum(), x)
        assert bool((gradient[:, 0] != 0).any()) == (layers >= 5)
    assert path(6, lambda hop: blocks[hop]) == 5


def test_a_path_that_is_too_long_or_does_not_exist_is_none() -> None:
    layer = ConvolutionMixer(DIM, kernel_size=3).double()
    assert hops_to_the_first_token(lambda _: layer, shape=(1, 9, DIM), most=7) is None
    assert path(9, lambda _: ConvolutionMixer(DIM, kernel_size=1).double()) is None
    # 7 = 9 - 3 + 1, and the way over 9 leads past the end.
    centred = [ConvolutionMixer(DIM, kernel_size=3, dilation=3**hop).double() for hop in range(6)]
    assert hops_to_the_first_token(centred.__getitem__, shape=(1, 8, DIM), most=6) is None


def test_products_are_counted_as_are_those_that_wait() -> None:
    a, b, c = (torch.randn(6, 6) for _ in range(3))
    one = 2 * 6**3
    assert count_operations(lambda: a @ b + b @ c) == (2 * one, 1)
    assert count_operations(lambda: (a @ b).mT.relu() @ c) == (2 * one, 2)
    assert count_operations(lambda: a + b) == (0, 0)


def test_a_layer_counts_what_its_formula_says_within_fused_kernels_too() -> None:
    n, heads = 10, 2
    x = torch.randn(1, n, DIM)
    q, k, v = torch.randn(3, 1, heads, n, DIM // heads)
    counted = {
        "exact": count_operations(lambda: nn.functional.scaled_dot_product_attention(q, k, v)),
        "recurrent": count_operations(lambda: RecurrentMixer(DIM)(x)),
        "convolutional": count_operations(lambda: ConvolutionMixer(DIM, kernel_size=3)(x)),
        "separable": count_operations(lambda: SeparableConvolutionMixer(DIM, kernel_size=3)(x)),
    }
    assert counted["exact"] == (complexity.self_attention(n, DIM).flops, 2)
    assert counted["recurrent"] == complexity.recurrent(n, DIM)[:2]
    # torch multiplies the padding too.
    assert counted["convolutional"] == (2 * 3 * n * DIM**2, 1)
    assert counted["separable"] == (2 * 3 * n * DIM + 2 * n * DIM**2, 2)
