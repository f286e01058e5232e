"""The checks of a call of `MultiheadAttention`, in the words of torch's arguments."""

from typing import Any

from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.errors import DtypeError, ShapeError, UnsupportedError


def check_call(layer: Any, query: Tensor, key: Tensor, value: Tensor, need_weights: bool) -> None:
    """Refuse what does not fit the layer, or what its backend has not got.

    Raises:
        UnsupportedError, ShapeError, DtypeError: As the message says.
    """
    if need_weights and not layer.backend.spec.capabilities.exact:
        raise UnsupportedError(
            f"Backend {layer.backend.spec.name!r} computes no weights: pass need_weights=False, True by "
            "default in torch. layer.backend.attention_weights(q, k) gives those that it implies."
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
                f"{name} is a nested tensor, which no backend reads: pad it and give key_padding_mask; "
                "an nn.TransformerEncoder around this layer needs use_nested_tensor=False."
            )
        if not x.is_floating_point():
            raise DtypeError(f"{name} is {x.dtype}; wanted are embeddings, as nn.Embedding gives them.")
        if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != dim:
            axes = "[batch, tokens, dim]" if layer.batch_first else "[tokens, batch, dim]"
            raise ShapeError(
                f"{name} has shape {list(x.shape)}; all three are {axes}, or all [tokens, dim], {name} "
                f"with dim={dim}."
            )
    if key.shape[:-1] != value.shape[:-1]:
        raise ShapeError(f"key has shape {list(key.shape)} and value {list(value.shape)}: tokens differ.")


def dropout_of(backend: Backend) -> float:
    """The probability with which a backend drops weights in training."""
    return getattr(backend.options, "dropout", 0.0)
