"""The attention modules of a transformers model: their kind, scale and mask pattern."""

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers.patterns import CAUSAL, FULL, Pattern

KINDS = ("full", "sliding", "cross")

# Attributes of attention modules that only exact attention supports, and their meaning.
_EXACT = {
    "attn_logit_softcapping": "caps its scores (attn_logit_softcapping)",
    "softcap": "caps its scores (softcap)",
    "sinks": "has attention sinks (sinks)",
    # Layers without a bias of their own get the bias of the first layer.
    "has_relative_attention_bias": "adds a position bias to its scores (relative_attention_bias)",
}
# Attributes of attention modules that select keys, and their meaning.
_SELECTING = ("indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention")
_REFUSED = {"indexer": "reads the keys of an index (indexer)"}


class AttentionSite(NamedTuple):
    """One attention module of a model, as described by its code and configuration.

    Attributes:
        path: Name of the module in the model.
        layer: Index of its layer.
        kind: "full", "sliding" or "cross".
        scale: Factor on q·k; None: 1/√head_dim.
        max_tokens: Maximum sequence length of the model; None: unknown.
        num_kv_heads: Number of heads of the keys and values; None: num_heads, or unknown.
        only_exact: Feature that only exact attention supports, in words; None: it has none.
    """

    path: str
    module: Any
    layer: int
    kind: str
    pattern: Pattern
    head_dim: int
    num_heads: int | None
    scale: float | None
    max_tokens: int | None
    num_kv_heads: int | None = None
    only_exact: str | None = None


def find_sites(model: nn.Module) -> list[AttentionSite]:
    """All modules whose attention goes through transformers' attention interface.

    Raises:
        UnsupportedError: If there is no such module, or no backend supports one of them.
    """
    sites = [_site(path, module) for path, module in _calling(model)]
    if not sites:
        kinds = ", ".join(dict.fromkeys(ignored(model).values()))
        raise UnsupportedError(
            f"No attention of this {type(model).__name__} goes through transformers' attention interface"
            f"{f' ({kinds})' if kinds else ''}; no backend can be attached."
        )
    return sites


def ignored(model: nn.Module) -> dict[str, str]:
    """Attention modules whose own code computes attention, whatever attn_implementation names.

    Returns:
        The class name of every such module, by its path; recognised by "Attention" in the name of the class.
    """
    calling = {path for path, _ in _calling(model)}
    named = {path: type(m).__name__ for path, m in model.named_modules() if _is_attention(m)}
    # A container of attention modules computes none itself.
    containers = {parent for path in calling | named.keys() for parent in _parents(path)}
    return {
        path: kind
        for path, kind in named.items()
        if path not in calling | containers and not calling.intersection(_parents(path))
    }


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "attention" in name and not name.endswith("output")


def _parents(path: str) -> list[str]:
    """The paths of all modules around a module."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(len(names))]


def _calling(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            yield path, module


def _site(path: str, module: Any) -> AttentionSite:
    config = module.config
    for attribute, feature in _REFUSED.items():
        if getattr(module, attribute, None) is not None:
            raise UnsupportedError(f"{path} {feature}, which no backend supports; nothing was attached.")
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    layer = int(number[1]) if number else 0
    kind = _kind(path, module, config, layer)
    heads = _first(module, config, "num_heads", "num_attention_heads", "n_heads")
    return AttentionSite(
        path=path,
        module=module,
        layer=layer,
        kind=kind,
        pattern=_pattern(kind, module, config),
        # In latent attention (MLA), `head_dim` is the part of queries and keys with positions.
        head_dim=_first(module, None, "qk_head_dim", "head_dim", "attention_head_size")
        or _head_dim(config, heads),
        num_heads=heads,
        scale=_first(module, None, "scaling", "scale"),
        max_tokens=_first(config, None, "max_position_embeddings", "n_positions"),
        num_kv_heads=_kv_heads(module, config, heads),
        only_exact=_only_exact(module, config, layer),
    )


def _kv_heads(module: Any, config: Any, heads: int | None) -> int | None:
    found = _first(module, config, "num_key_value_heads", "num_kv_heads")
    return None if found == heads else found


def _only_exact(module: Any, config: Any, layer: int) -> str | None:
    for attribute, feature in _EXACT.items():
        if getattr(module, attribute, None) is not None:
            return feature
    types = getattr(config, "layer_types", None) or ()
    return "reads keys in chunks" if layer < len(types) and types[layer] == "chunked_attention" else None


def _kind(path: str, module: Any, config: Any, layer: int) -> str:
    if getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__:
        return "cross"
    # Encoder-decoders like BART use one class for self- and cross-attention; only is_causal differs, and
    # in Pegasus-X and NLLB-MoE only the name.
    own = path.rpartition(".")[2].startswith("self")
    if getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True) and not own:
        return "cross"
    types = getattr(config, "layer_types", None)
    if types is not None and layer < len(types):
        if types[layer] in _SELECTING:
            raise UnsupportedError(
                f"{path} is a layer of type {types[layer]!r}, which no backend supports; nothing is attached."
            )
        # Layers of other types, such as layers of hybrids, are verified by the mask of every call.
        return "sliding" if types[layer] == "sliding_attention" else "full"
    slides = getattr(module if hasattr(module, "sliding_window") else config, "sliding_window", None)
    return "full" if slides is None or not _makes_sliding_masks(module) else "sliding"


def _makes_sliding_masks(module: Any) -> bool:
    """Whether the model code builds sliding-window masks; some configurations set an unused width."""
    names = vars(sys.modules[type(module).__module__])
    return any("sliding_window" in name and "mask" in name for name in names)


def _pattern(kind: str, module: Any, config: Any) -> Pattern:
    """The expected mask pattern of the module; calls with another pattern are refused."""
    reads_back = getattr(module, "is_causal", False) or getattr(module, "is_decoder", False)
    causal = reads_back and getattr(config, "is_causal", True) and kind != "cross"
    if kind != "sliding":
        return CAUSAL if causal else FULL
    # transformers builds its masks from the configuration's width: all keys of the window if causal, the keys
    # on one side if bidirectional. Attributes of modules differ between models.
    width = config.sliding_window
    return Pattern(width - 1, 0) if causal else Pattern(width, width)


def _first(one: Any, other: Any, *names: str) -> Any:
    """The first of these attributes that one object has, or else the other object."""
    found = (getattr(thing, name, None) for thing in (one, other) if thing is not None for name in names)
    return next((value for value in found if value is not None), None)


def _head_dim(config: Any, heads: int | None) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // (heads or config.num_attention_heads)
