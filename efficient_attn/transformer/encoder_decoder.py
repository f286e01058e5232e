"""Encoder-decoder transformer (Vaswani et al. 2017)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.errors import OptionError
from efficient_attn.transformer.layer import check_mask
from efficient_attn.transformer.parts import resolve_pairs
from efficient_attn.transformer.seeds import spawn_seeds
from efficient_attn.transformer.stack import Decoder, DecoderState, Encoder


class Transformer(nn.Module):
    """An encoder of the source and a decoder of the target that reads the encoder's output.

    Args:
        backend: Backend of the encoder's self-attention, and of the decoder's if decoder_backend is None.
        decoder_backend: Causal backend of the decoder's self-attention.
        decoder_options: Options of the decoder's layers; without decoder_backend, added to `options`.
        cross_backend: Backend of the decoder's cross-attention.

    The other arguments are the same as of Encoder and Decoder.
    """

    def __init__(
        self,
        model_dim: int = 512,
        num_heads: int = 8,
        backend: Any = "exact",
        *,
        num_layers: int = 6,
        feed_forward_dim: int = 2048,
        activation: str = "relu",
        norm: str = "post",
        norm_type: str = "layer",
        norm_eps: float | None = None,
        final_norm: bool | None = None,
        dropout: float = 0.0,
        positions: str | None = "sinusoidal",
        max_tokens: int | None = None,
        seed: int = 0,
        decoder_backend: Any = None,
        decoder_options: Mapping[str, Any] | None = None,
        cross_backend: Any = "exact",
        cross_options: Mapping[str, Any] | None = None,
        checkpoint: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if cross_backend is None:
            raise OptionError("A transformer's decoder reads its encoder: give a cross_backend, as 'exact'.")
        backend = resolve_pairs(backend, options, Transformer)
        shared: dict[str, Any] = {
            "num_layers": num_layers,
            "feed_forward_dim": feed_forward_dim,
            "activation": activation,
            "norm": norm,
            "norm_type": norm_type,
            "norm_eps": norm_eps,
            "final_norm": final_norm,
            "dropout": dropout,
            "positions": positions,
            "max_tokens": max_tokens,
            "checkpoint": checkpoint,
            "device": device,
            "dtype": dtype,
        }
        seeds = spawn_seeds(seed, 2)
        if decoder_backend is None:
            decoder_backend, decoder_options = backend, {**options, **(decoder_options or {})}
        self.encoder = Encoder(model_dim, num_heads, backend, **shared, seed=seeds[0], **options)
        self.decoder = Decoder(
            model_dim,
            num_heads,
            decoder_backend,
            **shared,
            seed=seeds[1],
            cross_backend=cross_backend,
            cross_options=cross_options,
            **(decoder_options or {}),
        )

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """Decoder output for source and target [batch tokens model_dim], in the target's shape.

        Args:
            source_mask: bool [batch source_tokens], True for a real token.
            target_mask: bool [batch target_tokens], True for a real token.
        """
        check_mask("target_mask", target_mask, "target", target)
        context = self._encode(source, source_mask)
        return self.decoder(target, context, key_mask=target_mask, context_mask=source_mask)

    def extend(
        self,
        target: Tensor,
        state: DecoderState | None = None,
        source: Tensor | None = None,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """Output of new target tokens that follow `state`, and the new state.

        Args:
            source: Source to encode and keep in the state; None: the source in the state.
        """
        if source is None and (state is None or source_mask is not None):
            raise OptionError("extend needs the source in its first call, and with each source_mask.")
        check_mask("target_mask", target_mask, "target", target)
        context = None if source is None else self._encode(source, source_mask)
        return self.decoder.extend(target, state, context, key_mask=target_mask, context_mask=source_mask)

    def _encode(self, source: Tensor, source_mask: Tensor | None) -> Tensor:
        check_mask("source_mask", source_mask, "source", source)
        return self.encoder(source, key_mask=source_mask)
