"""Table 1 of Vaswani et al. 2017 as numbers, held against torch's counter of operations and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from efficient_attn.errors import OptionError
from efficient_attn.theory.complexity import (
    TABLE_1,
    convolutional,
    dilated_convolutional,
    recurrent,
    restricted_self_attention,
    self_attention,
    separable_convolutional,
)

TOKENS, WIDTH = 12, 4
Layer = Callable[[Tensor], Tensor]


def counted(call: Callable[[], object]) -> int:
    """What torch counts in the matrix products of a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def within(size: int, causal: bool) -> Tensor:
    """Which tokens each token has in its neighbourhood, bool [tokens tokens]."""
    back = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    return (back >= 0) & (back < size) if causal else back.abs() <= size // 2


def attention_row_by_row(visible: Tensor) -> None:
    """Self-attention without a product that nobody reads."""
    x = torch.randn(TOKENS, WIDTH)
    for row, keys in zip(x.split(1), visible, strict=True):
        (row @ x[keys].mT) @ x[keys]


def convolution_tap_by_tap(visible: Tensor, channels: int) -> None:
    x, weight = torch.randn(TOKENS, channels), torch.randn(channels, channels)
    for taps in visible:
        for tap in x[taps].split(1):
            tap @ weight


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_does_the_operations_that_torch_counts(causal: bool) -> None:
    visible = within(TOKENS, True) if causal else torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    expected = counted(lambda: attention_row_by_row(visible))
    assert self_attention(TOKENS, WIDTH, causal=causal).flops == expected


@pytest.mark.parametrize(("size", "causal"), [(2, True), (5, True), (99, True), (3, False), (99, False)])
def test_neighbourhoods_end_at_the_edges_of_the_sequence(size: int, causal: bool) -> None:
    visible = within(size, causal)
    attention = counted(lambda: attention_row_by_row(visible))
    convolution = counted(lambda: convolution_tap_by_tap(visible, WIDTH))
    depthwise = WIDTH * counted(lambda: convolution_tap_by_tap(visible, 1))
    pointwise = counted(lambda: torch.randn(TOKENS, WIDTH) @ torch.randn(WIDTH, WIDTH))
    sizes = {"kernel_size": size, "causal": causal}
    assert restricted_self_attention(TOKENS, WIDTH, window=size, causal=causal).flops == attention
    assert convolutional(TOKENS, WIDTH, **sizes).flops == convolution
    if causal:
        assert dilated_convolutional(TOKENS, WIDTH, kernel_size=size).flops == convolution
    assert separable_convolutional(TOKENS, WIDTH, **sizes).flops == depthwise + pointwise


@pytest.mark.parametrize(("gates", "cell"), [(4, nn.LSTMCell), (3, nn.GRUCell), (1, nn.RNNCell)])
def test_recurrent_layers_do_the_operations_that_torch_counts_token_by_token(
    gates: int, cell: type[nn.Module]
) -> None:
    x, layer = torch.randn(TOKENS, 1, WIDTH), cell(WIDTH, WIDTH)

    def forward() -> None:
        memory = None
        for token in x:
            memory = layer(token, memory)

    assert recurrent(TOKENS, WIDTH, gates=gates) == (counted(forward), TOKENS, TOKENS)


def neighbours(size: int, dilation: int, causal: bool) -> Layer:
    """The sum of a neighbourhood, [1 1 tokens]: nothing can cancel in it."""
    reach = (size - 1) * dilation
    padding = (reach, 0) if causal else (reach // 2, reach // 2)

    def layer(x: Tensor) -> Tensor:
        return nn.functional.conv1d(nn.functional.pad(x, padding), x.new_ones(1, 1, size), dilation=dilation)

    return layer


def layers_until_the_last_token_depends_on_the_first(tokens: int, layer_at: Callable[[int], Layer]) -> int:
    x = torch.ones(1, 1, tokens, requires_grad=True)
    y, layers = x, 0
    while layers < tokens:
        y, layers = layer_at(layers)(y), layers + 1
        (gradient,) = torch.autograd.grad(y[0, 0, -1], x, retain_graph=True)
        if gradient[0, 0, 0] > 0:
            return layers
    raise AssertionError("The first token does not reach the last.")


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 10, 27, 28, 40, 41])
@pytest.mark.parametrize(("size", "causal"), [(2, True), (3, True), (3, False), (5, False)])
def test_paths_are_as_long_as_gradients_say(tokens: int, size: int, causal: bool) -> None:
    length = layers_until_the_last_token_depends_on_the_first(tokens, lambda _: neighbours(size, 1, causal))
    sizes = {"kernel_size": size, "causal": causal}
    assert restricted_self_attention(tokens, 1, window=size, causal=causal).path_length == length
    assert convolutional(tokens, 1, **sizes).path_length == length
    assert separable_convolutional(tokens, 1, **sizes).path_length == length


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 10, 27, 28, 40, 41])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_dilated_paths_are_as_long_as_gradients_say(tokens: int, size: int) -> None:
    length = layers_until_the_last_token_depends_on_the_first(
        tokens, lambda layer: neighbours(size, size**layer, causal=True)
    )
    assert dilated_convolutional(tokens, 1, kernel_size=size).path_length == length


def test_centred_dilated_layers_do_not_connect_the_ends() -> None:
    """Why the row is causal; a while longer than any stack that the loop above would try."""
    with pytest.raises(AssertionError, match="does not reach"):
        layers_until_the_last_token_depends_on_the_first(8, lambda layer: neighbours(3, 3**layer, False))


def test_rows_grow_by_the_powers_that_the_table_prints() -> None:
    """Doubled n and doubled d, where edges are below a thousandth: 2 to the powers of n and of d."""
    rows = {
        "self-attention": (self_attention, 4, 2),
        "recurrent": (recurrent, 2, 4),
        "convolutional": (lambda n, d: convolutional(n, d, kernel_size=3), 2, 4),
        "restricted self-attention": (lambda n, d: restricted_self_attention(n, d, window=3), 2, 2),
        "dilated convolutional": (lambda n, d: dilated_convolutional(n, d, kernel_size=3), 2, 4),
    }
    # The remaining row is a sum of two orders.
    assert rows.keys() == TABLE_1.keys() - {"separable convolutional"}
    n, d = 4096, 64
    for row, by_tokens, by_width in rows.values():
        assert row(2 * n, d).flops / row(n, d).flops == pytest.approx(by_tokens, rel=1e-3)
        assert row(n, 2 * d).flops / row(n, d).flops == by_width


def test_neighbourhoods_that_cannot_be_are_refused() -> None:
    with pytest.raises(OptionError, match="window=4 has no middle; it is odd: 3 or 5"):
        restricted_self_attention(TOKENS, WIDTH, window=4)
    with pytest.raises(OptionError, match="kernel_size is at least 1, not 0"):
        convolutional(TOKENS, WIDTH, kernel_size=0, causal=True)
    with pytest.raises(OptionError, match="one token reaches no other"):
        dilated_convolutional(TOKENS, WIDTH, kernel_size=1)
