"""Putting backends into transformers models, and taking them out again."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from efficient_attn.backend import Backend
from efficient_attn.backends import list_backends
from efficient_attn.errors import DtypeError, UnsupportedError
from efficient_attn.integrations.transformers.attend import (
    NAME,
    NO_WEIGHTS,
    PATTERN,
    PLACE,
    attend_attached,
    attention_function,
)
from efficient_attn.integrations.transformers.choosing import build_all, choose
from efficient_attn.integrations.transformers.masks import make_mask
from efficient_attn.integrations.transformers.places import Place, find_places
from efficient_attn.registry import SPECS

PLAN_FORMAT = 1

# The entry of a configuration from which `from_pretrained` takes its attention function.
_FUNCTION = "attn_implementation"

# The attribute that holds the handle of the hook below.
_HOOK = "_efficient_attn_hook"

_log = logging.getLogger(__name__)


def register() -> tuple[str, ...]:
    """Make every backend known to transformers as attn_implementation="efficient_attn.<name>".

    Those that keep nothing work by that name alone; the others refuse and name `attach`. With the attention
    function goes a mask function of the same name: without it transformers would drop all masks silently.
    """
    names = {f"{NAME}.{name}": attention_function(name) for name in list_backends()}
    for name, function in {NAME: attend_attached, **names}.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)
    return tuple(names)


def attach(
    model: PreTrainedModel,
    backend: Any = None,
    *,
    full: Any = None,
    sliding: Any = None,
    cross: Any = None,
    max_tokens: int | None = None,
    seed: int = 0,
    **options: Any,
) -> PreTrainedModel:
    """Let a model attend through a backend from now on; the same model comes back.

    Layers that nobody mentions stay exact. Where a layer slides, `exact` and `window` are softmax over the
    model's own window and others are refused.

    Args:
        backend: Whatever `build` takes, for all layers, with `options`; or a mapping from layers to
            backends, {"0-5": "window", "6-11": ("performer-positive", {"num_features": 512})}.
        full, sliding, cross: A backend for the layers of that kind, before `backend`.
        max_tokens: The longest sequence, for backends that have to know; None: as many as the model has
            positions for.
        seed: Gives each layer's random features a draw of their own.

    Raises:
        UnsupportedError: If a backend cannot honour what a layer does. Nothing is attached then.
        UnknownNameError, OptionError, DtypeError: If the request makes no sense.
    """
    kinds = {"full": full, "sliding": sliding, "cross": cross}
    places, backends = _build(model, backend, kinds, options, max_tokens, seed)
    install(model, places, backends)
    _log.warning(
        "%s attends through efficient_attn. save_pretrained keeps its backends and "
        "efficient_attn.integrations.transformers.load brings them back; plain from_pretrained refuses, "
        "unless attn_implementation='sdpa' asks for the model without them.",
        type(model).__name__,
    )
    if any(backend.needs_calibration for backend in backends.values()):
        _log.warning(
            "Its backends have to see typical input before they are used: ea.calibrate(model, **batch)."
        )
    return model


@contextmanager
def swapped(
    model: PreTrainedModel,
    backend: Any = None,
    *,
    full: Any = None,
    sliding: Any = None,
    cross: Any = None,
    max_tokens: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Iterator[PreTrainedModel]:
    """The model with its attention swapped, inside the `with`; as it was before, after it.

    Arguments are those of `attach`.
    """
    kinds = {"full": full, "sliding": sliding, "cross": cross}
    with installed(model, *_build(model, backend, kinds, options, max_tokens, seed)):
        yield model


@contextmanager
def installed(model: PreTrainedModel, places: list[Place], backends: Mapping[str, Backend]) -> Iterator[None]:
    """The model with built backends in their modules, inside the `with`; as it was before, after it."""
    before = _remember(model)
    try:
        install(model, places, backends)
        yield
    finally:
        _restore(model, before)


def install(model: PreTrainedModel, places: list[Place], backends: Mapping[str, Backend]) -> None:
    """Put built backends into their modules and let the model's configuration say so."""
    before = _remember(model)
    try:
        register()
        model.set_attn_implementation(NAME)
        for place in places:
            own: Any = _move(backends[place.path], model, place).train(place.module.training)
            # So transformers asks which parameters are another one by a second name, before it saves them.
            own._tied_weights_keys = second_names(own)
            setattr(own, PATTERN, place.pattern)
            setattr(place.module, PLACE, own)
        _check_heard(places)
        model.config.efficient_attn = plan_of(model, backends)
        # A saved model that runs without its backends would run something else, silently.
        setattr(model.config, _FUNCTION, NAME)
        if not hasattr(model, _HOOK):
            setattr(model, _HOOK, model.register_forward_pre_hook(_refuse_weights, with_kwargs=True))
    except BaseException:
        _restore(model, before)
        raise


def _move(backend: Backend, model: nn.Module, place: Place) -> Backend:
    """The backend in the dtype of its place's parameters, on the device where they are multiplied.

    accelerate leaves an offloaded parameter on meta until its module is called; a hook knows the device.
    """
    parameter = next((p for p in place.module.parameters() if p.is_floating_point()), None)
    if parameter is None:
        return backend
    device: Any = parameter.device
    if parameter.is_meta:
        names = place.path.split(".")
        parents = (model.get_submodule(".".join(names[:n])) for n in reversed(range(len(names))))
        hooks = (getattr(module, "_hf_hook", None) for module in (*place.module.modules(), *parents))
        each = (one for hook in hooks for one in getattr(hook, "hooks", [hook]))
        devices = (getattr(one, "execution_device", None) for one in each)
        device = next((found for found in devices if found is not None), None)
    if device is None:
        raise UnsupportedError(
            f"The parameters of {place.path} lie on meta and no hook of accelerate names a device; load the "
            "model first, then attach."
        )
    return backend.to(device=device, dtype=parameter.dtype)


def second_names(backend: Backend) -> dict[str, str]:
    """The parameters that a backend has under two names: the later name, and the first one."""
    first: dict[int, str] = {}
    return {
        name: first[id(parameter)]
        for name, parameter in backend.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }


def _refuse_weights(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Some models keep this argument from the attention function and would return nothing, silently."""
    if named.get("output_attentions"):
        raise UnsupportedError(NO_WEIGHTS)


def _check_heard(places: list[Place]) -> None:
    """Refuse models that transformers leaves as they are, with a warning."""
    deaf = [place.path for place in places if place.module.config._attn_implementation != NAME]
    if deaf:
        raise UnsupportedError(f"{deaf[0]} does not let its attention be chosen; nothing was attached.")


def plan_of(model: PreTrainedModel, backends: Mapping[str, Backend]) -> dict[str, Any] | None:
    """What a configuration keeps of attached backends; None where one of them has no name to find it by."""
    if any(SPECS.get(own.spec.name) is not own.spec for own in backends.values()):
        return None
    layers = {
        name_in_plan(model, path): {
            "backend": own.spec.name,
            "options": asdict(own.options),
            "max_tokens": own.problem.max_tokens,
        }
        for path, own in backends.items()
    }
    return {"format": PLAN_FORMAT, "layers": layers}


def name_in_plan(model: PreTrainedModel, path: str) -> str:
    """The path from the base model on, so that a plan fits a model with and without its head."""
    return path.removeprefix(f"{model.base_model_prefix}.")


def _build(
    model: PreTrainedModel,
    backend: Any,
    kinds: Mapping[str, Any],
    options: Mapping[str, Any],
    max_tokens: int | None,
    seed: int,
) -> tuple[list[Place], dict[str, Backend]]:
    if not isinstance(model, PreTrainedModel):
        raise DtypeError(f"model is a model of transformers, not {type(model).__name__}.")
    places = find_places(model)
    return places, build_all(places, choose(places, backend, kinds, options), max_tokens, seed)


class _Before(NamedTuple):
    """What attaching changes in a model."""

    backends: list[tuple[nn.Module, nn.Module]]
    implementations: list[tuple[PreTrainedConfig, str | None]]
    entries: dict[str, Any]
    hooked: bool


def _remember(model: PreTrainedModel) -> _Before:
    attached = [
        (m, getattr(m, PLACE)) for m in model.modules() if isinstance(getattr(m, PLACE, None), Backend)
    ]
    configs = {
        id(m.config): m.config
        for m in model.modules()
        if isinstance(getattr(m, "config", None), PreTrainedConfig)
    }
    implementations = [(config, config._attn_implementation) for config in configs.values()]
    entries = {name: value for name, value in vars(model.config).items() if name in (NAME, _FUNCTION)}
    return _Before(attached, implementations, entries, hasattr(model, _HOOK))


def _restore(model: PreTrainedModel, before: _Before) -> None:
    for module in list(model.modules()):
        if isinstance(getattr(module, PLACE, None), Backend):
            delattr(module, PLACE)
    for module, backend in before.backends:
        setattr(module, PLACE, backend)
    # Setting a configuration sets the ones inside it, which come later in this list.
    for config, implementation in before.implementations:
        config._attn_implementation = implementation
    for name in (NAME, _FUNCTION):
        vars(model.config).pop(name, None)
    vars(model.config).update(before.entries)
    if hasattr(model, _HOOK) and not before.hooked:
        getattr(model, _HOOK).remove()
        delattr(model, _HOOK)
