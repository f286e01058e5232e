"""Backends, one kind per file. Every file in this folder is imported and registers its backends."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.errors import NOT_CAUSAL, OptionError, UnknownNameError, UnsupportedError
from efficient_attn.external import is_address, load_plugin, load_spec, plugins, spec_of
from efficient_attn.ops.dtypes import without_inference_mode
from efficient_attn.options import whole_number
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import SPECS, BackendSpec

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def list_backends(*, causal: bool | None = None) -> tuple[str, ...]:
    """Names of the registered backends, sorted. `causal` selects backends that can, or cannot, be causal."""
    listed = (name for name in sorted(SPECS) if not SPECS[name].composed)
    return tuple(name for name in listed if causal in (None, SPECS[name].capabilities.causal))


def compared_backends() -> list[str]:
    """Names of the backends that comparisons with softmax attention measure by default."""
    specs = map(spec, list_backends())
    return [x.name for x in specs if x.compared and x.capabilities.approximates_softmax]


def spec(name: str) -> BackendSpec:
    """Specification of a backend: name, capabilities and options.

    Raises:
        UnknownNameError: If neither the table nor a plug-in has the name.
        DataError: If the plug-in cannot be imported.
    """
    if name not in SPECS and name in plugins():
        load_plugin(name)
    if name not in SPECS:
        raise UnknownNameError("backend", name, {*SPECS, *plugins()})
    return SPECS[name]


def resolve(backend: Any) -> BackendSpec:
    """The spec of a name, file.py:object, package.module:object, module or function."""
    if not isinstance(backend, str):
        return spec_of(backend)
    return load_spec(backend) if is_address(backend) else spec(backend)


def build(
    name: str | BackendSpec | nn.Module | Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    head_dim: int,
    num_heads: int | None = None,
    max_tokens: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    **options: Any,
) -> Backend:
    """Build a backend: a module that maps (q, k, v) to the output.

    Args:
        name: A registered name, file.py:object, package.module:object, a module or a function.
        options: The fields of the backend's options class.

    Raises:
        UnknownNameError: If there is no such backend, or it has no such option.
        UnsupportedError: If the backend does not declare a requested capability.
        OptionError, DtypeError: If a number or an option is invalid.
    """
    problem = AttentionProblem(
        head_dim=head_dim, num_heads=num_heads, max_tokens=max_tokens, causal=causal, scale=scale
    )
    return build_for(problem, name, options)


def build_for(problem: AttentionProblem, name: Any, options: Mapping[str, Any]) -> Backend:
    """Build a backend for a problem that a model or another backend sets."""
    backend = resolve(name)
    chosen = parse_options(backend, options)
    _check_capabilities(backend, problem)
    with without_inference_mode():
        return Backend(backend.builder(problem, chosen), backend, problem, chosen)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    name: str = "exact",
    *,
    key_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    """Output of a stateless backend in one call, with the shapes of `Backend.forward`.

    Raises:
        UnsupportedError: If the backend has parameters or random features and has to be built.
    """
    backend = build(name, head_dim=q.shape[-1], causal=causal, scale=scale, **options)
    if any(True for _ in backend.parameters()) or any(True for _ in backend.buffers()):
        raise UnsupportedError(
            f"Backend {name!r} keeps parameters or a random draw: build it once with ea.build({name!r}, ...) "
            "and call the module."
        )
    return backend(q, k, v, key_mask=key_mask)


def spawn_seeds(seed: int, count: int) -> list[int]:
    """Independent seeds of `count` layers, each a function of `seed` and its index."""
    whole_number("seed", seed)
    return [int(child.generate_state(1)[0]) for child in np.random.SeedSequence(seed).spawn(count)]


def seeded(spec: BackendSpec, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The options, with `seed` as the default of a backend with random features."""
    draws = any(field.name == "seed" for field in fields(spec.options_type))
    return {"seed": seed, **options} if draws else dict(options)


def parse_options(backend: BackendSpec, options: Mapping[str, Any]) -> Any:
    names = [field.name for field in fields(backend.options_type)]
    for option, value in options.items():
        if option in AttentionProblem.__dataclass_fields__:
            raise OptionError(
                f"{option}={value!r} is no option of backend {backend.name!r}: leave it out, since the "
                "attention that the backend serves sets it (max_tokens: an argument of the attachment)."
            )
        if option not in names:
            raise UnknownNameError(f"option of backend {backend.name!r}", str(option), names)
    return backend.options_type(**options)


def _check_capabilities(backend: BackendSpec, problem: AttentionProblem) -> None:
    if problem.causal and not backend.capabilities.causal:
        causal = ", ".join(list_backends(causal=True))
        raise UnsupportedError(f"Backend {backend.name!r} {NOT_CAUSAL}. Causal backends: {causal}.")
    if backend.capabilities.needs_max_tokens and problem.max_tokens is None:
        raise UnsupportedError(
            f"Backend {backend.name!r} has to know the longest sequence: build it with max_tokens."
        )
