"""Replacement of nn.MultiheadAttention layers in a model, and its reversal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from efficient_attn.backend import Backend
from efficient_attn.backends import resolve
from efficient_attn.errors import AttentionError, UnknownNameError, UnsupportedError
from efficient_attn.integrations.pytorch import MultiheadAttention, build_for, use_backend
from efficient_attn.registry import BackendSpec
from efficient_attn.sharding import check_exact_alone
from efficient_attn.transformer.parts import seeded, share_layers
from efficient_attn.transformer.seeds import spawn_seeds


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """Layers changed by `replace_attention`, and their earlier state.

    Attributes:
        layers: Replaced layers, which are the model's own modules, by name.
        before: Dropout and backend of each layer before; the backend of a torch layer is None.
        encoders: Enclosing nn.TransformerEncoder modules whose nested tensors were turned off.
    """

    layers: Mapping[str, nn.MultiheadAttention]
    before: Mapping[str, tuple[float, Backend | None]]
    encoders: tuple[nn.TransformerEncoder, ...]
    _restore: list[Callable[[], None]]

    def undo(self) -> None:
        """Restore every layer; parameters keep their trained values."""
        while self._restore:
            self._restore.pop()()
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
    """Replace the attention of every nn.MultiheadAttention of a model, in place; `undo()` reverts it.

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
    spec, found = resolve(backend), _layers(model, only)
    backends = {}
    for (name, layer), layer_seed in zip(found.items(), spawn_seeds(seed, len(found)), strict=True):
        try:
            backends[name] = build_for(
                spec,
                layer.head_dim,
                layer.num_heads,
                dropout=layer.dropout if dropout is None else dropout,
                causal=_causal(model, name, spec, causal),
                max_tokens=max_tokens,
                **seeded(spec, options, layer_seed),
            )
            _check(model, name, backends[name])
        except AttentionError as error:
            error.args = (f"{name}: {error}",)
            raise
    # All checks are done: the model is modified only from here on, where no error can occur.
    replaced = Replaced(
        layers=found,
        before={name: (layer.dropout, getattr(layer, "backend", None)) for name, layer in found.items()},
        encoders=tuple(nesting(model, list(found.values()))),
        _restore=[],
    )
    for name, layer in model.named_modules():
        served = name in found or isinstance(layer, MultiheadAttention)
        if isinstance(layer, nn.MultiheadAttention) and not served:
            replaced._restore.append(refuse_alone(model, name, name, f"only={only!r} leaves it out"))
    for name, layer in found.items():
        use_backend(layer, backends[name])
        layer.dropout = layer.dropout if dropout is None else dropout
    layers: Any = list(found.values())  # share_layers is of our own layers, and reads their backends only
    share_layers(layers)
    # In evaluation the encoder would pack padded sequences into nested tensors and drop the mask.
    for encoder in replaced.encoders:
        encoder.use_nested_tensor = False
    return replaced


def _layers(model: nn.Module, only: str) -> dict[str, nn.MultiheadAttention]:
    """Attention layers of a model whose names match a pattern."""
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


def _causal(model: nn.Module, name: str, spec: BackendSpec, causal: bool | None) -> bool:
    if causal is None:
        decodes = name.endswith("self_attn") and _in_decoder_layer(model, name)
        return decodes and not spec.capabilities.exact
    return causal and not _reads_another_sequence(model, name)


def _check(model: nn.Module, name: str, backend: Backend) -> None:
    """Refuse a layer with features that `MultiheadAttention` or the backend does not support."""
    layer = model.get_submodule(name)
    if type(layer) not in (nn.MultiheadAttention, MultiheadAttention):
        kind = type(layer).__name__
        raise UnsupportedError(f"{kind} has its own implementation; exclude it by `only`.")
    if layer.add_zero_attn or layer.bias_k is not None:
        asked = "add_zero_attn" if layer.add_zero_attn else "add_bias_kv"
        raise UnsupportedError(f"{asked}=True adds a key, which no backend supports; exclude it by `only`.")
    if _reads_another_sequence(model, name) and not backend.spec.capabilities.cross:
        raise UnsupportedError(
            f"Backend {backend.spec.name!r} has no cross-attention: only='*.self_attn' excludes such layers."
        )


def refuse_alone(model: nn.Module, name: str, site: str, reason: str) -> Callable[[], None]:
    """Let the forward of a module that stays exact refuse `context_parallel`; returns the removal.

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
    """The forward of a module around attention that stays exact, unless a backend serves it by now."""
    if not isinstance(module, MultiheadAttention):
        check_exact_alone(site, reason)
    return type(owner).forward(owner, *args, **options) if before is None else before(*args, **options)


def nesting(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.TransformerEncoder]:
    """Encoders that hold some of the layers and pack padded sequences into nested tensors."""
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor]
    ours = {id(layer) for layer in layers}
    return [encoder for encoder in encoders if any(id(m) in ours for m in encoder.modules())]
