"""Assignment of backends to attention modules, and their construction."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from efficient_attn.backend import Backend
from efficient_attn.backends import build_for, parse_options, resolve, seeded, spawn_seeds
from efficient_attn.backends.by_head import NAME as BY_HEAD
from efficient_attn.backends.by_head import parts_of
from efficient_attn.errors import AttentionError, DataError, OptionError, UnsupportedError
from efficient_attn.integrations.assignment_files import assignment_of_backends
from efficient_attn.integrations.transformers.attend import SOFT_CAP
from efficient_attn.integrations.transformers.loading import data_errors
from efficient_attn.integrations.transformers.scores import SINK_DIM
from efficient_attn.integrations.transformers.sites import AttentionSite
from efficient_attn.options import numbers_in_ranges
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec, Choice, parse_choice

EXACT = Choice("exact", {})


def choose_backends(
    sites: list[AttentionSite], backend: Any, kinds: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Choice]:
    """Choices by attention module, exact by default."""
    by_kind = {kind: parse_choice(value) for kind, value in kinds.items() if value is not None}
    if options and (by_kind or isinstance(backend, Mapping)):
        name = next(iter(options))
        raise OptionError(
            f"{name}=…: with several backends, options belong to one of them: ('window', {{'window': 65}})."
        )
    if not by_kind and (backend is None or backend == {}):
        raise OptionError("Name a backend: attach(model, 'window'), or full=…, sliding=…, cross=….")
    missing = [kind for kind in by_kind if not any(site.kind == kind for site in sites)]
    if missing:
        has = ", ".join(sorted({site.kind for site in sites}))
        raise OptionError(f"{missing[0]}=…: this model has no such layers; its layers are {has}.")
    by_path = {}
    if isinstance(backend, Mapping):
        layers = _choices_by_layer(sites, backend)
        by_path = {site.path: layers[site.layer] for site in sites if site.layer in layers}
    elif backend is not None:
        by_path = {site.path: Choice(backend, options) for site in sites}
    return {site.path: by_kind.get(site.kind) or by_path.get(site.path, EXACT) for site in sites}


def build_all(
    sites: list[AttentionSite], choices: Mapping[str, Choice], max_tokens: int | None, seed: int | None
) -> dict[str, Backend]:
    """Build a backend for every attention module, without attaching any.

    The seeds of all layers derive from `seed`; without it they are options.
    """
    seeds = [None] * len(sites) if seed is None else spawn_seeds(seed, len(sites))
    return {
        site.path: _build_choice(site, choices[site.path], max_tokens, site_seed)
        for site, site_seed in zip(sites, seeds, strict=True)
    }


def _build_choice(site: AttentionSite, choice: Choice, max_tokens: int | None, seed: int | None) -> Backend:
    chosen, options = resolve(choice.backend), dict(choice.options)
    if options.get("sharing") == "layers":
        raise UnsupportedError("sharing='layers' is for ea.Encoder; in a transformers model: 'key-value'.")
    if site.pattern.window is not None:
        name, window_options = _within_window(site, chosen, options)
        chosen, options = resolve(name), dict(window_options)
    if site.sinks:
        options = _with_sink(site, chosen, options)
    if getattr(site.module, SOFT_CAP, None) is not None:
        _check_caps(site, chosen, options)
    if seed is not None:
        options = seeded(chosen, options, seed)
    problem = AttentionProblem(
        head_dim=site.head_dim + (SINK_DIM if site.sinks else 0),
        num_heads=site.num_heads,
        max_tokens=max_tokens or site.max_tokens,
        causal=site.pattern.causal,
        scale=site.scale,
    )
    backend = build_for(problem, chosen, options)
    if site.kind == "cross" and not backend.supports_cross:
        raise UnsupportedError(
            f"Backend {chosen.name!r} has no cross-attention, unlike {site.path}; "
            "attach(model, …, cross='exact') leaves such layers exact."
        )
    return backend


def _within_window(site: AttentionSite, spec: BackendSpec, options: Mapping[str, Any]) -> Choice:
    """The backend that serves a request in a sliding-window layer, whose width is fixed by the model.

    Exact attention is a window of this width there.
    """
    name, width = spec.name, site.pattern.window
    # The window that replaces exact attention has options of its own.
    parse_options(spec, options)
    if name == BY_HEAD:
        entries = [(resolve(part["backend"]), part["options"]) for part in parts_of(options)]
        rest, *parts = (_within_window(site, *entry) for entry in entries)
        return Choice(name, {"heads": dict(zip(options["heads"], parts, strict=True)), "rest": rest})
    if name not in ("exact", "window"):
        raise UnsupportedError(
            f"Backend {name!r} does not support {site.pattern}; 'window' and 'exact' do: attach(model, "
            f"full={name!r}) leaves such layers exact."
        )
    if options.get("window", width) != width:
        raise OptionError(
            f"window={options['window']}: {site.path} slides over {width} keys, a width fixed by the model; "
            f"full=('window', {{'window': {options['window']}}}) sets the other layers."
        )
    shared = options if name == "window" else {"compute_dtype": options.get("compute_dtype")}
    return Choice("window", {**shared, "window": width})


def _with_sink(site: AttentionSite, spec: BackendSpec, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the sink as the first global token of a window."""
    if spec.name == "window" and site.pattern.causal:
        return {**options, "global_tokens": max(options.get("global_tokens", 0), 1)}
    if spec.name != "exact":
        raise UnsupportedError(
            f"{site.path} computes with 'sinks', which backend {spec.name!r} does not support; 'exact' does, "
            "and 'window' where it is causal."
        )
    return dict(options)


def _check_caps(site: AttentionSite, spec: BackendSpec, options: Mapping[str, Any]) -> None:
    """Refuse a backend whose scores cannot be capped."""
    if spec.name == BY_HEAD:
        for part in parts_of(options):
            _check_caps(site, resolve(part["backend"]), part["options"])
    elif spec.name not in ("exact", "window") or options.get("dropout") or options.get("compute_dtype"):
        raise UnsupportedError(
            f"{site.path} computes with {SOFT_CAP!r}, which backend {spec.name!r} does not support; "
            "'exact' and 'window' without dropout and compute_dtype do."
        )


def _choices_by_layer(sites: list[AttentionSite], backends: Mapping[Any, Any]) -> dict[int, Choice]:
    """Choices from a mapping of layers, such as 3 or "0-5,8"."""
    choices: dict[int, Choice] = {}
    last = max(site.layer for site in sites)
    for key, value in backends.items():
        layers = numbers_in_ranges(key, what="Layers")
        if max(layers) > last:
            raise OptionError(f"Layers are from 0 to {last} in this model, not {key!r}.")
        for layer in layers:
            if layer in choices:
                raise OptionError(f"Layer {layer} is named twice; the second time by {key!r}.")
            choices[layer] = parse_choice(value)
    return choices


def build_assignment(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    layers: Mapping[str, Mapping[str, Any]],
    source: str,
) -> dict[str, Backend]:
    # Paths are equal with and without a head.
    prefix = f"{model.base_model_prefix}."
    by_name = {site.path.removeprefix(prefix): site for site in sites}
    if by_name.keys() != layers.keys():
        raise DataError(f"{source}: the layers in efficient_attn belong to another model.")
    backends: dict[str, Backend] = {}
    for name, site in by_name.items():
        layer = layers[name]
        choice = {site.path: Choice(layer["backend"], layer["options"])}
        try:
            with data_errors(f"backend {layer['backend']!r} cannot be built"):
                backends |= build_all([site], choice, layer["max_tokens"], None)
        except AttentionError as error:
            raise DataError(f"{source}, {site.path}: {error}") from None
    return backends


def assignment_of(model: PreTrainedModel, backends: Mapping[str, Backend]) -> dict[str, Any] | None:
    prefix = f"{model.base_model_prefix}."
    return assignment_of_backends({path.removeprefix(prefix): x for path, x in backends.items()})
