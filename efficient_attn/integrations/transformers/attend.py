"""The attention functions that transformers calls, and what they refuse instead of ignoring it."""

from collections.abc import Callable
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.backends import build, spec
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers.masks import CAUSAL, FULL, Pattern, Visible, visible_in

# What a configuration names as its attention, alone or before ".<backend>".
NAME = "efficient_attn"
# The name of the submodule that `attach` puts into an attention module.
PLACE = "efficient_attn"
# The attribute of an attached backend that holds the pattern of its place.
PATTERN = "_efficient_attn_pattern"
# The attribute by which a cache of ours travels with the keys that it was given.
STATE = "_efficient_attn_state"

NO_WEIGHTS = (
    "output_attentions: no attention weights are ever built here; use attn_implementation='eager', or "
    "backend.attention_weights(q, k) on q and k of a layer."
)

_REFUSED = {
    "softcap": "caps the scores (softcap)",
    "s_aux": "has attention sinks (s_aux)",
    "position_bias": "adds a position bias to the scores (position_bias)",
    "cache": "pages its cache (cache)",
    "cu_seq_lens_q": "packs sequences into one row (cu_seq_lens_q)",
    "cu_seq_lens_k": "packs sequences into one row (cu_seq_lens_k)",
    "block_table": "pages its cache (block_table)",
}


def attend_attached(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention by the backend that `attach` has put into the module.

    Raises:
        UnsupportedError: If nothing is attached, or the model asks for what the backend cannot honour.
    """
    backend = getattr(module, PLACE, None)
    if backend is None:
        raise UnsupportedError(
            f"Nothing is attached to this {type(module).__name__}; call attach(model, …), or load(path) for "
            "a saved model, both of efficient_attn.integrations.transformers."
        )
    _refuse(module, others)
    visible = _visible(module, key, attention_mask, is_causal)
    _check_built_for(backend, visible.pattern)
    query = _scaled(query, scaling, backend)
    if dropout:
        backend = _with_dropout(backend, dropout, module)
    return _run(backend, query, key, value, visible), None


def attention_function(name: str) -> Callable[..., tuple[Tensor, None]]:
    """The attention function of a backend that keeps nothing, for transformers' table."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        _refuse(module, others)
        visible = _visible(module, key, attention_mask, is_causal)
        backend = _stateless(name, query.shape[-1], visible.pattern, scaling)
        if dropout:
            backend = _with_dropout(backend, dropout, module)
        return _run(backend, query, key, value, visible), None

    return attend


def serving(name: str, pattern: Pattern) -> tuple[str, dict[str, int]]:
    """The backend that serves a pattern in the name of another, and its options.

    Where a model slides, exact attention to what it shows is a window of the model's own width.
    """
    if pattern.window is None:
        return name, {}
    if name in ("exact", "window"):
        return "window", {"window": pattern.window}
    raise UnsupportedError(
        f"Backend {name!r} cannot honour a layer that is {pattern}; 'window' and 'exact' can: attach(model, "
        f"full={name!r}) leaves such layers exact."
    )


def _visible(module: Any, key: Tensor, mask: Any, is_causal: bool | None) -> Visible:
    """What the mask says; without a mask, what the module says of itself."""
    visible = visible_in(mask)
    if visible is not None:
        return visible
    if getattr(module, "sliding_window", None) is not None:
        raise UnsupportedError(
            f"{type(module).__name__} slides and was given no mask that says how; "
            "use attn_implementation='sdpa'."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return Visible(CAUSAL if causal else FULL, 0, key.shape[2], None)


def _refuse(module: Any, others: dict[str, Any]) -> None:
    for name, what in _REFUSED.items():
        if others.get(name) is not None:
            raise UnsupportedError(
                f"{type(module).__name__} {what}, which no backend honours; use attn_implementation='eager'."
            )
    if others.get("output_attentions"):
        raise UnsupportedError(NO_WEIGHTS)


def _scaled(query: Tensor, scaling: float | None, backend: Backend) -> Tensor:
    """The queries, times what is missing where a model scales otherwise than its module says.

    Some scale queries themselves, say so in an attribute and then ask for a factor of 1.
    """
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    return query if factor == backend.problem.factor else query * (factor / backend.problem.factor)


def _check_built_for(backend: Backend, pattern: Pattern) -> None:
    """Refuse a call with another pattern than the configuration of the model had when `attach` read it."""
    expected = getattr(backend, PATTERN)
    if pattern != expected:
        raise UnsupportedError(
            f"This layer reads {pattern}, and backend {backend.spec.name!r} was attached to one that reads "
            f"{expected}; attach again, or use attn_implementation='sdpa' if that changes nothing."
        )


def _run(backend: Backend, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Tensor:
    """The output [batch tokens heads value_dim], laid out as transformers wants it."""
    layer = getattr(key, STATE, None)
    if layer is not None:
        return layer.extend(backend, query, key, value, visible.key_mask).transpose(1, 2).contiguous()
    earlier = visible.keys - query.shape[2]
    if visible.first_key and (visible.pattern.back is None or earlier < visible.pattern.back):
        raise UnsupportedError(
            "This model does not hand the keys of its cache on as they are, so that no state can be kept; "
            "use transformers' own cache."
        )
    k, v = key[:, :, : visible.keys], value[:, :, : visible.keys]
    return backend(query, k, v, key_mask=visible.key_mask).transpose(1, 2).contiguous()


@lru_cache(maxsize=256)
def _stateless(name: str, head_dim: int, pattern: Pattern, scale: float | None) -> Backend:
    served, options = serving(name, pattern)
    keeps = spec(served).capabilities.needs_max_tokens
    if not keeps:
        backend = build(served, head_dim=head_dim, causal=pattern.causal, scale=scale, **options)
        keeps = any(True for _ in backend.parameters()) or any(True for _ in backend.buffers())
    if keeps:
        raise UnsupportedError(
            f"Backend {name!r} keeps parameters or a random draw, which belong into the model: "
            f"attach(model, {name!r}) of efficient_attn.integrations.transformers puts them there."
        )
    return backend


def _with_dropout(backend: Backend, dropout: float, module: Any) -> Backend:
    """The same backend, dropping weights as the model asks in training."""
    if not any(field.name == "dropout" for field in fields(backend.spec.options_type)):
        field = _dropout_field(getattr(module, "config", None), dropout)
        raise UnsupportedError(
            f"Backend {backend.spec.name!r} has no attention weights to drop, and this model drops "
            f"{dropout:g} of them in training: load it with from_pretrained(…, {field}=0.0)."
        )
    return _dropping(backend.spec.name, backend.problem, tuple(asdict(backend.options).items()), dropout)


@lru_cache(maxsize=64)
def _dropping(name: str, problem: Any, options: tuple[tuple[str, Any], ...], dropout: float) -> Backend:
    return build(name, **asdict(problem), **{**dict(options), "dropout": dropout})


def _dropout_field(config: Any, dropout: float) -> str:
    """The field of a configuration that says how many attention weights are dropped."""
    known = config.to_dict() if config is not None else {}
    fitting = [
        name
        for name, value in known.items()
        if ("drop" in name and name.startswith(("attention", "attn"))) and value == dropout
    ]
    return fitting[0] if fitting else "attention_dropout"
