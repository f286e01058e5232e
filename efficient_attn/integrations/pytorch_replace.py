"""Another attention in a model that is built of torch's own layers, and the way back."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from efficient_attn.backend import Backend
from efficient_attn.backends import resolve
from efficient_attn.errors import AttentionError, UnknownNameError, UnsupportedError
from efficient_attn.integrations.pytorch import MultiheadAttention, build_for, use_backend
from efficient_attn.transformer.parts import seeded, share_layers, spawn_seeds


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """What `replace_attention` changed, and what was there before.

    Attributes:
        layers: The replaced layers, the model's own modules, by their names in it.
        before: Each one's dropout and backend; the backend of a layer of torch's own is None.
        encoders: Each nn.TransformerEncoder around them whose nested tensors were turned off.
    """

    layers: Mapping[str, nn.MultiheadAttention]
    before: Mapping[str, tuple[float, Backend | None]]
    encoders: tuple[nn.TransformerEncoder, ...]

    def undo(self) -> None:
        """Give every layer back what it had; its parameters stay as training has left them."""
        for name, layer in self.layers.items():
            layer.dropout, backend = self.before[name]
            if backend is not None:
                use_backend(layer, backend)
            elif isinstance(layer, MultiheadAttention):
                del layer.backend
                layer.__class__ = nn.MultiheadAttention  # type: ignore[assignment]  # a class, not an attribute
                layer._qkv_same_embed_dim = layer.in_proj_weight is not None
        for encoder in self.encoders:
            encoder.use_nested_tensor = True


def replace_attention(
    model: nn.Module,
    backend: Any,
    *,
    only: str = "*",
    causal: bool | None = None,
    dropout: float | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Replaced:
    """Let a backend compute in every nn.MultiheadAttention of a model, in place; `undo()` ends it.

    That includes those in nn.TransformerEncoderLayer and nn.TransformerDecoderLayer, in training and in
    evaluation. Layers keep their parameters and hooks, and names in the state dict. If one layer cannot
    be replaced, none is.

    Args:
        model: Is changed.
        backend: Whatever `build` takes: a name, file.py:object, a module, a function.
        only: Pattern of the names of the layers to replace, as in a shell: "encoder.*", "*.self_attn".
        causal: Whether the layers are; None: those called self_attn of nn.TransformerDecoderLayer are and
            no others. What reads another sequence, multihead_attn there, never is.
        dropout: Probability of dropping a weight; None keeps that of each layer.
        max_tokens: The longest sequence, for backends that have to know it.
        seed: Gives each layer's random features a draw of their own.
        options: The options of the backend.

    Raises:
        UnknownNameError: If no layer's name fits `only`, or there is no such backend or option.
        UnsupportedError: If the backend does not promise what a layer needs; the message names the layer.
    """
    spec, found = resolve(backend), _layers(model, only)
    backends = {}
    for (name, layer), layer_seed in zip(found.items(), spawn_seeds(seed, len(found)), strict=True):
        try:
            backends[name] = build_for(
                spec,
                layer.head_dim,
                layer.num_heads,
                dropout=layer.dropout if dropout is None else dropout,
                causal=_causal(model, name, causal),
                max_tokens=max_tokens,
                **seeded(spec, options, layer_seed),
            )
            _check(model, name, backends[name])
        except AttentionError as error:
            error.args = (f"{name}: {error}",)
            raise
    # Nothing of the model has been touched so far, and nothing below can fail.
    replaced = Replaced(
        layers=found,
        before={name: (layer.dropout, getattr(layer, "backend", None)) for name, layer in found.items()},
        encoders=tuple(_nesting(model, list(found.values()))),
    )
    for name, layer in found.items():
        use_backend(layer, backends[name])
        layer.dropout = layer.dropout if dropout is None else dropout
    layers: Any = list(found.values())  # share_layers is of our own layers, and reads their backends only
    share_layers(layers)
    # In evaluation it would pack padded sequences and drop the mask before the layers see either.
    for encoder in replaced.encoders:
        encoder.use_nested_tensor = False
    return replaced


def _layers(model: nn.Module, only: str) -> dict[str, nn.MultiheadAttention]:
    """The attention layers of a model whose names fit a pattern."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    fitting = {name: layer for name, layer in layers.items() if fnmatchcase(name, only)}
    if not layers:
        raise UnsupportedError(f"{type(model).__name__} has no nn.MultiheadAttention to replace.")
    if not fitting:
        raise UnknownNameError("nn.MultiheadAttention of the model", only, layers)
    return fitting


def _reads_another_sequence(model: nn.Module, name: str) -> bool:
    return name.endswith("multihead_attn") and _in_decoder_layer(model, name)


def _in_decoder_layer(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.TransformerDecoderLayer)


def _causal(model: nn.Module, name: str, causal: bool | None) -> bool:
    if causal is None:
        return name.endswith("self_attn") and _in_decoder_layer(model, name)
    return causal and not _reads_another_sequence(model, name)


def _check(model: nn.Module, name: str, backend: Backend) -> None:
    """Refuse a layer that does more than ours, or that the backend cannot serve."""
    layer = model.get_submodule(name)
    if type(layer) not in (nn.MultiheadAttention, MultiheadAttention):
        kind = type(layer).__name__
        raise UnsupportedError(f"{kind} computes in its own way; leave it out by `only`.")
    if layer.add_zero_attn or layer.bias_k is not None:
        asked = "add_zero_attn" if layer.add_zero_attn else "add_bias_kv"
        raise UnsupportedError(f"{asked}=True adds a key that no backend has; leave the layer out by `only`.")
    if _reads_another_sequence(model, name) and not backend.spec.capabilities.cross:
        raise UnsupportedError(
            f"Backend {backend.spec.name!r} cannot read another sequence: only='*.self_attn' leaves it out."
        )


def _nesting(model: nn.Module, layers: list[nn.MultiheadAttention]) -> list[nn.TransformerEncoder]:
    """The encoders that hold some of the layers and pack padded sequences into nested tensors."""
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor]
    ours = {id(layer) for layer in layers}
    return [encoder for encoder in encoders if any(id(m) in ours for m in encoder.modules())]
