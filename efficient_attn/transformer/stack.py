"""Stacks of blocks: encoder, decoder, and both; the defaults are the base model of Vaswani et al. 2017.

Stacks work on embeddings [batch tokens model_dim]. The vocabulary is the caller's affair, and so are the
factor √model_dim on embeddings (section 3.4 there) and the shift of a decoder's input by one token.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from efficient_attn.backends import resolve
from efficient_attn.errors import OptionError
from efficient_attn.modules.options import whole_number
from efficient_attn.problem import positive_count
from efficient_attn.registry import BackendSpec
from efficient_attn.transformer.block import DecoderBlock, DecoderBlockState, TransformerBlock
from efficient_attn.transformer.layer import AttentionLayer, LayerState, check_mask, check_sequence
from efficient_attn.transformer.positions import build_positions


class EncoderState(NamedTuple):
    """What a causal encoder has to know of the tokens before: how many, and the state of each block."""

    tokens: int
    blocks: tuple[LayerState, ...]


class DecoderState(NamedTuple):
    """What a decoder has to know of the tokens before: how many, and the state of each block."""

    tokens: int
    blocks: tuple[DecoderBlockState, ...]


class Entrance(nn.Module):
    """Embeddings with their positions, then dropout (Vaswani et al. 2017, sections 3.5 and 5.4)."""

    def __init__(self, positions: str | None, model_dim: int, dropout: float, max_tokens: int | None) -> None:
        super().__init__()
        self._model_dim = model_dim
        self.positions = build_positions(positions, model_dim, max_tokens)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        check_sequence("x", x, self._model_dim)
        return self.dropout(self.positions(x, start))


class Encoder(nn.Module):
    """A stack of TransformerBlocks; with causal=True, a language model's body.

    Args:
        backend: Whatever `build` takes.
        activation: "relu" or "gelu".
        norm: "post", or "pre", which adds a norm after the last block.
        dropout: On residual branches and on embeddings (0.1 in the paper).
        positions: "sinusoidal", "learned" (needs max_tokens), "rotary" or None.
        seed: Gives each layer's random features a draw of their own; weights come from torch's generator.
        options: Further arguments of AttentionLayer: num_kv_heads, bias, options of the backend.
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
        dropout: float = 0.0,
        positions: str | None = "sinusoidal",
        causal: bool = False,
        max_tokens: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        positive_count("num_layers", num_layers)
        spec = resolve(backend)
        self.entrance = Entrance(positions, model_dim, dropout, max_tokens)
        blocks = [
            TransformerBlock(
                model_dim,
                num_heads,
                spec,
                feed_forward_dim=feed_forward_dim,
                activation=activation,
                norm=norm,
                dropout=dropout,
                positions=_inside_blocks(positions),
                causal=causal,
                max_tokens=max_tokens,
                **_seeded(spec, options, layer_seed),
            )
            for layer_seed in _spawn(seed, num_layers)
        ]
        _share_layers([block.attention for block in blocks])
        # A ModuleList does not tell the types what its modules are.
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = _final_norm(norm, model_dim)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """x [batch tokens model_dim] to the same shape; key_mask is bool [batch tokens]."""
        x = self.entrance(x)
        for block in self.blocks:
            x = block(x, key_mask=key_mask)
        return self.norm(x)

    def extend(
        self, x: Tensor, state: EncoderState | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, EncoderState]:
        """The output of new tokens after those of `state`, and the state after them; only if causal."""
        start, before = (0, (None,) * len(self.blocks)) if state is None else state
        y, after = self.entrance(x, start), []
        for block, seen in zip(self.blocks, before, strict=True):
            y, seen = block.extend(y, seen, key_mask=key_mask)
            after.append(seen)
        return self.norm(y), EncoderState(start + x.shape[1], tuple(after))


class Decoder(nn.Module):
    """A stack of DecoderBlocks; without a cross_backend it reads nothing but its own tokens.

    Args:
        cross_backend: What reads the context; it has to promise `cross`. None: no cross-attention.
        cross_options: Further arguments of that AttentionLayer, its backend's options among them.

    The other arguments are those of Encoder.
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
        dropout: float = 0.0,
        positions: str | None = "sinusoidal",
        max_tokens: int | None = None,
        seed: int = 0,
        cross_backend: Any = "exact",
        cross_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        positive_count("num_layers", num_layers)
        spec, cross = resolve(backend), None if cross_backend is None else resolve(cross_backend)
        seeds = _spawn(seed, 2 * num_layers)
        self.entrance = Entrance(positions, model_dim, dropout, max_tokens)
        blocks = [
            DecoderBlock(
                model_dim,
                num_heads,
                spec,
                feed_forward_dim=feed_forward_dim,
                activation=activation,
                norm=norm,
                dropout=dropout,
                positions=_inside_blocks(positions),
                max_tokens=max_tokens,
                cross_backend=cross,
                cross_options=None if cross is None else _seeded(cross, cross_options or {}, cross_seed),
                **_seeded(spec, options, layer_seed),
            )
            for layer_seed, cross_seed in zip(seeds[::2], seeds[1::2], strict=True)
        ]
        _share_layers([block.cross_attention for block in blocks if block.cross_attention is not None])
        # A ModuleList does not tell the types what its modules are.
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = _final_norm(norm, model_dim)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """x [batch tokens model_dim] to the same shape; masks are bool, True for a real token.

        Args:
            context: [batch context_tokens model_dim], an encoder's output.
            key_mask: Of x, [batch tokens].
            context_mask: Of the context, [batch context_tokens].
        """
        x = self.entrance(x)
        for block in self.blocks:
            x = block(x, context, key_mask=key_mask, context_mask=context_mask)
        return self.norm(x)

    def extend(
        self,
        x: Tensor,
        state: DecoderState | None = None,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """The output of new tokens after those of `state`, and the state after them.

        Args:
            context: Projected once and kept in the state; None stands for the context in the state.
        """
        start, before = (0, (None,) * len(self.blocks)) if state is None else state
        y, after = self.entrance(x, start), []
        for block, seen in zip(self.blocks, before, strict=True):
            y, seen = block.extend(y, seen, context, key_mask=key_mask, context_mask=context_mask)
            after.append(seen)
        return self.norm(y), DecoderState(start + x.shape[1], tuple(after))


class Transformer(nn.Module):
    """An encoder of the source and a decoder of the target that reads the encoder's output.

    Args:
        backend: Of the encoder's self-attention, and of the decoder's where decoder_backend is None.
        decoder_backend: Of the decoder's self-attention; it has to be able to be causal.
        decoder_options: Options of the decoder's layers; where there is no decoder_backend, `options` serve.
        cross_backend: Of the decoder's attention to the encoder's output.

    The other arguments are those of Encoder and Decoder, the same for both.
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
        dropout: float = 0.0,
        positions: str | None = "sinusoidal",
        max_tokens: int | None = None,
        seed: int = 0,
        decoder_backend: Any = None,
        decoder_options: Mapping[str, Any] | None = None,
        cross_backend: Any = "exact",
        cross_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if cross_backend is None:
            raise OptionError("A transformer's decoder reads its encoder: give a cross_backend, as 'exact'.")
        shared: dict[str, Any] = {
            "num_layers": num_layers,
            "feed_forward_dim": feed_forward_dim,
            "activation": activation,
            "norm": norm,
            "dropout": dropout,
            "positions": positions,
            "max_tokens": max_tokens,
        }
        seeds = _spawn(seed, 2)
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
        """Source and target [batch tokens model_dim], each of its own length, to the target's shape.

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
        """The output of new tokens of the target after those of `state`, and the state after them.

        Args:
            source: Encoded once and kept in the state; None stands for the source in the state.
        """
        if source is None and (state is None or source_mask is not None):
            raise OptionError("extend needs the source in its first call, and with each source_mask.")
        check_mask("target_mask", target_mask, "target", target)
        context = None if source is None else self._encode(source, source_mask)
        return self.decoder.extend(target, state, context, key_mask=target_mask, context_mask=source_mask)

    def _encode(self, source: Tensor, source_mask: Tensor | None) -> Tensor:
        check_mask("source_mask", source_mask, "source", source)
        return self.encoder(source, key_mask=source_mask)


def _inside_blocks(positions: str | None) -> str | None:
    """The positions that blocks apply themselves; the others are added to embeddings before them."""
    return positions if positions == "rotary" else None


def _final_norm(norm: str, model_dim: int) -> nn.Module:
    """The norm after the last pre-norm block, whose residual stream nothing else normalises."""
    return nn.LayerNorm(model_dim) if norm == "pre" else nn.Identity()


def _spawn(seed: int, count: int) -> list[int]:
    """Seeds of independent draws, which depend on `seed` and their place alone."""
    whole_number("seed", seed)
    return [int(child.generate_state(1)[0]) for child in np.random.SeedSequence(seed).spawn(count)]


def _seeded(spec: BackendSpec, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The options, with the seed where the backend draws and was not told what."""
    draws = any(field.name == "seed" for field in fields(spec.options_type))
    return {"seed": seed, **options} if draws else dict(options)


def _share_layers(layers: list[AttentionLayer]) -> None:
    """One backend's parameters for all layers, where its option `sharing` is "layers".

    The first layer owns them. The others hold its module without registering it, so that parameters
    and state dict count it once and a deep copy keeps it shared.
    """
    backends = [layer.backend for layer in layers]
    if not backends or getattr(backends[0].options, "sharing", None) != "layers":
        return
    owner, *others = backends
    for other in others:
        del other.core
        object.__setattr__(other, "core", owner.core)
