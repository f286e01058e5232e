"""Backends in transformers models: attach, detach, distil from exact attention, load.

A saved configuration assigns backends to attention modules; their tensors are stored with the model's own. No
saved code is run: backends are looked up by name, tensors read from safetensors.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from efficient_attn.backend import Backend
from efficient_attn.errors import DataError, OptionError, UnsupportedError
from efficient_attn.integrations.assignment_files import check_assignment, is_assignment_file, read_assignment
from efficient_attn.integrations.capture import capture
from efficient_attn.integrations.intercept.calls import evaluating
from efficient_attn.integrations.masks import CAUSAL, FULL
from efficient_attn.integrations.transformers import assignment, loading
from efficient_attn.integrations.transformers.attend import NAME, NO_WEIGHTS, PATTERN, SOFT_CAP, SUBMODULE
from efficient_attn.integrations.transformers.caches import needs_state, replace_cache_layer
from efficient_attn.integrations.transformers.sites import AttentionSite, find_sites, ignored, unwrap
from efficient_attn.ops.dtypes import upcast

M = TypeVar("M", bound=nn.Module)

# The configuration entry from which `from_pretrained` takes its attention function.
_FUNCTION = "attn_implementation"

# Attribute that holds the handle of a module's hook.
_HOOK = "_efficient_attn_hook"
# Attribute of a model that has already warned of packed documents.
_PACKED = "_efficient_attn_packed"

_log = logging.getLogger(__name__)


def attach(
    model: M,
    backend: Any = None,
    *,
    full: Any = None,
    sliding: Any = None,
    cross: Any = None,
    max_tokens: int | None = None,
    seed: int = 0,
    **options: Any,
) -> M:
    """Replace the attention of a model by backends, in place.

    Returns the same model, which may be inside a module of another library, such as a PeftModel.

    Layers without a choice stay exact. For sliding-window layers, `exact` and `window` compute softmax over
    the model's own window and the global tokens, alone or in `by-head`; other backends are refused.

    Args:
        backend: Any argument of `build`, for all layers, with `options`; or a mapping from layers to
            backends, {"0-5": "window", "6-11": ("performer-positive", {"num_features": 512})}; or the path
            of a plan, `layers.json` of `efficient-attn advise`.
        full, sliding, cross: Backend for the layers of this kind, in place of `backend`.
        max_tokens: Maximum sequence length, for backends that require it; None: the number of positions of
            the model.
        seed: Random seed, from which the seeds of all layers derive.

    Raises:
        UnsupportedError: If a backend does not support a layer. The model then stays unchanged.
        UnknownNameError, OptionError, DtypeError: If the request is invalid.
    """
    inner, kinds = unwrap(model), {"full": full, "sliding": sliding, "cross": cross}
    sites = observed_sites(inner)
    if rest := ignored(inner):
        path, kind = next(iter(rest.items()))
        _log.warning(
            f"{len(rest)} attention modules of {type(inner).__name__} stay as they are, since their code "
            f"does not call transformers' attention interface, such as {path} ({kind})."
        )
    if is_assignment_file(backend):
        of_plan = {**kinds, **options, "max_tokens": max_tokens, "seed": seed or None}
        passed = [name for name, value in of_plan.items() if value is not None]
        if passed:
            raise OptionError(f"{passed[0]}=…: the file {backend} sets the backend of every layer itself.")
        backends = assignment.build_assignment(inner, sites, read_assignment(backend), str(backend))
    else:
        choices = assignment.choose_backends(sites, backend, kinds, options)
        backends = assignment.build_all(sites, choices, max_tokens, seed)
    install(inner, sites, backends)
    return model


@contextmanager
def swapped(model: M, backend: Any = None, **arguments: Any) -> Iterator[M]:
    """Attach backends with the arguments of `attach`, and restore the model on exit."""
    with ExitStack() as stack:
        stack.callback(_snapshot(unwrap(model)))
        yield attach(model, backend, **arguments)


@contextmanager
def installed(
    model: PreTrainedModel, sites: list[AttentionSite], backends: Mapping[str, Backend]
) -> Iterator[None]:
    """Install built backends, and restore the model on exit."""
    with ExitStack() as stack:
        stack.callback(install(model, sites, backends))
        yield


def install(
    model: PreTrainedModel, sites: list[AttentionSite], backends: Mapping[str, Backend]
) -> Callable[[], None]:
    """Install built backends, register them in the model's configuration, and return the restoration."""
    restore = _snapshot(model)
    try:
        model.set_attn_implementation(NAME)
        for site in sites:
            # transformers only warns about models whose attention it does not replace.
            if site.module.config._attn_implementation != NAME:
                raise UnsupportedError(
                    f"The attention of {site.path} cannot be replaced; nothing was attached."
                )
            backend: Any = _move(backends[site.path], site).train(site.module.training)
            # transformers reads this attribute to find tied parameters before it saves them.
            backend._tied_weights_keys = second_names(backend)
            setattr(backend, PATTERN, site.pattern)
            setattr(site.module, SUBMODULE, backend)
        model.config.efficient_attn = assignment.assignment_of(model, backends)
        # A saved model loaded without its backends would silently compute something else.
        setattr(model.config, _FUNCTION, NAME)
        states = [site.module for site in sites if needs_state(site.module, site.pattern)]
        for module, hook in [(model, _refuse_call), *((module, replace_cache_layer) for module in states)]:
            if not hasattr(module, _HOOK):
                setattr(module, _HOOK, module.register_forward_pre_hook(hook, with_kwargs=True))
    except BaseException:
        restore()
        raise
    return restore


def _move(backend: Backend, site: AttentionSite) -> Backend:
    parameter = next((p for p in site.module.parameters() if p.is_floating_point()), None)
    if parameter is None:
        return backend
    if parameter.is_meta:
        raise UnsupportedError(
            f"The parameters of {site.path} are on meta; attach backends before the model is offloaded."
        )
    return backend.to(device=parameter.device, dtype=parameter.dtype)


def second_names(backend: Backend) -> dict[str, str]:
    """Tied parameters of a backend: later name to first name."""
    first: dict[int, str] = {}
    return {
        name: first[id(parameter)]
        for name, parameter in backend.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }


def _refuse_call(model: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse calls with attention weights, and warn of packed documents, which the attention may not see."""
    if named.get("output_attentions"):
        raise UnsupportedError(NO_WEIGHTS)
    positions: Any = named.get("position_ids")
    mask: Any = named.get("attention_mask")
    if torch.compiler.is_compiling() or hasattr(model, _PACKED) or getattr(positions, "ndim", 0) != 2:
        return
    if mask is None and named.get("use_cache") is not False:
        mask = torch.ones_like(positions)
    if isinstance(mask, Tensor) and mask.shape[1:] == positions.shape[1:]:
        # Libraries fill the positions of padding with any number.
        real = mask.bool()
        if bool((positions.diff().lt(0) & real[:, 1:] & real[:, :-1]).any()):
            setattr(model, _PACKED, True)
            _log.warning(
                f"position_ids restart within a row (packed documents): {type(model).__name__} attends "
                "across them, as it does without backends. Pass one document per row."
            )


def observed_sites(model: PreTrainedModel) -> list[AttentionSite]:
    """Attention modules, marked causal if a call passes causality, as in CLIP's text tower.

    Text models whose modules seem bidirectional run once, on two tokens.
    """
    sites, causal = find_sites(model), set()
    unsure = {site.module for site in sites if site.kind == "full" and site.pattern == FULL}
    # Parts of a model come first; a model that needs other inputs fails.
    for inner in reversed([x for x in model.modules() if isinstance(x, PreTrainedModel)]):
        if inner.main_input_name == "input_ids" and unsure.intersection(inner.modules()):
            ids = torch.zeros(1, 2, dtype=torch.long, device=inner.device)
            with ExitStack() as stack, suppress(Exception), evaluating(inner), capture(inner) as captured:
                stack.callback(_snapshot(inner))
                inner.set_attn_implementation("sdpa")
                inner(input_ids=ids)
            calls = {captured.modules[site.module]: value for site, value in captured.causal.items()}
            causal |= {module for module in unsure if calls.get(module)}
            unsure -= calls.keys()
    return [site._replace(pattern=CAUSAL) if site.module in causal else site for site in sites]


def _snapshot(model: PreTrainedModel) -> Callable[[], None]:
    attached = [
        (m, getattr(m, SUBMODULE))
        for m in model.modules()
        if isinstance(getattr(m, SUBMODULE, None), Backend)
    ]
    configs = {
        id(m.config): m.config
        for m in model.modules()
        if isinstance(getattr(m, "config", None), PreTrainedConfig)
    }
    implementations = [(config, config._attn_implementation) for config in configs.values()]
    entries = {name: value for name, value in vars(model.config).items() if name in (NAME, _FUNCTION)}
    hooked = {module for module in model.modules() if hasattr(module, _HOOK)}

    def restore() -> None:
        for module in list(model.modules()):
            if isinstance(getattr(module, SUBMODULE, None), Backend):
                delattr(module, SUBMODULE)
            if hasattr(module, _HOOK) and module not in hooked:
                getattr(module, _HOOK).remove()
                delattr(module, _HOOK)
        for module, backend in attached:
            setattr(module, SUBMODULE, backend)
        # Setting a configuration also sets its nested configurations, which come later in this list.
        for config, implementation in implementations:
            config._attn_implementation = implementation
        for name in (NAME, _FUNCTION):
            vars(model.config).pop(name, None)
        vars(model.config).update(entries)

    return restore


def load(folder: str | Path, **arguments: Any) -> PreTrainedModel:
    """Load a model that was saved with its backends by `save_pretrained`.

    Args:
        arguments: For `from_pretrained`: dtype, device_map, …

    Raises:
        DataError: If the folder holds no such model, or tensors or assignment do not match it.
    """
    path = Path(folder)
    loading.weight_files(path)
    config = loading.read_config(path)
    saved, source = getattr(config, SUBMODULE, None), path / "config.json"
    if saved is None:
        raise DataError(
            f"{source} names no backends (efficient_attn): they had no registered name, or none was attached "
            "when the model was saved. Use from_pretrained and attach."
        )
    layers = check_assignment(saved, str(source))
    model, report = loading.read_model(path, loading.model_class(config, path), **arguments)
    rest = [name for name in report["unexpected_keys"] if f".{SUBMODULE}." not in name]
    loading.refuse_tensors(path, "has, beyond the model,", rest)
    _install_assignment(model, layers, source)
    return model


def _install_assignment(model: PreTrainedModel, layers: dict[str, dict[str, Any]], source: Path) -> None:
    sites, folder = observed_sites(model), source.parent
    saved: dict[str, dict[str, Tensor]] = {site.path: {} for site in sites}
    with loading.data_errors(f"Cannot read the safetensors of {folder}"):
        for file in sorted(folder.glob("model*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no mapping)
                    path, part, rest = name.partition(f".{SUBMODULE}.")
                    if part and path in saved:
                        saved[path][rest] = opened.get_tensor(name)
    backends = assignment.build_assignment(model, sites, layers, str(source))
    for path, backend in backends.items():
        state = saved[path]
        state |= {name: state[first] for name, first in second_names(backend).items() if first in state}
        with loading.data_errors(
            f"{folder}: the tensors saved for {path}.{SUBMODULE} do not fit backend {backend.spec.name!r}"
        ):
            backend.load_state_dict(state)
    install(model, sites, backends)


def distillation_loss(model: nn.Module, **batch: Any) -> Tensor:
    """Sum over layers of ‖backend − exact‖² / ‖exact‖² on the inputs of exact attention.

    The model attends exactly and without gradients, so that only its backends learn (Zhang et al. 2024,
    section 4.2; the paper compares attention weights, which a backend need not have).

    Args:
        batch: Arguments of one call of the model.

    Raises:
        UnsupportedError: If no backend is attached.
    """
    layers = [module for module in unwrap(model).modules() if hasattr(module, SUBMODULE)]
    students = [getattr(layer, SUBMODULE) for layer in layers]
    if not students or getattr(layers[0], SOFT_CAP, None) is not None:
        raise UnsupportedError("The model has no backends to distil, or has soft caps; attach(model, …).")
    losses = []

    def compare(student: Backend, teacher: Any, tensors: Any, options: Any, out: Tensor) -> None:
        exact = upcast(out)
        with torch.enable_grad():
            error = upcast(student(*tensors, **options)) - exact
            losses.append(error.square().sum() / exact.square().sum())

    with swapped(model, "exact"), torch.no_grad():
        for layer, student in zip(layers, students, strict=True):
            getattr(layer, SUBMODULE).register_forward_hook(partial(compare, student), with_kwargs=True)
        model(**batch)
    return torch.stack(losses).sum()
