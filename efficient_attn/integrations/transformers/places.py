"""Where a transformers model attends: which modules, of which kind, over which keys."""

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers.masks import CAUSAL, FULL, Pattern

KINDS = ("full", "sliding", "cross")

# Attributes of attention modules that no backend can honour, and what they mean.
_REFUSED = {
    "attn_logit_softcapping": "caps its scores (attn_logit_softcapping)",
    "sinks": "has attention sinks (sinks)",
    "has_relative_attention_bias": "adds a position bias to the scores (relative_attention_bias)",
}


class Place(NamedTuple):
    """One attention module of a model, as its code and configuration describe it.

    Attributes:
        path: Its name in the model.
        layer: The number of its layer.
        kind: "full", "sliding" or "cross".
        scale: The factor on q·k; None: 1/√head_dim.
        max_tokens: The longest sequence that the model has positions for; None: not said.
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


def find_places(model: nn.Module) -> list[Place]:
    """The modules whose attention goes through transformers' attention interface.

    Raises:
        UnsupportedError: If there is none, or one does what no backend can honour.
    """
    places = [_place(path, module) for path, module in _calling(model)]
    if not places:
        raise UnsupportedError(
            f"No attention of this {type(model).__name__} goes through transformers' attention interface; "
            "nothing can be attached."
        )
    return places


def _calling(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            yield path, module


def _place(path: str, module: Any) -> Place:
    config = module.config
    for attribute, what in _REFUSED.items():
        value = getattr(module, attribute, None)
        if value is not None and value is not False:
            raise UnsupportedError(f"{path} {what}, which no backend honours; nothing was attached.")
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    layer = int(number[1]) if number else 0
    kind = _kind(path, module, config, layer)
    heads = _first(module, config, "num_heads", "num_attention_heads", "n_heads")
    return Place(
        path=path,
        module=module,
        layer=layer,
        kind=kind,
        pattern=_pattern(kind, module, config),
        head_dim=_first(module, None, "head_dim", "attention_head_size") or _head_dim(config, heads),
        num_heads=heads,
        scale=_first(module, None, "scaling", "scale"),
        max_tokens=_first(config, None, "max_position_embeddings", "n_positions"),
    )


def _kind(path: str, module: Any, config: Any, layer: int) -> str:
    if getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__:
        return "cross"
    # Encoder-decoders of BART's kind use one class for both, and say of neither that it is causal but one.
    if getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True):
        return "cross"
    types = getattr(config, "layer_types", None)
    if types is not None and layer < len(types):
        if types[layer] not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(
                f"{path} is a layer of type {types[layer]!r}, which no backend honours; nothing was attached."
            )
        return "sliding" if types[layer] == "sliding_attention" else "full"
    slides = getattr(module if hasattr(module, "sliding_window") else config, "sliding_window", None)
    return "full" if slides is None or not _makes_sliding_masks(module) else "sliding"


def _makes_sliding_masks(module: Any) -> bool:
    """Whether the code of the model knows sliding masks; some configurations have a width that none reads."""
    names = vars(sys.modules[type(module).__module__])
    return any("sliding_window" in name and "mask" in name for name in names)


def _pattern(kind: str, module: Any, config: Any) -> Pattern:
    """The pattern that the model's masks will have; a call with another one is refused."""
    causal = getattr(module, "is_causal", False) and getattr(config, "is_causal", True) and kind != "cross"
    if kind != "sliding":
        return CAUSAL if causal else FULL
    # The number in the configuration is what transformers makes masks of, causal: all keys of the window,
    # bidirectional: those on one side. Attributes of modules differ from model to model.
    width = config.sliding_window
    return Pattern(width - 1, 0) if causal else Pattern(width, width)


def _first(one: Any, other: Any, *names: str) -> Any:
    """The first of some attributes that one object has, or else the other."""
    found = (getattr(thing, name, None) for thing in (one, other) if thing is not None for name in names)
    return next((value for value in found if value is not None), None)


def _head_dim(config: Any, heads: int | None) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // (heads or config.num_attention_heads)
