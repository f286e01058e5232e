"""Shared parts of encoder and decoder: input, final norm, options per layer and shared projections."""

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from efficient_attn import sharding
from efficient_attn.backends import resolve
from efficient_attn.errors import OptionError
from efficient_attn.options import probability
from efficient_attn.registry import BackendSpec
from efficient_attn.sharding import Hook, at_positions, installed
from efficient_attn.transformer.block import build_norm
from efficient_attn.transformer.layer import AttentionLayer, check_arguments, check_sequence
from efficient_attn.transformer.positions import INSIDE, build_positions


class EmbeddingInput(nn.Module):
    """Embeddings with their positions, then dropout (Vaswani et al. 2017, sections 3.5 and 5.4)."""

    def __init__(self, positions: str | None, model_dim: int, dropout: float, max_tokens: int | None) -> None:
        super().__init__()
        probability("dropout", dropout)
        self._model_dim = model_dim
        self.positions = build_positions(positions, model_dim, max_tokens)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        check_sequence("x", x, self._model_dim)
        return self.dropout(at_positions(self.positions, x, start))


def inside_blocks(positions: str | None) -> str | None:
    """Positions that the blocks apply themselves; EmbeddingInput adds the others."""
    return positions if positions in INSIDE else None


def build_final_norm(
    final_norm: bool | None, norm: str, norm_type: str, model_dim: int, norm_eps: float | None
) -> nn.Module:
    """Norm after the last block; None: of pre-norm ones, which leave the residual stream unnormalised."""
    present = norm == "pre" if final_norm is None else final_norm
    return build_norm(norm_type, model_dim, norm_eps) if present else nn.Identity()


def resolve_pairs(
    backend: Any, options: Mapping[str, Any], *modules: type[nn.Module]
) -> list[tuple[BackendSpec, Mapping[str, Any]]]:
    """Spec and options of each backend in a list, or of the only backend.

    Raises:
        UnknownNameError: If neither the modules nor a backend have one of the shared options.
    """
    entries = backend if isinstance(backend, list) else [(backend, {})]
    pairs = [entry if isinstance(entry, tuple) else (entry, {}) for entry in entries]
    specs = [(resolve(name), layer_options) for name, layer_options in pairs]
    check_arguments(options, (*modules, AttentionLayer), [spec for spec, _ in specs])
    return specs


def each_layer(
    stack: type[nn.Module], backend: Any, options: Mapping[str, Any], num_layers: int
) -> list[tuple[BackendSpec, dict[str, Any]]]:
    """Spec and options of each layer: of one backend, or of a list that the layers repeat.

    Raises:
        OptionError: If the list does not divide the layers.
        UnknownNameError: If the stack has no such argument.
    """
    pairs = resolve_pairs(backend, options, stack)
    if not pairs or num_layers % len(pairs):
        raise OptionError(
            f"A list of backends is repeated over the layers: num_layers={num_layers} is no multiple of its "
            f"length, {len(pairs)}."
        )
    layers = [(spec, {**options, **layer_options}) for spec, layer_options in pairs]
    return layers * (num_layers // len(pairs))


def run_block(block: nn.Module, x: Tensor, *inputs: Any, again: bool, **masks: Any) -> Tensor:
    """Output of a block; with `again` its activations are computed again in the backward pass."""
    if again and torch.is_grad_enabled():
        run = block if sharding.hook is None else partial(_run_inside, sharding.hook, block)
        return checkpoint(run, x, *inputs, use_reentrant=False, **masks)
    return block(x, *inputs, **masks)


def _run_inside(hook: Hook, block: nn.Module, *inputs: Any, **masks: Any) -> Tensor:
    # The backward pass may be outside of the context that the forward pass was in.
    with installed(hook):
        return block(*inputs, **masks)


def seeded(spec: BackendSpec, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The options, with `seed` as the default of a backend with random features."""
    draws = any(field.name == "seed" for field in fields(spec.options_type))
    return {"seed": seed, **options} if draws else dict(options)


def share_layers(layers: list[AttentionLayer]) -> None:
    """Share the backend parameters of the first layer whose option `sharing` is "layers" with all others.

    The other layers hold the module without registering it, so that parameters and state dict contain it
    once and a deep copy keeps it shared.
    """
    backends = [
        layer.backend for layer in layers if getattr(layer.backend.options, "sharing", None) == "layers"
    ]
    if not backends:
        return
    owner, *readers = backends
    for reader in readers:
        del reader.core
        object.__setattr__(reader, "core", owner.core)
