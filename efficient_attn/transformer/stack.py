"""Stacks of blocks: encoder, decoder, transformer. Defaults: the base model of Vaswani et al. 2017.

Stacks map embeddings [batch tokens model_dim] to the same shape. The caller provides the vocabulary, the
factor √model_dim on embeddings (section 3.4 there) and the shift of a decoder's input by one token.
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from efficient_attn import sharding
from efficient_attn.backends import resolve, seeded, spawn_seeds
from efficient_attn.errors import OptionError
from efficient_attn.options import one_of
from efficient_attn.problem import positive_count
from efficient_attn.registry import BackendSpec
from efficient_attn.sharding import at_positions, installed, whole_tokens
from efficient_attn.transformer.block import BlockOptions, TransformerBlock, accept_names
from efficient_attn.transformer.layer import AttentionLayer, check_arguments, check_mask, check_sequence
from efficient_attn.transformer.positions import KINDS, LearnedPositions, add_sinusoidal_positions, check_even

# Names of submodules in torch's stacks.
_NAMES = {"layers": "blocks"}


class StackState(NamedTuple):
    """Streaming state of a stack: number of past tokens, and the state of each block."""

    tokens: int
    blocks: tuple[Any, ...]


class EmbeddingInput(nn.Module):
    """Embeddings with their positions, then dropout (Vaswani et al. 2017, sections 3.5 and 5.4)."""

    positions: Callable[[Tensor, int], Tensor] | None

    def __init__(self, kind: str | None, model_dim: int, dropout: float, max_tokens: int | None) -> None:
        super().__init__()
        positive_count("model_dim", model_dim)
        self._model_dim = model_dim
        self.dropout = nn.Dropout(dropout)
        self.positions = None
        if kind is not None:
            one_of("positions", kind, KINDS)
        if kind == "sinusoidal":
            check_even("model_dim", model_dim, kind)
            self.positions = add_sinusoidal_positions
        elif kind == "learned":
            if max_tokens is None:
                raise OptionError("positions='learned' is a table of the longest sequence: give max_tokens.")
            positive_count("max_tokens", max_tokens)
            self.positions = LearnedPositions(model_dim, max_tokens)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        check_sequence("x", x, self._model_dim)
        if self.positions is not None:
            x = at_positions(self.positions, x, start)
        return self.dropout(x)


class Encoder(nn.Module):
    """Stack of TransformerBlocks, with causal=True the body of a language model.

    Args:
        backend: Backend, as for `build`, or a list of backends or pairs (backend, options), which the layers
            repeat: 3 linear layers, then an exact one.
        final_norm: Whether a norm follows the last block; None: if norm is "pre".
        positions: "sinusoidal", "learned" (needs max_tokens), "rotary" or None.
        seed: Random seed of the random features, spawned per layer; weights use PyTorch's global generator.
        checkpoint: Whether the activations of each block are computed again in the backward pass instead of
            being kept (Chen et al. 2016).
        device, dtype: Device and dtype of parameters and buffers, as of torch's layers.
        cross_backend, cross_options, options: As for `TransformerBlock`; dropout acts on embeddings too.
    """

    def __init__(
        self,
        model_dim: int = 512,
        num_heads: int = 8,
        backend: Any = "exact",
        *,
        num_layers: int = 6,
        final_norm: bool | None = None,
        positions: str | None = "sinusoidal",
        causal: bool = False,
        max_tokens: int | None = None,
        seed: int = 0,
        cross_backend: Any = None,
        cross_options: Mapping[str, Any] | None = None,
        checkpoint: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        positive_count("num_layers", num_layers)
        self.checkpoint = checkpoint
        layers = each_layer((type(self), Encoder), backend, options, num_layers)
        sublayers, _ = BlockOptions.split(options)
        cross = None if cross_backend is None else resolve(cross_backend)
        # Each layer has a seed for every attention in it.
        step = 1 if cross is None else 2
        seeds = spawn_seeds(seed, step * num_layers)
        self.embedding_input = EmbeddingInput(positions, model_dim, sublayers.dropout, max_tokens)
        accept_names(self, _NAMES)
        blocks = [
            TransformerBlock(
                model_dim,
                num_heads,
                spec,
                positions="rotary" if positions == "rotary" else None,
                causal=causal,
                max_tokens=max_tokens,
                cross_backend=cross,
                cross_options=None if cross is None else seeded(cross, cross_options or {}, cross_seed),
                **seeded(spec, layer_options, layer_seed),
            )
            for (spec, layer_options), layer_seed, cross_seed in zip(
                layers, seeds[::step], seeds[step - 1 :: step], strict=True
            )
        ]
        share_layers([block.attention for block in blocks])
        share_layers([block.cross_attention for block in blocks if block.cross_attention is not None])
        self.blocks: Any = nn.ModuleList(blocks)
        # The residual stream of pre-norm blocks is not normalised.
        final = sublayers.norm == "pre" if final_norm is None else final_norm
        self.norm = sublayers.build_norm(model_dim) if final else nn.Identity()
        self.to(device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Map x [batch tokens model_dim] to the same shape. Masks are bool, True for a real token.

        Args:
            context: [batch context_tokens model_dim], the output of another stack, for cross-attention.
            key_mask: Mask of x, [batch tokens].
            context_mask: Mask of the context, [batch context_tokens].
        """
        x = self.embedding_input(x)
        masks: dict[str, Any] = {"key_mask": key_mask, "context_mask": context_mask}
        for block in self.blocks:
            if self.checkpoint and torch.is_grad_enabled():
                run = block if sharding.hook is None else partial(_run_inside, sharding.hook, block)
                x = checkpoint(run, x, context, use_reentrant=False, **masks)
            else:
                x = block(x, context, **masks)
        return self.norm(x)

    def extend(
        self,
        x: Tensor,
        state: StackState | None = None,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, StackState]:
        """Output of new tokens that follow `state`, and the new state. Only for causal stacks.

        Args:
            context: Context to project and keep in the state; None: the context in the state.
        """
        start, before = (0, (None,) * len(self.blocks)) if state is None else state
        y, after = self.embedding_input(x, start), []
        masks = {"key_mask": key_mask, "context_mask": context_mask}
        for block, seen in zip(self.blocks, before, strict=True):
            y, seen = block.extend(y, seen, context, **masks)
            after.append(seen)
        return self.norm(y), StackState(start + whole_tokens(x.shape[1]), tuple(after))


class Decoder(Encoder):
    """Causal Encoder whose blocks also read a context."""

    def __init__(
        self,
        model_dim: int = 512,
        num_heads: int = 8,
        backend: Any = "exact",
        *,
        causal: bool = True,
        cross_backend: Any = "exact",
        **options: Any,
    ) -> None:
        super().__init__(model_dim, num_heads, backend, causal=causal, cross_backend=cross_backend, **options)


class Transformer(nn.Module):
    """An encoder of the source and a decoder of the target that reads the encoder's output.

    Args:
        backend: Backend of the encoder's self-attention, and of the decoder's if decoder_backend is None.
        decoder_backend: Causal backend of the decoder's self-attention.
        decoder_options: Options of the decoder's layers; without decoder_backend, added to `options`.
        cross_backend: Backend of the decoder's cross-attention.

    All other arguments are passed to both Encoder and Decoder.
    """

    def __init__(
        self,
        model_dim: int = 512,
        num_heads: int = 8,
        backend: Any = "exact",
        *,
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
        backend = resolve_pairs(backend, options, Transformer, Encoder)
        names = {*signature(Encoder).parameters, *signature(BlockOptions).parameters}
        shared = {name: options.pop(name) for name in (names - {"options", "causal"}) & options.keys()}
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
            **{**(decoder_options or {}), "causal": True},
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
        state: StackState | None = None,
        source: Tensor | None = None,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> tuple[Tensor, StackState]:
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


def share_layers(layers: list[AttentionLayer]) -> None:
    """Share backend parameters between all layers whose option `sharing` is "layers".

    The other layers hold the module without registering it, so that parameters and state dict contain it
    once and a deep copy keeps it shared.
    """
    backends = [
        layer.backend for layer in layers if getattr(layer.backend.options, "sharing", None) == "layers"
    ]
    for reader in backends[1:]:
        del reader.core
        object.__setattr__(reader, "core", backends[0].core)


def resolve_pairs(
    backend: Any, options: Mapping[str, Any], *modules: type[nn.Module]
) -> list[tuple[BackendSpec, Mapping[str, Any]]]:
    entries = backend if isinstance(backend, list) else [(backend, {})]
    pairs = [entry if isinstance(entry, tuple) else (entry, {}) for entry in entries]
    specs = [(resolve(name), layer_options) for name, layer_options in pairs]
    check_arguments(options, (*modules, BlockOptions, AttentionLayer), [spec for spec, _ in specs])
    return specs


def each_layer(
    stacks: tuple[type[nn.Module], ...], backend: Any, options: Mapping[str, Any], num_layers: int
) -> list[tuple[BackendSpec, dict[str, Any]]]:
    """Spec and options of each layer: of one backend, or of a list that the layers repeat."""
    pairs = resolve_pairs(backend, options, *stacks)
    if not pairs or num_layers % len(pairs):
        raise OptionError(
            f"A list of backends is repeated over the layers: num_layers={num_layers} is no multiple of its "
            f"length, {len(pairs)}."
        )
    layers = [(spec, {**options, **layer_options}) for spec, layer_options in pairs]
    return layers * (num_layers // len(pairs))


def _run_inside(hook: Any, block: nn.Module, *inputs: Any, **masks: Any) -> Tensor:
    # The backward pass may be outside of the context that the forward pass was in.
    with installed(hook):
        return block(*inputs, **masks)
