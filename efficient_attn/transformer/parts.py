"""Shared parts of encoder and decoder: input, final norm, seeds and shared projections."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor, nn

from efficient_attn.modules.options import probability, whole_number
from efficient_attn.registry import BackendSpec
from efficient_attn.transformer.layer import AttentionLayer, check_sequence
from efficient_attn.transformer.positions import build_positions


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
        return self.dropout(self.positions(x, start))


def inside_blocks(positions: str | None) -> str | None:
    """Positions that the blocks apply themselves; EmbeddingInput adds the others."""
    return positions if positions == "rotary" else None


def final_norm(norm: str, model_dim: int) -> nn.Module:
    """Norm after the last pre-norm block, which leaves the residual stream unnormalised."""
    return nn.LayerNorm(model_dim) if norm == "pre" else nn.Identity()


def spawn_seeds(seed: int, count: int) -> list[int]:
    """Independent seeds, each a function of `seed` and its index."""
    whole_number("seed", seed)
    return [int(child.generate_state(1)[0]) for child in np.random.SeedSequence(seed).spawn(count)]


def seeded(spec: BackendSpec, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The options, with `seed` as the default of a backend with random features."""
    draws = any(field.name == "seed" for field in fields(spec.options_type))
    return {"seed": seed, **options} if draws else dict(options)


def share_layers(layers: list[AttentionLayer]) -> None:
    """Share the backend parameters of the first layer with all layers if its option `sharing` is "layers".

    The other layers hold the module without registering it, so that parameters and state dict contain it
    once and a deep copy keeps it shared.
    """
    backends = [layer.backend for layer in layers]
    if not backends or getattr(backends[0].options, "sharing", None) != "layers":
        return
    owner, *others = backends
    for other in others:
        del other.core
        object.__setattr__(other, "core", owner.core)
