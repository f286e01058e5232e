"""Layers, blocks and stacks of small sizes, their inputs, and torch's weights in ours."""

from typing import Any

import torch
from torch import Tensor, nn

import efficient_attn as ea

DIM, HEADS, WIDE, LAYERS, TOKENS, CONTEXT = 32, 4, 48, 2, 12, 7
STACKS = (ea.Encoder, ea.Decoder, ea.Transformer)
STACK = {"num_layers": LAYERS, "feed_forward_dim": WIDE}
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}


def options(name: str) -> dict[str, int]:
    """Sizes of a backend for sequences of twelve tokens."""
    if name.startswith("performer"):
        return {"num_features": 32}
    return {"window": {"window": 5}, "linformer": {"rank": 4}}.get(name, {})


def build(kind: Any, name: Any = "exact", **arguments: Any) -> Any:
    """A module in float64 from always the same weights, calibrated if it has to be."""
    sizes: dict[str, Any] = {"max_tokens": TOKENS}
    if kind in STACKS:
        sizes |= STACK
    elif kind is not ea.AttentionLayer:
        sizes["feed_forward_dim"] = WIDE
    torch.manual_seed(0)
    module = kind(DIM, HEADS, name, **{**sizes, **options(str(name)), **arguments}).double()
    typical = (sequence(seed=9), sequence(CONTEXT, seed=8))
    if any(isinstance(part, ea.Backend) and part.needs_calibration for part in module.modules()):
        ea.calibrate(module, *typical[: 2 if kind in (ea.Decoder, ea.Transformer) else 1])
    return module


def sequence(tokens: int = TOKENS, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small embeddings [2 tokens DIM], so that signed features keep their denominators away from zero."""
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(2, tokens, DIM, generator=generator, dtype=dtype)


def mask(tokens: int) -> Tensor:
    """True for real tokens: all of the first sequence, half of the second."""
    real = torch.ones(2, tokens, dtype=torch.bool)
    real[1, tokens // 2 :] = False
    return real


def disturb(module: nn.Module, seed: int) -> None:
    """Noise on all parameters, so that no bias is 0 and no norm is 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
