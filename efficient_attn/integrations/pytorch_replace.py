"""Replacement of nn.MultiheadAttention layers in a model, and its reversal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from efficient_attn.backend import Backend
from efficient_attn.backends import resolve, seeded, spawn_seeds
from efficient_attn.errors import AttentionError, UnknownNameError, UnsupportedError
from efficient_attn.integrations.pytorch import MultiheadAttention, build_for, use_backend
from efficient_attn.registry import BackendSpec
from efficient_attn.sharding import check_exact_alone
from efficient_attn.transformer.layer import share_layers


@dataclass(frozen=True, kw_only=True)
class ReplacedLayers:
    """Layers changed by `replace_attention`.

    Attributes:
        layers: Replaced layers, which are the model's own modules, by name.
    """

    layers: Mapping[str, nn.MultiheadAttention]
    _restore: list[Callable[[], None]]

    def undo(self) -> None:
        """Restore all layers. Parameters keep their trained values."""
        while self._restore:
            self._restore.pop()()


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
) -> ReplacedLayers:
    """Replace the attention of nn.MultiheadAttention layers in place, until `undo()`.

    This includes the attention of nn.TransformerEncoderLayer and nn.TransformerDecoderLayer, in training and
    in evaluation. Layers keep their parameters, hooks and state-dict names. If a layer cannot be replaced, no
    layer is changed.

    Args:
        model: The model, modified in place.
        backend: Any argument of `build`: a name, file.py:object, a module or a function.
        only: Shell-style pattern of the names of the layers to replace: "encoder.*", "*.self_attn".
        causal: Whether the layers are causal; None: exact backends follow each call, and of the others only
            self_attn of nn.TransformerDecoderLayer is causal. Cross-attention, such as multihead_attn there,
            is never causal.
        dropout: Probability of dropping an attention weight; None keeps the value of each layer.
        max_tokens: Maximum sequence length, for backends that require it.
        seed: Random seed, from which each layer's random features get a seed of their own.
        options: Options of the backend.

    Raises:
        UnknownNameError: If no layer matches `only`, or the backend or an option does not exist.
        UnsupportedError: If the backend does not support a layer; the message names the layer.
    """
    spec, chosen = resolve(backend), _chosen_layers(model, only)
    backends = {}
    for (name, layer), layer_seed in zip(chosen.items(), spawn_seeds(seed, len(chosen)), strict=True):
        try:
            backends[name] = build_for(
                spec,
                layer.head_dim,
                layer.num_heads,
                dropout=layer.dropout if dropout is None else dropout,
                causal=_is_causal(model, name, spec, causal),
                max_tokens=max_tokens,
                **seeded(spec, options, layer_seed),
            )
            _check_layer(model, name, backends[name])
        except AttentionError as error:
            error.args = (f"{name}: {error}",)
            raise
    # All checks are done: the model is modified only from here on, where no error can occur.
    restore: list[Callable[[], None]] = []
    for name, layer in model.named_modules():
        served = name in chosen or isinstance(layer, MultiheadAttention)
        if isinstance(layer, nn.MultiheadAttention) and not served:
            restore.append(refuse_alone(model, name, name, f"only={only!r} leaves it out"))
    for name, layer in chosen.items():
        restore.append(partial(_restore_layer, layer, layer.dropout, getattr(layer, "backend", None)))
        use_backend(layer, backends[name])
        layer.dropout = layer.dropout if dropout is None else dropout
    layers: Any = list(chosen.values())  # share_layers is of our own layers, and reads their backends only
    share_layers(layers)
    for encoder in nesting(model, layers):
        # In evaluation the encoder would pack padded sequences into nested tensors and drop the mask.
        encoder.use_nested_tensor = False
        restore.append(partial(setattr, encoder, "use_nested_tensor", True))
    return ReplacedLayers(layers=chosen, _restore=restore)


def _restore_layer(layer: nn.MultiheadAttention, dropout: float, backend: Backend | None) -> None:
    """Restore dropout and backend of a layer. None: a torch layer."""
    layer.dropout = dropout
    if backend is not None:
        use_backend(layer, backend)
    elif isinstance(layer, MultiheadAttention):
        del layer.backend
        layer.__class__ = nn.MultiheadAttention  # type: ignore[assignment]  # a class, not an attribute
        layer._qkv_same_embed_dim = layer.in_proj_weight is not None


def _chosen_layers(model: nn.Module, only: str) -> dict[str, nn.MultiheadAttention]:
    """Attention layers of a model whose names match a pattern."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    fitting = {name: layer for name, layer in layers.items() if fnmatchcase(name, only)}
    if not layers:
        raise UnsupportedError(f"{type(model).__name__} has no nn.MultiheadAttention to replace.")
    if not fitting:
        raise UnknownNameError("nn.MultiheadAttention of the model", only, layers)
    return fitting


def _is_causal(model: nn.Module, name: str, spec: BackendSpec, causal: bool | None) -> bool:
    if causal is not None:
        return causal and not _is_cross(model, name)
    return name.endswith("self_attn") and _in_decoder_layer(model, name) and not spec.capabilities.exact


def _is_cross(model: nn.Module, name: str) -> bool:
    return name.endswith("multihead_attn") and _in_decoder_layer(model, name)


def _in_decoder_layer(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.TransformerDecoderLayer)


def _check_layer(model: nn.Module, name: str, backend: Backend) -> None:
    """Refuse a layer with features that `MultiheadAttention` or the backend does not support."""
    layer = model.get_submodule(name)
    if type(layer) not in (nn.MultiheadAttention, MultiheadAttention):
        kind = type(layer).__name__
        raise UnsupportedError(f"{kind} has its own implementation; exclude it by `only`.")
    if layer.add_zero_attn or layer.bias_k is not None:
        argument = "add_zero_attn" if layer.add_zero_attn else "add_bias_kv"
        raise UnsupportedError(
            f"{argument}=True adds a key, which no backend supports; exclude it by `only`."
        )
    if _is_cross(model, name) and not backend.spec.capabilities.cross:
        raise UnsupportedError(
            f"Backend {backend.spec.name!r} has no cross-attention: only='*.self_attn' excludes such layers."
        )


def refuse_alone(model: nn.Module, name: str, site: str, reason: str) -> Callable[[], None]:
    """Refuse `context_parallel` in a module, and return the removal.

    Args:
        site: Name of the call in messages.
    """
    module = model.get_submodule(name)
    parent = model.get_submodule(name.rpartition(".")[0])
    # In evaluation the layer of an encoder computes attention without the forward of its attention.
    owner = parent if isinstance(parent, nn.TransformerEncoderLayer) else module
    before = owner.__dict__.get("forward")
    if getattr(before, "func", None) is _forward_whole:
        return lambda: None
    owner.forward = partial(_forward_whole, owner, before, module, site, reason)

    def remove() -> None:
        del owner.forward
        if before is not None:
            owner.forward = before

    return remove


def _forward_whole(
    owner: nn.Module,
    before: Callable[..., Any] | None,
    module: nn.Module,
    site: str,
    reason: str,
    *args: Any,
    **options: Any,
) -> Any:
    """Run a forward around attention that stays exact."""
    if not isinstance(module, MultiheadAttention):
        check_exact_alone(site, reason)
    return type(owner).forward(owner, *args, **options) if before is None else before(*args, **options)


def nesting(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.TransformerEncoder]:
    """Encoders of the layers that use nested tensors."""
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor]
    chosen = {id(layer) for layer in layers}
    return [encoder for encoder in encoders if any(id(m) in chosen for m in encoder.modules())]
