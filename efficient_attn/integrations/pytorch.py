"""Backends in nn.MultiheadAttention layers, also those of nn.TransformerEncoder and nn.Transformer."""

from dataclasses import fields
from fnmatch import fnmatchcase
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn

from efficient_attn.backend import Backend
from efficient_attn.backends import build, resolve, seeded, spawn_seeds
from efficient_attn.errors import AttentionError, OptionError, UnknownNameError, UnsupportedError
from efficient_attn.integrations.intercept.calls import Site
from efficient_attn.integrations.intercept.installed import (
    ATTRIBUTE,
    ReplacedSites,
    SiteBackends,
    forbid_nesting,
    install_backends,
    refuse_alone,
)
from efficient_attn.options import probability
from efficient_attn.registry import BackendSpec
from efficient_attn.transformer.layer import share_layers


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
) -> ReplacedSites:
    """Replace the attention of nn.MultiheadAttention layers in place, until `undo()`.

    This includes the attention of nn.TransformerEncoderLayer and nn.TransformerDecoderLayer, in training and
    in evaluation. Layers keep their parameters, hooks and state-dict names. If a layer cannot be replaced, no
    layer is changed. A call that an approximate backend cannot serve raises an error; a call that `exact`
    cannot serve, such as one that returns weights, is computed by torch.

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
        OptionError: If a layer has a backend already.
        UnsupportedError: If the backend does not support a layer; the message names the layer.
    """
    spec, chosen = resolve(backend), _chosen_layers(model, only)
    backends = {}
    for (name, layer), layer_seed in zip(chosen.items(), spawn_seeds(seed, len(chosen)), strict=True):
        try:
            _check_layer(model, name, spec, layer.dropout if dropout is None else dropout)
            backends[name] = build(
                spec,
                head_dim=layer.head_dim,
                num_heads=layer.num_heads,
                causal=_is_causal(model, name, spec, causal),
                max_tokens=max_tokens,
                **seeded(spec, options, layer_seed),
            )
        except AttentionError as error:
            error.args = (f"{name or 'model'}: {error}",)
            raise
    # All checks are done: the model is modified only from here on, where no error can occur.
    layers: Any = [SimpleNamespace(backend=x) for x in backends.values()]
    share_layers(layers)
    replaced = ReplacedSites(
        served={str(Site(name, 0)): spec.name for name in chosen}, left={}, _owners=dict(chosen), _restore=[]
    )
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.MultiheadAttention)
            and name not in chosen
            and not hasattr(module, ATTRIBUTE)
        ):
            left_out = f"only={only!r} leaves it out"
            replaced._restore.append(refuse_alone(model, name, name, left_out))
    for name, layer in chosen.items():
        replaced._restore += [
            partial(setattr, layer, "dropout", layer.dropout),
            install_backends(layer, _site_backends(name, layer, backends[name])),
        ]
        layer.dropout = layer.dropout if dropout is None else dropout
    replaced._restore += forbid_nesting(model, list(chosen.values()))
    return replaced


def _site_backends(name: str, layer: nn.MultiheadAttention, backend: Backend) -> SiteBackends:
    """The backend of a layer; torch computes calls that exact attention cannot serve."""
    weight = layer.out_proj.weight
    backend.to(device=weight.device, dtype=weight.dtype)
    strict = not backend.spec.capabilities.exact
    return SiteBackends(name, {"0": backend}, num_calls=1, strict=strict).train(layer.training)


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


def _check_layer(model: nn.Module, name: str, spec: BackendSpec, dropout: float) -> None:
    """Refuse a layer that the backend does not support."""
    layer: Any = model.get_submodule(name)
    probability("dropout", dropout)
    if type(layer) is not nn.MultiheadAttention:
        kind = type(layer).__name__
        raise UnsupportedError(f"{kind} has its own implementation; exclude it by `only`.")
    if hasattr(layer, ATTRIBUTE):
        raise OptionError("a backend serves this layer already: undo() it first.")
    if layer.add_zero_attn or layer.bias_k is not None:
        argument = "add_zero_attn" if layer.add_zero_attn else "add_bias_kv"
        raise UnsupportedError(
            f"{argument}=True adds a key, which no backend supports; exclude it by `only`."
        )
    if dropout and all(option.name != "dropout" for option in fields(spec.options_type)):
        raise UnsupportedError(
            f"Backend {spec.name!r} has no attention weights to drop, and dropout is {dropout}: use "
            "dropout=0.0 or backend='exact'."
        )
    if _is_cross(model, name) and not spec.capabilities.cross:
        raise UnsupportedError(
            f"Backend {spec.name!r} has no cross-attention: only='*.self_attn' excludes such layers."
        )
