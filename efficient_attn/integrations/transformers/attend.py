"""The attention function and the mask function that transformers calls.

A model requests its masks through one function per attention implementation. Ours builds no mask of queries
and keys: it identifies the pattern and keeps the mask of real keys, in O(tokens) memory. The result is a
tensor [batch 1 1 keys], which models pass on and transformers accepts as a prepared mask. Model code that
computes with it is refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from efficient_attn import sharding
from efficient_attn.backend import Backend
from efficient_attn.backends import build_for
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.masks import CAUSAL, FULL, MaskPattern, keys_to_last_query, read_mask
from efficient_attn.integrations.transformers.scores import CappedAttention, SinkAttention

# attn_implementation of attached models.
NAME = "efficient_attn"
# Name of the submodule that `attach` adds to an attention module.
SUBMODULE = "efficient_attn"
# Attribute of an attached backend that holds the expected pattern.
PATTERN = "_efficient_attn_pattern"
# Attribute that attaches the layer of a StateCache to its keys.
STATE = "_efficient_attn_state"
# Attribute of attention modules whose scores are cap · tanh(score / cap); None: they are not.
SOFT_CAP = "attn_logit_softcapping"
NO_WEIGHTS = (
    "output_attentions: attention weights are never materialised; use attn_implementation='eager', or "
    "backend.attention_weights(q, k) with q and k of a layer."
)
PAST = (
    "attention_mask hides or shows tokens unlike when they were read, which {} cannot follow; pass the same "
    "mask for earlier tokens, or use transformers' own cache."
)

# Arguments of attention functions that no backend supports.
_REFUSED = (
    *("cache", "block_table", "indices", "block_indices", "sinks", "position_bias"),
    *("cu_seq_lens_q", "cu_seq_lens_k"),
)

# Attributes of a tensor that expose its entries, methods that read no entry, and methods that copy all.
_ENTRIES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_DESCRIBING = {
    *("dim", "size", "stride", "numel", "is_contiguous", "is_floating_point", "is_complex", "is_conj"),
    *("is_neg", "_is_view", "storage_offset", "untyped_storage", "__len__", "__repr__"),
}
_MOVING = {"to", "cpu", "cuda", "contiguous", "clone", "detach"}


class VisibleKeys(NamedTuple):
    """Visible keys of one forward pass.

    Attributes:
        first_key: Position of the first key, above 0 if a cache has dropped earlier keys.
        keys: Number of keys, including empty slots of a static cache.
        key_mask: bool [batch keys], True for a real token; None: all are real.
        text: bool [batch tokens], the mask of all tokens so far; None: all are real.
        ends: As in `ShownKeys`.
    """

    pattern: MaskPattern
    first_key: int
    keys: int
    key_mask: Tensor | None
    text: Tensor | None = None
    ends: Tensor | None = None


class Mask(Tensor):
    """Mask of one pattern for our attention functions."""

    visible: VisibleKeys

    @classmethod
    def of(cls, entries: Tensor, visible: VisibleKeys) -> "Mask":
        mask = entries.as_subclass(cls)
        mask.visible = visible
        return mask

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in _DESCRIBING or (
                name in ("__get__", "__set__") and func.__self__.__name__ not in _ENTRIES
            ):
                return func(*args, **(kwargs or {}))
            if name in _MOVING and isinstance(mask := args[0], Mask):
                moved, visible = func(*args, **(kwargs or {})), mask.visible
                if moved.dtype == mask.dtype:
                    masks = (visible.key_mask, visible.text)
                    key_mask, text = (None if x is None else x.to(moved.device) for x in masks)
                    return cls.of(moved, visible._replace(key_mask=key_mask, text=text))
        raise UnsupportedError(
            "This model computes with its mask of queries and keys, which no backend builds; use the model's "
            "own attention, attn_implementation='sdpa'."
        )


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = None,
    config: Any = None,
    use_vmap: bool = False,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    **_: Any,
) -> Tensor:
    """Mask function of our attention function, called once per pattern."""
    if torch.compiler.is_compiling():
        bidirectional = allow_is_bidirectional_skip is not None
        plain = not use_vmap and (bidirectional or allow_is_causal_skip)
        width = local_size if plain and getattr(config, "attention_chunk_size", None) is None else None
        pattern = _compiled_pattern(mask_function, width, bidirectional)
    else:
        pattern = _read_pattern(mask_function)
    keys = min(kv_length, int(q_offset) + q_length - kv_offset) if pattern.causal else kv_length
    text = _real_keys(attention_mask, 0, kv_offset + keys)
    key_mask = _real_keys(text, kv_offset, keys) if kv_offset else text
    shown = torch.ones(1, 1, dtype=torch.bool, device=device) if key_mask is None else key_mask
    entries = shown[:, None, None, :].expand(batch_size, 1, 1, keys).contiguous()
    return Mask.of(entries, VisibleKeys(pattern, kv_offset, keys, key_mask, text))


def visible_in(mask: Any, batch: int, queries: int, keys: int, *, causal: bool) -> VisibleKeys | None:
    """Visible keys of a mask of `make_mask`, or of a prepared mask.

    A prepared mask of one query does not show whether the layer is causal.
    """
    if mask is None:
        return None
    if isinstance(mask, Mask):
        return mask.visible
    if not isinstance(mask, Tensor):
        raise UnsupportedError(
            f"attention_mask is a {type(mask).__name__}; pass a mask of real tokens [batch, tokens]."
        )
    fits = mask.ndim == 4 and mask.shape[-1] in (1, keys) and mask.shape[0] in (1, batch)
    fits = fits or isinstance(mask, CausalBias)
    # A learned mask is a bias, even if it is zero at first.
    fits = fits and not mask.requires_grad
    shown = read_mask(mask, batch=batch, q_tokens=queries, k_tokens=keys) if fits else ""
    if isinstance(shown, str):
        return VisibleKeys(
            MaskPattern(None, None, f"a mask {list(mask.shape)} of queries and keys"), 0, keys, None
        )
    triangle = shown.causal or (causal and queries == 1)
    ends = shown.ends if triangle else None
    return VisibleKeys(CAUSAL if triangle else FULL, 0, keys, shown.key_mask, shown.key_mask, ends)


def _real_keys(attention_mask: Tensor | None, first: int, keys: int) -> Tensor | None:
    """Copy of the mask of these keys. None if all are real."""
    if attention_mask is None:
        return None
    real = attention_mask[:, first : first + keys].bool()
    # As in transformers, keys beyond the end of the mask are padding.
    real = F.pad(real, (0, keys - real.shape[1]))
    # A compiled graph has one form for all masks.
    return None if not torch.compiler.is_compiling() and bool(real.all()) else real


def _read_pattern(mask_function: Callable) -> MaskPattern:
    """The pattern of one of transformers' mask functions."""
    back = ahead = None
    for part in _intersected(mask_function):
        name = _function_name(part)
        if part is causal_mask_function:
            ahead = 0
        elif name == "sliding_window_overlay":
            back = _closure_value(part, "sliding_window") - 1
        elif name == "sliding_window_bidirectional_overlay":
            back = ahead = _closure_value(part, "sliding_window")
        elif part is not bidirectional_mask_function:
            return MaskPattern(None, None, f"keys by the pattern {name!r}")
    return MaskPattern(back, ahead)


def _compiled_pattern(mask_function: Callable, width: int | None, bidirectional: bool) -> MaskPattern:
    """As `_read_pattern`, in code that is compiled, where closures are not read.

    The width of a window is from the other arguments of a mask function, None where none is certain.
    """
    if mask_function is causal_mask_function:
        return CAUSAL
    if mask_function is bidirectional_mask_function:
        return FULL
    # The compiler of torch 2.8 reads no `__qualname__` of an inner function, but puts it into `__name__`.
    if width is not None and mask_function.__name__.endswith("and_mask"):
        return MaskPattern(width, width) if bidirectional else MaskPattern(width - 1, 0)
    return MaskPattern(
        None, None, "a mask that compiled code does not name (without packed sequences, pass attention_mask)"
    )


def _intersected(mask_function: Callable) -> Iterator[Callable]:
    if _function_name(mask_function) != "and_masks":
        yield mask_function
        return
    for part in _closure_value(mask_function, "mask_functions"):
        yield from _intersected(part)


def _function_name(function: Callable) -> str:
    """Name of the function, or of the transformers function that created it."""
    return getattr(function, "__qualname__", repr(function)).partition(".<locals>")[0]


def _closure_value(function: Any, name: str) -> Any:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name not in cells:
        raise UnsupportedError(
            f"This version of transformers builds the mask {_function_name(function)!r} in a way that "
            "efficient_attn does not know; use attn_implementation='sdpa'."
        )
    return cells[name].cell_contents


def backend_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention function of attached models: the output [batch tokens heads value_dim], and no weights."""
    if sharding.hook is not None:
        raise UnsupportedError(
            f"{type(module).__name__} is of transformers, whose positions and masks are of the tokens of "
            "this process alone inside context_parallel; call the model outside, on whole sequences."
        )
    backend, kind = getattr(module, SUBMODULE, None), type(module).__name__
    if backend is None:
        raise UnsupportedError(
            f"No backend is attached to this {kind}; call attach(model, …), or load(path) for a saved model, "
            "both of efficient_attn.integrations.transformers."
        )
    refused = [*_REFUSED]
    # A backend as wide as the queries has no column for a sink, and `attach` looks for the attribute of caps.
    refused += ["s_aux"] if query.shape[-1] == backend.problem.head_dim else []
    refused += ["softcap"] if getattr(module, SOFT_CAP, None) is None else []
    for name in refused:
        if arguments.get(name) is not None:
            raise UnsupportedError(
                f"{kind} computes with {name!r}, which no backend supports; use the model's own attention, "
                "attn_implementation='eager'."
            )
    if arguments.get("output_attentions"):
        raise UnsupportedError(NO_WEIGHTS)
    if dropout:
        raise UnsupportedError(
            f"This model drops {dropout:g} of its attention weights in training, and attached backends drop "
            "none: load it with from_pretrained(…, attention_dropout=0.0), the name of many configurations; "
            "others are attention_probs_dropout_prob and attn_pdrop."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    visible = _visible_keys(module, query, key, attention_mask, causal, backend)
    if visible.pattern.causal != backend.problem.causal:
        # Some models choose the causality of exact attention in the call.
        problem = replace(backend.problem, causal=visible.pattern.causal)
        backend = build_for(problem, backend.spec, vars(backend.options)).train(backend.training)
    # Some models scale the queries themselves, although an attribute declares a scale, and pass 1.
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    if factor != backend.problem.factor:
        query = query * (factor / backend.problem.factor)
    sinks, cap = arguments.get("s_aux"), arguments.get("softcap")
    attention: Any = backend if sinks is None else SinkAttention(backend, sinks)
    attention = attention if cap is None else CappedAttention(backend, cap)
    return _run_backend(attention, query, key, value, visible), None


def _visible_keys(
    module: Any, query: Tensor, key: Tensor, mask: Any, causal: bool, backend: Backend
) -> VisibleKeys:
    """Visible keys by the mask, or by the causality of a call without mask, in the pattern of `attach`."""
    expected = getattr(backend, PATTERN)
    visible = visible_in(mask, query.shape[0], query.shape[2], key.shape[2], causal=expected == CAUSAL)
    if visible is None:
        if getattr(module, "sliding_window", None) is not None:
            raise UnsupportedError(
                f"{type(module).__name__} has a sliding window but got no mask; use "
                "attn_implementation='sdpa'."
            )
        visible = VisibleKeys(CAUSAL if causal else FULL, 0, key.shape[2], None)
    if visible.pattern.irregular is not None:
        raise UnsupportedError(
            f"This layer reads {visible.pattern}, which no backend supports; use the model's own attention, "
            "attn_implementation='sdpa'."
        )
    either = backend.spec.capabilities.exact and not visible.pattern.sliding
    if visible.pattern != expected and not either:
        raise UnsupportedError(
            f"This layer reads {visible.pattern}, and its backend was attached to one that reads {expected}; "
            "attach again if its configuration changed, or use 'exact', which has both causalities, or "
            "attn_implementation='sdpa'."
        )
    return visible


def _run_backend(backend: Any, query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys) -> Tensor:
    """The output in transformers' layout [batch tokens heads value_dim]."""
    layer = getattr(key, STATE, None)
    if layer is not None:
        out = layer.extend(backend, query, key, value, visible.key_mask, visible.text)
        return out.transpose(1, 2).contiguous()
    earlier = visible.keys - query.shape[2]
    dropped = visible.first_key and (visible.pattern.back is None or earlier < visible.pattern.back)
    if dropped or key.shape[2] < visible.keys:
        raise UnsupportedError(
            "This model copies or changes the keys of its cache, so that no state can be kept; "
            "use transformers' own cache."
        )
    k, v = key[:, :, : visible.keys], value[:, :, : visible.keys]
    k, v, key_mask = keys_to_last_query(k, v, visible.key_mask, visible.ends)
    return backend(query, k, v, key_mask=key_mask).transpose(1, 2).contiguous()


AttentionInterface.register(NAME, backend_attention)
# Without a mask function of the same name transformers silently drops all masks.
AttentionMaskInterface.register(NAME, make_mask)
