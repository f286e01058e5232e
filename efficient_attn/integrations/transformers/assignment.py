"""Assignment of backends to attention modules, and their construction."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from efficient_attn.backend import Backend
from efficient_attn.backends import build, resolve
from efficient_attn.errors import DtypeError, OptionError, UnsupportedError
from efficient_attn.integrations.transformers.attend import EXACT as EXACT_NAMES
from efficient_attn.integrations.transformers.attend import serving
from efficient_attn.integrations.transformers.attention_sites import AttentionSite
from efficient_attn.transformer.parts import seeded
from efficient_attn.transformer.seeds import spawn_seeds


class Choice(NamedTuple):
    """A backend, as any argument of `build`, with its options."""

    backend: Any
    options: Mapping[str, Any]


EXACT = Choice("exact", {})


def choose(
    sites: list[AttentionSite], backend: Any, kinds: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Choice]:
    """The choice for every attention module; modules without a choice stay exact.

    Raises:
        OptionError, DtypeError, UnknownNameError: If the request is invalid.
    """
    named = {kind: _choice(given) for kind, given in kinds.items() if given is not None}
    if named or isinstance(backend, Mapping):
        _refuse_options(options)
    if not named and (backend is None or backend == {}):
        raise OptionError("Name a backend: attach(model, 'window'), or full=…, sliding=…, cross=….")
    missing = [kind for kind in named if not any(site.kind == kind for site in sites)]
    if missing:
        has = ", ".join(sorted({site.kind for site in sites}))
        raise OptionError(f"{missing[0]}=…: this model has no such layers; its layers are {has}.")
    if isinstance(backend, Mapping):
        rest = _by_layer(sites, backend)
    elif backend is not None:
        rest = {site.path: Choice(backend, options) for site in sites}
    else:
        rest = {}
    return {site.path: named.get(site.kind) or rest.get(site.path, EXACT) for site in sites}


def build_all(
    sites: list[AttentionSite], choices: Mapping[str, Choice], max_tokens: int | None, seed: int | None
) -> dict[str, Backend]:
    """Build a backend for every attention module, without attaching any.

    Args:
        seed: Random seed, from which each layer gets a seed of its own; None: seeds from the options.
    """
    seeds = [None] * len(sites) if seed is None else spawn_seeds(seed, len(sites))
    return {
        site.path: _build(site, choices[site.path], max_tokens, own)
        for site, own in zip(sites, seeds, strict=True)
    }


def _build(site: AttentionSite, choice: Choice, max_tokens: int | None, seed: int | None) -> Backend:
    chosen, options = resolve(choice.backend), dict(choice.options)
    if site.kind == "cross" and not chosen.capabilities.cross:
        raise UnsupportedError(
            f"Backend {chosen.name!r} has no cross-attention, unlike {site.path}; "
            "attach(model, …, cross='exact') leaves such layers exact."
        )
    if options.get("sharing") == "layers":
        raise UnsupportedError("sharing='layers' is for ea.Encoder; in a transformers model: 'key-value'.")
    if distance := options.get("max_distance"):
        raise UnsupportedError(
            f"max_distance={distance}: a trained model has positions of its own; max_distance is for layers "
            "of efficient_attn, trained with positions='relative'."
        )
    if site.only_exact is not None and chosen.name not in EXACT_NAMES:
        raise UnsupportedError(
            f"{site.path} {site.only_exact}, which backend {chosen.name!r} does not support; 'exact' does, "
            "and a mapping such as {'0-3': 'exact', '4-7': 'window'} sets it by layer."
        )
    name, own = (chosen.name, {}) if site.only_exact else serving(chosen.name, site.pattern)
    if own:
        chosen, options = resolve(name), _model_width(site, options, own)
    if seed is not None:
        options = seeded(chosen, options, seed)
    return build(
        chosen,
        head_dim=site.head_dim,
        num_heads=site.num_heads,
        max_tokens=max_tokens or site.max_tokens,
        causal=site.pattern.causal,
        scale=site.scale,
        **options,
    )


def _model_width(site: AttentionSite, options: dict[str, Any], own: dict[str, int]) -> dict[str, Any]:
    """Options of a sliding-window layer, whose window is fixed by the model."""
    if options.get("window", own["window"]) != own["window"]:
        raise OptionError(
            f"window={options['window']}: {site.path} slides over {own['window']} keys, a width fixed by "
            f"the model; full=('window', {{'window': {options['window']}}}) sets the other layers."
        )
    if count := options.get("global_tokens"):
        raise OptionError(
            f"global_tokens={count}: {site.path} slides over {own['window']} keys, and its cache drops the "
            f"first tokens; full=('window', {{'global_tokens': {count}}}) sets the other layers."
        )
    return own


def _by_layer(sites: list[AttentionSite], given: Mapping[Any, Any]) -> dict[str, Choice]:
    """The choices in a mapping from layers, such as 3 or "0-5,8", to backends."""
    layers: dict[int, Choice] = {}
    last = max(site.layer for site in sites)
    for key, value in given.items():
        for layer in _layers(key, last):
            if layer in layers:
                raise OptionError(f"Layer {layer} is named twice; the second time by {key!r}.")
            layers[layer] = _choice(value)
    return {site.path: layers[site.layer] for site in sites if site.layer in layers}


def _layers(key: Any, last: int) -> list[int]:
    found: list[int] = []
    for part in str(key).split(","):
        first, _, end = part.strip().partition("-")
        numbers = (first, end or first)
        if not all(one.isdecimal() for one in numbers) or int(numbers[0]) > int(numbers[1]):
            raise OptionError(f"Layers are named by numbers and ranges, such as '0-5,8', not {key!r}.")
        found += range(int(first), int(end or first) + 1)
    if not found or max(found) > last:
        raise OptionError(f"Layers are from 0 to {last} in this model, not {key!r}.")
    return found


def _choice(given: Any) -> Choice:
    """Parse a backend, or a pair of a backend and its options."""
    if not isinstance(given, tuple):
        return Choice(given, {})
    if len(given) != 2 or not isinstance(given[1], Mapping):
        raise DtypeError(
            f"A backend with options is a pair such as ('window', {{'window': 65}}), not {given!r}."
        )
    return Choice(*given)


def _refuse_options(options: Mapping[str, Any]) -> None:
    if options:
        name = next(iter(options))
        raise OptionError(
            f"{name}=…: with several backends, options belong to one of them: ('window', {{'window': 65}})."
        )
