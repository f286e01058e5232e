"""Stacks of blocks: encoder and decoder; the defaults are the base model of Vaswani et al. 2017.

Stacks map embeddings [batch tokens model_dim] to the same shape. The caller provides the vocabulary, the
factor √model_dim on embeddings (section 3.4 there) and the shift of a decoder's input by one token.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from efficient_attn.backends import resolve
from efficient_attn.problem import positive_count
from efficient_attn.sharding import whole_tokens
from efficient_attn.transformer.block import DecoderBlock, DecoderBlockState, TransformerBlock
from efficient_attn.transformer.layer import LayerState
from efficient_attn.transformer.parts import (
    EmbeddingInput,
    build_final_norm,
    each_layer,
    inside_blocks,
    run_block,
    seeded,
    share_layers,
)
from efficient_attn.transformer.seeds import spawn_seeds
from efficient_attn.transformer.state_names import accept_names

# Names of submodules in torch's stacks.
_NAMES = {"layers": "blocks"}


class EncoderState(NamedTuple):
    """Streaming state of a causal encoder: number of past tokens, and the state of each block."""

    tokens: int
    blocks: tuple[LayerState, ...]


class DecoderState(NamedTuple):
    """Streaming state of a decoder: number of past tokens, and the state of each block."""

    tokens: int
    blocks: tuple[DecoderBlockState, ...]


class Encoder(nn.Module):
    """Stack of TransformerBlocks; with causal=True, the body of a language model.

    Args:
        backend: Backend, as for `build`, or a list of backends or pairs (backend, options), which the layers
            repeat: 3 linear layers, then an exact one.
        activation: "relu", "gelu", "gelu-tanh", "silu", or of a gated network "swiglu" or "geglu".
        norm: "post", or "pre".
        norm_type: "layer" or "rms".
        norm_eps: Constant under the root of the norms; None: torch's.
        final_norm: Whether a norm follows the last block; None: if norm is "pre".
        dropout: Dropout probability on residual branches and embeddings (0.1 in the paper).
        positions: "sinusoidal", "learned" (needs max_tokens), "rotary", "relative" or None.
        seed: Random seed of the random features, spawned per layer; weights use PyTorch's global generator.
        checkpoint: Whether the activations of each block are computed again in the backward pass instead of
            being kept (Chen et al. 2016).
        device, dtype: Device and dtype of parameters and buffers, as of torch's layers.
        options: Further arguments of AttentionLayer: num_kv_heads, head_dim, scale, bias, qk_norm,
            rotary_base, rotary_scaling, options of the backend.
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
        causal: bool = False,
        max_tokens: int | None = None,
        seed: int = 0,
        checkpoint: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        positive_count("num_layers", num_layers)
        self.checkpoint = checkpoint
        layers = each_layer(Encoder, backend, options, num_layers)
        self.embedding_input = EmbeddingInput(positions, model_dim, dropout, max_tokens)
        accept_names(self, _NAMES)
        blocks = [
            TransformerBlock(
                model_dim,
                num_heads,
                spec,
                feed_forward_dim=feed_forward_dim,
                activation=activation,
                norm=norm,
                norm_type=norm_type,
                norm_eps=norm_eps,
                dropout=dropout,
                positions=inside_blocks(positions),
                causal=causal,
                max_tokens=max_tokens,
                **seeded(spec, layer_options, layer_seed),
            )
            for (spec, layer_options), layer_seed in zip(layers, spawn_seeds(seed, num_layers), strict=True)
        ]
        share_layers([block.attention for block in blocks])
        # The element type of a ModuleList is unknown to type checkers.
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = build_final_norm(final_norm, norm, norm_type, model_dim, norm_eps)
        self.to(device=device, dtype=dtype)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """x [batch tokens model_dim] to the same shape; key_mask is bool [batch tokens]."""
        x = self.embedding_input(x)
        for block in self.blocks:
            x = run_block(block, x, key_mask=key_mask, again=self.checkpoint)
        return self.norm(x)

    def extend(
        self, x: Tensor, state: EncoderState | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, EncoderState]:
        """Output of new tokens that follow `state`, and the new state; only if causal."""
        start, before = (0, (None,) * len(self.blocks)) if state is None else state
        y, after = self.embedding_input(x, start), []
        for block, seen in zip(self.blocks, before, strict=True):
            y, seen = block.extend(y, seen, key_mask=key_mask)
            after.append(seen)
        return self.norm(y), EncoderState(start + whole_tokens(x.shape[1]), tuple(after))


class Decoder(nn.Module):
    """Stack of DecoderBlocks; without cross_backend, a decoder-only stack.

    Args:
        cross_backend: Backend of the cross-attention, with capability `cross`. None: no cross-attention.
        cross_options: Further arguments of the cross-attention layer, including options of its backend.

    The other arguments are the same as of Encoder.
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
        cross_backend: Any = "exact",
        cross_options: Mapping[str, Any] | None = None,
        checkpoint: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        positive_count("num_layers", num_layers)
        self.checkpoint = checkpoint
        layers = each_layer(Decoder, backend, options, num_layers)
        cross = None if cross_backend is None else resolve(cross_backend)
        seeds = spawn_seeds(seed, 2 * num_layers)
        self.embedding_input = EmbeddingInput(positions, model_dim, dropout, max_tokens)
        accept_names(self, _NAMES)
        blocks = [
            DecoderBlock(
                model_dim,
                num_heads,
                spec,
                feed_forward_dim=feed_forward_dim,
                activation=activation,
                norm=norm,
                norm_type=norm_type,
                norm_eps=norm_eps,
                dropout=dropout,
                positions=inside_blocks(positions),
                max_tokens=max_tokens,
                cross_backend=cross,
                cross_options=None if cross is None else seeded(cross, cross_options or {}, cross_seed),
                **seeded(spec, layer_options, layer_seed),
            )
            for (spec, layer_options), layer_seed, cross_seed in zip(
                layers, seeds[::2], seeds[1::2], strict=True
            )
        ]
        share_layers([block.cross_attention for block in blocks if block.cross_attention is not None])
        # The element type of a ModuleList is unknown to type checkers.
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = build_final_norm(final_norm, norm, norm_type, model_dim, norm_eps)
        self.to(device=device, dtype=dtype)

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
            key_mask: Mask of x, [batch tokens].
            context_mask: Mask of the context, [batch context_tokens].
        """
        x = self.embedding_input(x)
        for block in self.blocks:
            masks = {"key_mask": key_mask, "context_mask": context_mask}
            x = run_block(block, x, context, again=self.checkpoint, **masks)
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
        """Output of new tokens that follow `state`, and the new state.

        Args:
            context: Context to project and keep in the state; None: the context in the state.
        """
        start, before = (0, (None,) * len(self.blocks)) if state is None else state
        y, after = self.embedding_input(x, start), []
        for block, seen in zip(self.blocks, before, strict=True):
            y, seen = block.extend(y, seen, context, key_mask=key_mask, context_mask=context_mask)
            after.append(seen)
        return self.norm(y), DecoderState(start + whole_tokens(x.shape[1]), tuple(after))
