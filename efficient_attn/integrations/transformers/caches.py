"""Cache for generation with a state for each layer.

The state of linear attention is a sum, and the state of a window its last keys and values: neither grows with
the text. The state of exact attention is the usual KV cache.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from efficient_attn.backend import Backend
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.masks import MaskPattern
from efficient_attn.integrations.transformers.attend import NAME, PAST, PATTERN, STATE, SUBMODULE
from efficient_attn.integrations.transformers.sites import AttentionSite, find_sites, unwrap
from efficient_attn.ops.softmax.kv_cache import KVCache
from efficient_attn.ops.window.streaming import WindowState, hide_tokens

# Attribute of a mask that names the earlier mask which it continues.
_COMPARED = "_efficient_attn_compared"


class StateCache(Cache):
    """States of a decoder, for `generate(past_key_values=StateCache(model))`.

    The cache is bound to the backends attached at its creation. `crop` is not supported, since tokens cannot
    be removed from a sum.

    Raises:
        UnsupportedError: If the model does not attend through efficient_attn, or a backend has no state.
    """

    def __init__(self, model: nn.Module) -> None:
        sites = find_sites(unwrap(model))
        for site in sites:
            _check_streams(site)
        super().__init__(layers=[StateLayer() for _ in range(1 + max(site.layer for site in sites))])


class StateLayer(CacheLayerMixin):
    """The state of one layer. A sliding layer has `back` earlier keys in its window."""

    def __init__(self, back: int | None = None) -> None:
        super().__init__()
        self.seen, self.back, self.is_sliding = 0, back or 0, back is not None
        # Whether the last keys are not part of the state yet.
        self.unread = False
        # A NamedTuple of tensors, or a tuple of such; None before the first token.
        self.state: Any = None
        # Mask of the tokens that the state has read, bool [batch tokens]; None: all were real.
        self.read: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return new keys and values, with this layer as an attribute."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.seen += key_states.shape[-2]
        self.unread = True
        key_states = key_states.view_as(key_states)
        setattr(key_states, STATE, self)
        return key_states, value_states

    def extend(
        self, backend: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, text: Tensor | None
    ) -> Tensor:
        """Output of the new tokens, the last ones of `key_mask` and of all in `text`. Updates the state."""
        if not self.unread:
            raise UnsupportedError(
                "Several layers of this model read the same keys, of which a state has only the new ones; "
                "use_cache=False works, or no StateCache and no global_tokens in sliding layers."
            )
        self.unread = False
        self._follow(text, self.seen - k.shape[2], backend)
        if key_mask is not None:
            key_mask = key_mask[:, key_mask.shape[1] - k.shape[2] :]
        out, self.state = backend.extend(q, k, v, self.state, key_mask=key_mask)
        return out

    def _follow(self, text: Tensor | None, past: int, backend: Any) -> None:
        """Hide earlier tokens that a later mask hides. Compiled code refuses such a mask."""
        read, self.read = self.read, text
        mask = text if read is None else read
        # All layers of a step have the same masks, and the first layer compares them.
        if past == 0 or mask is None or getattr(text, _COMPARED, None) == id(read):
            return
        ones = mask.new_ones(len(mask), past)
        earlier, shown = (ones if x is None else x[:, :past] for x in (read, text))
        if torch.compiler.is_compiling():
            torch._assert_async((earlier == shown).all(), PAST.format("compiled code"))
        elif not torch.equal(earlier, shown):
            # A sink is the first token of a state.
            if hasattr(backend, "sinks"):
                earlier, shown = (F.pad(x, (1, 0), value=True) for x in (earlier, shown))
            backend = getattr(backend, "backend", backend)
            self.state = _hidden(self.state, earlier, shown, name=backend.spec.name)
        elif text is not None:
            setattr(text, _COMPARED, id(read))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys and position of the first key, with the keys in a sliding layer's cache."""
        earlier = min(self.seen, self.back)
        return earlier + query_length, self.seen - earlier

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.seen, self.state, self.read = 0, None, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda x: x[indices])

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise UnsupportedError(
                "A state cannot remove tokens; assisted generation needs transformers' own cache, and no "
                "global_tokens in sliding layers."
            )

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to all tensors of the state and to its mask, [batch …]."""
        self.state, self.read = tree_map_only(Tensor, change, (self.state, self.read))


def _hidden(state: Any, read: Tensor, shown: Tensor, *, name: str) -> Any:
    """The state with past tokens masked that were `read` and are not `shown`, both bool [batch tokens]."""
    if type(state) is tuple:
        return tuple(part if part is None else _hidden(part, read, shown, name=name) for part in state)
    hidden = None
    # Keys that were masked are not part of a state.
    if isinstance(state, (KVCache, WindowState)) and shown.shape == read.shape and not (shown & ~read).any():
        hidden = hide_tokens(state, read, shown)
    if hidden is None:
        raise UnsupportedError(PAST.format(f"the state of {name!r}"))
    return hidden


def _check_streams(site: AttentionSite) -> None:
    if not site.pattern.causal:
        raise UnsupportedError(
            f"{site.path} is {site.kind} attention and not causal: it has no state; "
            "a StateCache is for decoders."
        )
    backend = getattr(site.module, SUBMODULE, None)
    if site.module.config._attn_implementation != NAME or backend is None:
        raise UnsupportedError(
            "This model does not attend through efficient_attn, which a StateCache requires: attach first."
        )
    if not backend.spec.capabilities.streaming:
        raise UnsupportedError(f"The backend of {site.path} has no state; use transformers' own cache.")


def needs_state(module: Any, pattern: MaskPattern) -> bool:
    """Whether the cache of a sliding layer drops keys that its backend reads: global tokens."""
    parts = (part for part in getattr(module, SUBMODULE).modules() if isinstance(part, Backend))
    # A learned sink is a global token that is in no cache.
    learned = getattr(module, "sinks", None) is not None
    streaming = any(getattr(part.options, "global_tokens", 0) > learned for part in parts)
    return streaming and pattern.sliding and pattern.causal


def replace_cache_layer(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Put a state in place of the cache of a sliding layer, before its first token."""
    backend: Any = getattr(module, SUBMODULE, None)
    cache: Any = next((x for x in (*args, *named.values()) if isinstance(x, Cache)), None)
    attached = backend is not None and module.config._attn_implementation == NAME
    if cache is None or not attached:
        return
    layers, number = getattr(cache, "self_attention_cache", cache).layers, module.layer_idx
    layer: Any = layers[number] if number < len(layers) else None
    # Layers that do not slide keep all keys.
    if isinstance(layer, StateLayer) or not getattr(layer, "is_sliding", False):
        return
    if not needs_state(module, getattr(backend, PATTERN)):
        return
    replaceable = type(layer) in (DynamicSlidingWindowLayer, StaticSlidingWindowLayer)
    if not replaceable or layer.get_seq_length():
        raise UnsupportedError(
            f"{type(module).__name__} reads global_tokens, which this {type(layer).__name__} drops; "
            "use an empty cache of transformers, a StateCache, or use_cache=False."
        )
    layers[number] = StateLayer(getattr(backend, PATTERN).back)
