"""Argument checks of `MultiheadAttention`, in torch's terms."""

from typing import Any

from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.errors import DtypeError, ShapeError, UnsupportedError


def check_call(layer: Any, query: Tensor, key: Tensor, value: Tensor, need_weights: bool) -> None:
    """Refuse arguments that do not fit the layer or that its backend does not support.

    Raises:
        UnsupportedError, ShapeError, DtypeError: If an argument does not fit.
    """
    if need_weights and not layer.backend.spec.capabilities.exact:
        raise UnsupportedError(
            f"Backend {layer.backend.spec.name!r} computes no weights: pass need_weights=False (torch's "
            "default is True). layer.backend.attention_weights(q, k) returns its implied weights."
        )
    if layer.dropout != dropout_of(layer.backend):
        raise UnsupportedError(
            f"dropout is {layer.dropout} and the backend was built with {dropout_of(layer.backend)}: "
            "it is fixed when the layer is built or replaced."
        )
    for name, x, dim in (
        ("query", query, layer.embed_dim),
        ("key", key, layer.kdim),
        ("value", value, layer.vdim),
    ):
        if x.is_nested:
            raise UnsupportedError(
                f"{name} is a nested tensor, which no backend supports: pad it and pass key_padding_mask; "
                "an enclosing nn.TransformerEncoder needs use_nested_tensor=False."
            )
        if not x.is_floating_point():
            raise DtypeError(f"{name} is {x.dtype}; expected floating-point embeddings.")
        if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != dim:
            axes = "[batch, tokens, dim]" if layer.batch_first else "[tokens, batch, dim]"
            raise ShapeError(
                f"{name} has shape {list(x.shape)}; all three are {axes}, or all [tokens, dim], {name} "
                f"with dim={dim}."
            )
    if key.shape[:-1] != value.shape[:-1]:
        raise ShapeError(f"key has shape {list(key.shape)} and value {list(value.shape)}: tokens differ.")


def dropout_of(backend: Backend) -> float:
    """Probability of dropping an attention weight in training."""
    return getattr(backend.options, "dropout", 0.0)
