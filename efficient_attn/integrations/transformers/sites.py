"""The transformers model inside a module, and its attention modules."""

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from efficient_attn.errors import DtypeError, UnsupportedError
from efficient_attn.integrations.masks import CAUSAL, FULL, MaskPattern

# Attributes of attention modules that no backend supports. Layers without a position bias of their own get
# the bias of the first layer.
_REFUSED = ("indexer", "softcap", "has_relative_attention_bias")
# Types of layers that no backend supports.
_REFUSED_TYPES = (
    *("indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
    "chunked_attention",
)


class AttentionSite(NamedTuple):
    """One attention module of a model, as described by its code and configuration.

    Attributes:
        kind: "full", "sliding" or "cross".
        scale: Factor on q·k; None: 1/√head_dim.
        max_tokens: Maximum sequence length of the model; None: unknown.
        num_kv_heads: Number of heads of the keys and values; None: num_heads, or unknown.
        sinks: Whether each head has a learned sink, a score that joins every softmax without a value.
    """

    path: str
    module: Any
    layer: int
    kind: str
    pattern: MaskPattern
    head_dim: int
    num_heads: int | None
    scale: float | None
    max_tokens: int | None
    num_kv_heads: int | None = None
    sinks: bool = False


def unwrap(model: Any) -> PreTrainedModel:
    """The outermost transformers model of a module, such as a PeftModel."""
    models = _outermost_models(model) if isinstance(model, nn.Module) else []
    if not models:
        raise DtypeError(f"model is a transformers model, or holds one, not {type(model).__name__}.")
    if len(models) > 1:
        kinds = " and ".join(type(x).__name__ for x in models[:2])
        raise UnsupportedError(
            f"{type(model).__name__} holds {len(models)} transformers models, {kinds}; attach to one of them."
        )
    return models[0]


def _outermost_models(module: nn.Module) -> list[PreTrainedModel]:
    if isinstance(module, PreTrainedModel):
        return [module]
    models = [model for child in module.children() for model in _outermost_models(child)]
    return list({id(model): model for model in models}.values())


def find_sites(model: nn.Module) -> list[AttentionSite]:
    """All modules whose attention goes through transformers' attention interface."""
    sites = [_site(path, module) for path, module in _calling(model)]
    if not sites:
        kinds = ", ".join(dict.fromkeys(ignored(model).values()))
        raise UnsupportedError(
            f"No attention of this {type(model).__name__} goes through transformers' attention interface"
            f"{f' ({kinds})' if kinds else ''}; no backend can be attached."
        )
    return sites


def ignored(model: nn.Module) -> dict[str, str]:
    """{path: class name} of attention modules whose own code ignores attn_implementation.

    They are recognised by "Attention" in the class name.
    """
    calling = {path for path, _ in _calling(model)}
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    named = {
        path: kind
        for path, kind in kinds.items()
        if "attention" in kind.lower() and not kind.lower().endswith("output")
    }
    # A container of attention modules computes none itself.
    containers = {parent for path in calling | named.keys() for parent in _parents(path)}
    return {
        path: kind
        for path, kind in named.items()
        if path not in calling | containers and not calling.intersection(_parents(path))
    }


def _parents(path: str) -> list[str]:
    """The paths of all modules around a module."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(len(names))]


def _calling(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules whose code calls transformers' attention interface, with their paths."""
    for path, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            yield path, module


def _site(path: str, module: Any) -> AttentionSite:
    config = module.config
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    layer = int(number[1]) if number else 0
    types = getattr(config, "layer_types", None) or ()
    refused = [name for name in _REFUSED if getattr(module, name, None) is not None]
    refused += [name for name in types[layer : layer + 1] if name in _REFUSED_TYPES]
    if refused:
        raise UnsupportedError(
            f"{path} computes with {refused[0]!r}, which no backend supports; keep the model's own "
            "attention. Nothing was attached."
        )
    kind = _site_kind(path, module, config, layer)
    heads = _first_value("num_heads", "num_attention_heads", "n_heads", of=(module, config))
    kv_heads = _first_value("num_key_value_heads", "num_kv_heads", of=(module, config))
    # In latent attention (MLA), `head_dim` is the part of queries and keys with positions.
    head_dim = _first_value("qk_head_dim", "head_dim", "attention_head_size", of=(module,))
    head_dim = head_dim or getattr(config, "head_dim", None)
    return AttentionSite(
        path=path,
        module=module,
        layer=layer,
        kind=kind,
        pattern=_site_pattern(kind, module, config),
        head_dim=head_dim or config.hidden_size // (heads or config.num_attention_heads),
        num_heads=heads,
        scale=_first_value("scaling", "scale", of=(module,)),
        max_tokens=_first_value("max_position_embeddings", "n_positions", of=(config,)),
        num_kv_heads=None if kv_heads == heads else kv_heads,
        sinks=getattr(module, "sinks", None) is not None,
    )


def _first_value(*names: str, of: tuple[Any, ...]) -> Any:
    """First of these attributes that an object has, objects in order."""
    values = (getattr(thing, name, None) for thing in of for name in names)
    return next((value for value in values if value is not None), None)


def _site_kind(path: str, module: Any, config: Any, layer: int) -> str:
    if getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__:
        return "cross"
    # Cross-attention has another attribute name (Moonshine, SAM) or another name of the module around it.
    if re.search(r"(cross_?att\w*|encoder_att\w*)(\.\w+)?$", path):
        return "cross"
    # Encoder-decoders like BART use one class for self- and cross-attention; only is_causal differs, and
    # in Pegasus-X and NLLB-MoE only the name.
    named_self = path.rpartition(".")[2].startswith("self")
    if getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True) and not named_self:
        return "cross"
    types = getattr(config, "layer_types", None)
    if types is not None and layer < len(types):
        # Layers of other types, such as layers of hybrids, are verified by the mask of every call.
        return "sliding" if types[layer] == "sliding_attention" else "full"
    width = getattr(module if hasattr(module, "sliding_window") else config, "sliding_window", None)
    # Some configurations set a width that their model's code never uses in a mask.
    names = vars(sys.modules[type(module).__module__])
    masks = any("sliding_window" in name and "mask" in name for name in names)
    return "full" if width is None or not masks else "sliding"


def _site_pattern(kind: str, module: Any, config: Any) -> MaskPattern:
    reads_back = getattr(module, "is_causal", False) or getattr(module, "is_decoder", False)
    causal = reads_back and getattr(config, "is_causal", True) and kind != "cross"
    if kind != "sliding":
        return CAUSAL if causal else FULL
    # transformers builds its masks from the configuration's width: all keys of the window if causal, the keys
    # on one side if bidirectional. Attributes of modules differ between models.
    width = config.sliding_window
    return MaskPattern(width - 1, 0) if causal else MaskPattern(width, width)
