"""The attention function that transformers calls."""

from typing import Any

from torch import Tensor

from efficient_attn import sharding
from efficient_attn.backend import Backend
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.masks import CAUSAL, FULL, Pattern
from efficient_attn.integrations.transformers.masking import VisibleKeys, visible_in

# attn_implementation of attached models.
NAME = "efficient_attn"
# Name of the submodule that `attach` adds to an attention module.
SUBMODULE = "efficient_attn"
# Attribute of an attached backend that holds the expected pattern.
PATTERN = "_efficient_attn_pattern"
# Attribute that attaches the layer of a StateCache to its keys.
STATE = "_efficient_attn_state"
NO_WEIGHTS = (
    "output_attentions: attention weights are never materialised; use attn_implementation='eager', or "
    "backend.attention_weights(q, k) with q and k of a layer."
)

# Arguments of attention functions that no backend supports, in words.
_REFUSED = {
    "cache": "pages its cache (cache)",
    "block_table": "pages its cache (block_table)",
    "indices": "reads the keys of an index (indices)",
    "block_indices": "reads the keys of an index (block_indices)",
    "softcap": "caps its scores (softcap)",
    "s_aux": "has attention sinks (s_aux)",
    "sinks": "has attention sinks (sinks)",
    "position_bias": "adds a position bias to its scores (position_bias)",
    "cu_seq_lens_q": "packs sequences into one row (cu_seq_lens_q)",
    "cu_seq_lens_k": "packs sequences into one row (cu_seq_lens_k)",
}


def attend(
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
    """Attention function of attached models: the output [batch tokens heads value_dim], and no weights.

    Raises:
        UnsupportedError: If no backend is attached, or it does not support an argument.
    """
    if sharding.hook is not None:
        raise UnsupportedError(
            f"{type(module).__name__} is of transformers, whose positions and masks are of the tokens of "
            "this process alone inside context_parallel; call the model outside, on whole sequences."
        )
    backend = _attached_backend(module)
    _refuse_arguments(module, arguments)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    visible = _visible_keys(module, query, key, attention_mask, causal, getattr(backend, PATTERN))
    _check_built_for(backend, visible.pattern)
    # Some models scale the queries themselves, although an attribute declares a scale, and pass 1.
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    if factor != backend.problem.factor:
        query = query * (factor / backend.problem.factor)
    if dropout:
        values = module.config.to_dict() if hasattr(module, "config") else {}
        names = [name for name in values if "drop" in name and name.startswith(("attention", "attn"))]
        field = next((name for name in names if values[name] == dropout), "attention_dropout")
        raise UnsupportedError(
            f"This model drops {dropout:g} of its attention weights in training, and attached backends drop "
            f"none: load it with from_pretrained(…, {field}=0.0)."
        )
    return _run_backend(backend, query, key, value, visible), None


def _attached_backend(module: Any) -> Any:
    backend = getattr(module, SUBMODULE, None)
    if backend is None:
        raise UnsupportedError(
            f"No backend is attached to this {type(module).__name__}; call attach(model, …), or load(path) "
            "for a saved model, both of efficient_attn.integrations.transformers."
        )
    return backend


def _visible_keys(
    module: Any, query: Tensor, key: Tensor, mask: Any, causal: bool, expected: Pattern
) -> VisibleKeys:
    """Visible keys by the mask, or else by the causality of the call."""
    visible = visible_in(mask, query.shape[0], query.shape[2], key.shape[2], causal=expected == CAUSAL)
    if visible is not None:
        return visible
    if getattr(module, "sliding_window", None) is not None:
        raise UnsupportedError(
            f"{type(module).__name__} has a sliding window but got no mask; use attn_implementation='sdpa'."
        )
    return VisibleKeys(CAUSAL if causal else FULL, 0, key.shape[2], None)


def _refuse_arguments(module: Any, arguments: dict[str, Any]) -> None:
    for name, what in _REFUSED.items():
        if arguments.get(name) is not None:
            raise UnsupportedError(
                f"{type(module).__name__} {what}, which no backend supports; use the model's own attention, "
                "attn_implementation='eager'."
            )
    if arguments.get("output_attentions"):
        raise UnsupportedError(NO_WEIGHTS)


def _check_built_for(backend: Backend, pattern: Pattern) -> None:
    """Refuse another pattern than at the time of `attach`."""
    expected = getattr(backend, PATTERN)
    if pattern.irregular is not None:
        raise UnsupportedError(
            f"This layer reads {pattern}, which no backend supports; use the model's own attention, "
            "attn_implementation='sdpa'."
        )
    if pattern != expected:
        raise UnsupportedError(
            f"This layer reads {pattern}, and backend {backend.spec.name!r} was attached to one that reads "
            f"{expected}; attach again, or use attn_implementation='sdpa' if that changes nothing."
        )


def _run_backend(backend: Backend, query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys) -> Tensor:
    """The output in transformers' layout [batch tokens heads value_dim]."""
    layer = getattr(key, STATE, None)
    if layer is not None:
        return layer.extend(backend, query, key, value, visible.key_mask).transpose(1, 2).contiguous()
    earlier = visible.keys - query.shape[2]
    dropped = visible.first_key and (visible.pattern.back is None or earlier < visible.pattern.back)
    if dropped or key.shape[2] < visible.keys:
        raise UnsupportedError(
            "This model copies or changes the keys of its cache, so that no state can be kept; "
            "use transformers' own cache."
        )
    k, v = key[:, :, : visible.keys], value[:, :, : visible.keys]
    return backend(query, k, v, key_mask=visible.key_mask).transpose(1, 2).contiguous()
