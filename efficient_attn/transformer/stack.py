"""Stacks of blocks: encoder and decoder; the defaults are the base model of Vaswani et al. 2017.

Stacks work on embeddings [batch tokens model_dim]. The vocabulary is the caller's affair, and so are the
factor √model_dim on embeddings (section 3.4 there) and the shift of a decoder's input by one token.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from efficient_attn.backends import resolve
from efficient_attn.problem import positive_count
from efficient_attn.transformer.block import DecoderBlock, DecoderBlockState, TransformerBlock
from efficient_attn.transformer.layer import LayerState
from efficient_attn.transformer.parts import (
    EmbeddingInput,
    final_norm,
    inside_blocks,
    seeded,
    share_layers,
    spawn_seeds,
)


class EncoderState(NamedTuple):
    """What a causal encoder has to know of the tokens before: how many, and the state of each block."""

    tokens: int
    blocks: tuple[LayerState, ...]


class DecoderState(NamedTuple):
    """What a decoder has to know of the tokens before: how many, and the state of each block."""

    tokens: int
    blocks: tuple[DecoderBlockState, ...]


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
        self.embedding_input = EmbeddingInput(positions, model_dim, dropout, max_tokens)
        blocks = [
            TransformerBlock(
                model_dim,
                num_heads,
                spec,
                feed_forward_dim=feed_forward_dim,
                activation=activation,
                norm=norm,
                dropout=dropout,
                positions=inside_blocks(positions),
                causal=causal,
                max_tokens=max_tokens,
                **seeded(spec, options, layer_seed),
            )
            for layer_seed in spawn_seeds(seed, num_layers)
        ]
        share_layers([block.attention for block in blocks])
        # A ModuleList does not tell the types what its modules are.
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = final_norm(norm, model_dim)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """x [batch tokens model_dim] to the same shape; key_mask is bool [batch tokens]."""
        x = self.embedding_input(x)
        for block in self.blocks:
            x = block(x, key_mask=key_mask)
        return self.norm(x)

    def extend(
        self, x: Tensor, state: EncoderState | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, EncoderState]:
        """The output of new tokens after those of `state`, and the state after them; only if causal."""
        start, before = (0, (None,) * len(self.blocks)) if state is None else state
        y, after = self.embedding_input(x, start), []
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
        seeds = spawn_seeds(seed, 2 * num_layers)
        self.embedding_input = EmbeddingInput(positions, model_dim, dropout, max_tokens)
        blocks = [
            DecoderBlock(
                model_dim,
                num_heads,
                spec,
                feed_forward_dim=feed_forward_dim,
                activation=activation,
                norm=norm,
                dropout=dropout,
                positions=inside_blocks(positions),
                max_tokens=max_tokens,
                cross_backend=cross,
                cross_options=None if cross is None else seeded(cross, cross_options or {}, cross_seed),
                **seeded(spec, options, layer_seed),
            )
            for layer_seed, cross_seed in zip(seeds[::2], seeds[1::2], strict=True)
        ]
        share_layers([block.cross_attention for block in blocks if block.cross_attention is not None])
        # A ModuleList does not tell the types what its modules are.
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = final_norm(norm, model_dim)

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
        x = self.embedding_input(x)
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
        y, after = self.embedding_input(x, start), []
        for block, seen in zip(self.blocks, before, strict=True):
            y, seen = block.extend(y, seen, context, key_mask=key_mask, context_mask=context_mask)
            after.append(seen)
        return self.norm(y), DecoderState(start + x.shape[1], tuple(after))
