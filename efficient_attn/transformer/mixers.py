"""Recurrent and convolutional layers, the alternatives to attention in Table 1 of Vaswani et al. 2017.

Each layer maps x [batch tokens model_dim] to the same shape, as an AttentionLayer does, and wraps PyTorch's
own layer. MixerBlock adds the residual branches, norms and feed-forward network of a TransformerBlock.
"""

from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.problem import positive_count
from efficient_attn.transformer.block import Residual, build_feed_forward
from efficient_attn.transformer.layer import check_mask, check_sequence
from efficient_attn.transformer.state_names import accept_names


class RecurrentMixer(nn.Module):
    """An LSTM from the first token to the last (Hochreiter and Schmidhuber 1997), model_dim wide."""

    def __init__(self, model_dim: int) -> None:
        super().__init__()
        positive_count("model_dim", model_dim)
        self.model_dim = model_dim
        self.lstm = nn.LSTM(model_dim, model_dim, batch_first=True)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        check_sequence("x", x, self.model_dim)
        if key_mask is not None:
            raise UnsupportedError(
                "key_mask: a recurrent layer carries its memory through every token; give it sequences "
                "without padding, of one length in a batch."
            )
        # PyTorch's layer refuses an empty sequence.
        return self.lstm(x)[0] if x.shape[1] else x

    def advance(self, x: Tensor, memory: Tensor) -> Tensor:
        """Memory of every token after one more step, computed from the preceding token in parallel.

        After as many steps as tokens, from zeros, the hidden half equals `forward`.

        Args:
            memory: Current hidden and cell state after each token, [2 batch tokens model_dim].
        """
        # The memory before the first token is zero.
        before = nn.functional.pad(memory[:, :, :-1], (0, 0, 1, 0))
        hidden, cell = before.flatten(1, 2)[:, None].unbind()  # [1 batch·tokens model_dim]
        _, after = self.lstm(x.flatten(0, 1)[:, None], (hidden, cell))
        return torch.cat(after).unflatten(1, x.shape[:2])


class ConvolutionMixer(nn.Module):
    """y_i = Σ_t W_t x_{i + t·dilation} over kernel_size tokens around i; if causal, up to i."""

    def __init__(
        self, model_dim: int, *, kernel_size: int, dilation: int = 1, causal: bool = False, groups: int = 1
    ) -> None:
        super().__init__()
        positive_count("model_dim", model_dim)
        positive_count("kernel_size", kernel_size)
        positive_count("dilation", dilation)
        self.model_dim = model_dim
        self._padding = _padding(kernel_size, dilation, causal)
        self.convolution = nn.Conv1d(model_dim, model_dim, kernel_size, dilation=dilation, groups=groups)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        check_sequence("x", x, self.model_dim)
        check_mask("key_mask", key_mask, "x", x)
        if key_mask is not None:
            x = x.masked_fill(~key_mask[..., None], 0.0)
        # PyTorch's layer refuses a sequence shorter than its kernel, such as an empty one.
        return self.convolution(nn.functional.pad(x.mT, self._padding)).mT if x.shape[1] else x


class SeparableConvolutionMixer(nn.Module):
    """Each channel over the tokens, then each token over the channels (Chollet 2017, Xception)."""

    def __init__(self, model_dim: int, *, kernel_size: int, causal: bool = False) -> None:
        super().__init__()
        self.depthwise = ConvolutionMixer(model_dim, kernel_size=kernel_size, causal=causal, groups=model_dim)
        self.pointwise = nn.Linear(model_dim, model_dim)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return self.pointwise(self.depthwise(x, key_mask=key_mask))


class MixerBlock(nn.Module):
    """A TransformerBlock with another layer in place of attention.

    Args:
        mixer: Layer with the signature of AttentionLayer, from x [batch tokens model_dim] to the same shape.
        activation: "relu", "gelu", "gelu-tanh", "silu", or of a gated network "swiglu" or "geglu".
        norm: "post", after each residual branch, or "pre", before each.
        dropout: Dropout probability on residual branches.
    """

    def __init__(
        self,
        model_dim: int,
        mixer: nn.Module,
        *,
        feed_forward_dim: int,
        activation: str = "relu",
        norm: str = "post",
        norm_type: str = "layer",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.mixer: Any = mixer
        self.feed_forward = build_feed_forward(model_dim, feed_forward_dim, activation)
        self.mixer_residual = Residual(model_dim, norm, norm_type, dropout)
        self.feed_forward_residual = Residual(model_dim, norm, norm_type, dropout)
        accept_names(self, {"around_mixer": "mixer_residual", "around_feed_forward": "feed_forward_residual"})

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """x [batch tokens model_dim] to the same shape; key_mask is bool [batch tokens]."""
        y = self.mixer(self.mixer_residual.pre(x), key_mask=key_mask)
        x = self.mixer_residual.post(x, y)
        return self.feed_forward_residual.post(x, self.feed_forward(self.feed_forward_residual.pre(x)))


def _padding(kernel_size: int, dilation: int, causal: bool) -> tuple[int, int]:
    """Padding before and after the sequence that keeps its length."""
    reach = (kernel_size - 1) * dilation
    if causal:
        return reach, 0
    if kernel_size % 2 == 0:
        raise OptionError(
            f"kernel_size={kernel_size} has no middle; a convolution that is not causal has an odd one: "
            f"{kernel_size - 1} or {kernel_size + 1}."
        )
    return reach // 2, reach // 2
