"""The attention functions that transformers calls; unsupported arguments are refused."""

from collections.abc import Callable
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.compiler import assume_constant_result

from efficient_attn.backend import Backend
from efficient_attn.backends import build, spec
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers.as_written import STATE, attend_as_written, beyond_backends
from efficient_attn.integrations.transformers.masks import Visible, visible_in
from efficient_attn.integrations.transformers.patterns import CAUSAL, FULL, Pattern
from efficient_attn.integrations.transformers.sharded import check_no_pairs

# attn_implementation of attached models, and the prefix of ".<backend>".
NAME = "efficient_attn"
# Name of the submodule that `attach` adds to an attention module.
SUBMODULE = "efficient_attn"
# Attribute of an attached backend that holds the expected pattern.
PATTERN = "_efficient_attn_pattern"
# Backends that serve features of a model's scores and masks that no kernel here has.
EXACT = ("exact", "exact-dense")

NO_WEIGHTS = (
    "output_attentions: attention weights are never materialised; use attn_implementation='eager', or "
    "backend.attention_weights(q, k) with q and k of a layer."
)

_REFUSED = {
    "cache": "pages its cache (cache)",
    "block_table": "pages its cache (block_table)",
    "indices": "reads the keys of an index (indices)",
    "block_indices": "reads the keys of an index (block_indices)",
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
    """Compute attention with the backend that `attach` has added to the module.

    Raises:
        UnsupportedError: If no backend is attached, or it does not support an argument.
    """
    backend = getattr(module, SUBMODULE, None)
    if backend is None:
        raise UnsupportedError(
            f"No backend is attached to this {type(module).__name__}; call attach(model, …), or load(path) "
            "for a saved model, both of efficient_attn.integrations.transformers."
        )
    _refuse(module, others)
    expected = getattr(backend, PATTERN)
    visible = _visible(module, query, key, attention_mask, is_causal, expected)
    beyond = beyond_backends(visible.pattern, others)
    if beyond is not None or expected is None:
        check_no_pairs(type(module).__name__, beyond or "computes its scores in its own code")
    if beyond is None and expected is not None:
        _check_built_for(backend, visible.pattern)
        query = _scaled(query, scaling, backend)
        if dropout:
            backend = _with_dropout(backend, dropout, module)
        return _run(backend, query, key, value, visible), None
    if backend.spec.name not in EXACT and not (expected is not None and expected.sliding):
        raise _only_exact(module, beyond, backend.spec.name)
    out = attend_as_written(module, query, key, value, attention_mask, scaling, dropout, is_causal, others)
    return out, None


def attention_function(name: str) -> Callable[..., tuple[Tensor, None]]:
    """The attention function of a stateless backend, for transformers' table."""

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
        visible = _visible(module, query, key, attention_mask, is_causal, None)
        beyond = beyond_backends(visible.pattern, others)
        if beyond is not None:
            check_no_pairs(type(module).__name__, beyond)
            if name not in EXACT:
                raise _only_exact(module, beyond, name)
            out = attend_as_written(
                module, query, key, value, attention_mask, scaling, dropout, is_causal, others
            )
            return out, None
        pattern = visible.pattern
        place: str = _stateless(name, query.shape[-1], pattern.back, pattern.ahead, scaling)
        backend = getattr(_BUILT, place)
        if dropout:
            backend = _with_dropout(backend, dropout, module)
        return _run(backend, query, key, value, visible), None

    return attend


def serving(name: str, pattern: Pattern) -> tuple[str, dict[str, int]]:
    """The backend and its options for a pattern, given the requested name.

    For a sliding-window layer, exact attention is a window of the model's width.
    """
    if pattern.window is None:
        return name, {}
    if name in ("exact", "window"):
        return "window", {"window": pattern.window}
    raise UnsupportedError(
        f"Backend {name!r} does not support {pattern}; 'window' and 'exact' do: attach(model, "
        f"full={name!r}) leaves such layers exact."
    )


def _visible(
    module: Any, query: Tensor, key: Tensor, mask: Any, is_causal: bool | None, expected: Pattern | None
) -> Visible:
    """The visible keys according to the mask, or without a mask according to the module."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    fits_causal = causal if expected is None else expected == CAUSAL
    visible = visible_in(mask, query.shape[0], query.shape[2], key.shape[2], causal=fits_causal)
    if visible is not None:
        return visible
    if getattr(module, "sliding_window", None) is not None:
        raise UnsupportedError(
            f"{type(module).__name__} has a sliding window but got no mask; use attn_implementation='sdpa'."
        )
    return Visible(CAUSAL if causal else FULL, 0, key.shape[2], None)


def _refuse(module: Any, others: dict[str, Any]) -> None:
    for name, what in _REFUSED.items():
        if others.get(name) is not None:
            raise UnsupportedError(
                f"{type(module).__name__} {what}, which no backend supports; use attn_implementation='eager'."
            )
    if others.get("output_attentions"):
        raise UnsupportedError(NO_WEIGHTS)


def _only_exact(module: Any, beyond: str | None, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(module).__name__} {beyond}, which backend {name!r} does not support; 'exact' does."
    )


def _scaled(query: Tensor, scaling: float | None, backend: Backend) -> Tensor:
    """Rescale the queries if the model passes another scale than its module declares.

    Some models scale the queries themselves, although an attribute declares a scale, and pass a factor of 1.
    """
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    return query if factor == backend.problem.factor else query * (factor / backend.problem.factor)


def _check_built_for(backend: Backend, pattern: Pattern) -> None:
    """Refuse a pattern other than that of the configuration at the time of `attach`."""
    expected = getattr(backend, PATTERN)
    if pattern != expected:
        raise UnsupportedError(
            f"This layer reads {pattern}, and backend {backend.spec.name!r} was attached to one that reads "
            f"{expected}; attach again, or use attn_implementation='sdpa' if that changes nothing."
        )


def _run(backend: Backend, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Tensor:
    """The output in transformers' layout [batch tokens heads value_dim]."""
    layer = getattr(key, STATE, None)
    if layer is not None:
        return layer.extend(backend, query, key, value, visible.key_mask).transpose(1, 2).contiguous()
    earlier = visible.keys - query.shape[2]
    if visible.first_key and (visible.pattern.back is None or earlier < visible.pattern.back):
        raise UnsupportedError(
            "This model copies or changes the keys of its cache, so that no state can be kept; "
            "use transformers' own cache."
        )
    k, v = key[:, :, : visible.keys], value[:, :, : visible.keys]
    return backend(query, k, v, key_mask=visible.key_mask).transpose(1, 2).contiguous()


class _Built:
    """Backends of names as attributes, which compiled code reads as they are."""


_BUILT = _Built()
_PLACES: dict[tuple[str, int, Pattern, float | None], str] = {}


@assume_constant_result
def _stateless(name: str, head_dim: int, back: int | None, ahead: int | None, scale: float | None) -> str:
    """Build a backend once; returns its attribute."""
    pattern = Pattern(back, ahead)
    known = (name, head_dim, pattern, scale)
    if known in _PLACES:
        return _PLACES[known]
    served, options = serving(name, pattern)
    keeps = spec(served).capabilities.needs_max_tokens
    if not keeps:
        backend = build(served, head_dim=head_dim, causal=pattern.causal, scale=scale, **options)
        keeps = any(True for _ in backend.parameters()) or any(True for _ in backend.buffers())
    if keeps:
        raise UnsupportedError(
            f"Backend {name!r} has parameters or random features, which must be part of the model: "
            f"attach(model, {name!r}) of efficient_attn.integrations.transformers adds them."
        )
    place = f"backend_{len(_PLACES)}"
    setattr(_BUILT, place, backend)
    _PLACES[known] = place
    return place


def _with_dropout(backend: Backend, dropout: float, module: Any) -> Backend:
    """The same backend with the attention dropout that the model requests in training."""
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
    """The configuration field of the attention dropout."""
    known = config.to_dict() if config is not None else {}
    fitting = [
        name
        for name, value in known.items()
        if ("drop" in name and name.startswith(("attention", "attn"))) and value == dropout
    ]
    return fitting[0] if fitting else "attention_dropout"
