"""External attention: functions and modules from files and plug-ins."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.contained import running
from efficient_attn.errors import DataError, DtypeError, UnknownNameError, UnsupportedError
from efficient_attn.ops.softmax.definition import visible_keys
from efficient_attn.options import one_of
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import SPECS, BackendSpec, Capabilities, NoOptions, add_spec

# Capabilities of a function of q, k and v without declared ones.
BARE = Capabilities(causal=False, key_mask=False, nonnegative=False, averages=False, compile=False)

_NOTHING = object()

# Entry points by which other packages declare backends, imported on first use.
GROUP = "efficient_attn.backends"

# SHA-256 of the file behind each loaded address, by the backend's name in records.
CODE: dict[str, str] = {}


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, problem: AttentionProblem) -> dict[str, Any]:
    """Call f(q, k, v), with key_mask= and causal= if the call has them."""
    options: dict[str, Any] = {} if mask is None else {"key_mask": mask}
    return {**options, "causal": True} if problem.causal else options


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, problem: AttentionProblem) -> dict[str, Any]:
    """F.scaled_dot_product_attention: attn_mask, is_causal, scale, enable_gqa."""
    options: dict[str, Any] = {"scale": problem.scale, "enable_gqa": k.shape[1] != q.shape[1]}
    square = q.shape[-2] == k.shape[-2]
    if mask is None and problem.causal and square:
        return {**options, "is_causal": True}
    # is_causal aligns the first query with the first key, and excludes attn_mask.
    return {**options, "attn_mask": visible_keys(q, k, causal=problem.causal, key_mask=mask)}


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, problem: AttentionProblem) -> dict[str, Any]:
    """flash_attn_func: causal, softmax_scale."""
    return {"causal": problem.causal, "softmax_scale": problem.scale}


# Arguments of a call by signature, and whether tensors are [batch, tokens, heads, dim].
SIGNATURES: dict[str, tuple[Callable[..., dict[str, Any]], bool]] = {
    "plain": (_plain, False),
    "sdpa": (_sdpa, False),
    "flash-attn": (_flash, True),
}


class AdaptedAttention(nn.Module):
    def __init__(
        self,
        function: Callable[..., Any],
        problem: AttentionProblem,
        *,
        signature: str = "plain",
        grouped: bool = True,
    ) -> None:
        super().__init__()
        self.function, self._problem, self._grouped = function, problem, grouped
        self._arguments, self._transposed = SIGNATURES[signature]
        self.takes_scale = signature != "plain"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        if not self._grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        options = self._arguments(q, k, v, key_mask, self._problem)
        tensors = [x.transpose(1, 2) for x in (q, k, v)] if self._transposed else [q, k, v]
        output = self.function(*tensors, **options)
        return output.transpose(1, 2) if self._transposed else output


def spec_of(thing: Any, *, name: str | None = None) -> BackendSpec:
    """The spec of a BackendSpec, a built backend, a registered builder, a module or a function."""
    if isinstance(thing, BackendSpec):
        return thing
    for registered in SPECS.values():
        if thing in (registered.builder, registered.function):
            return registered
    if isinstance(thing, Backend):
        return replace(thing.spec, options_type=NoOptions, builder=partial(_core_of, thing))
    if isinstance(thing, type) or not callable(thing):
        raise DtypeError(
            f"A backend is a name, file.py:object, a module or a function f(q, k, v), not {thing!r}."
        )
    label = name or str(getattr(thing, "__name__", type(thing).__name__))
    return replace(adapt(thing, grouped=True), name=label, capabilities=BARE)


def _core_of(built: Backend, problem: AttentionProblem, options: NoOptions) -> nn.Module:
    for name in ("head_dim", "causal", "factor"):
        had, asks = getattr(built.problem, name), getattr(problem, name)
        if had != asks:
            raise UnsupportedError(
                f"This {built.spec.name!r} was built with {name}={had} and {name}={asks} is asked: build "
                f"it anew by its name."
            )
    return built.core


def is_address(name: str) -> bool:
    """Whether a name reads file.py:object or package.module:object."""
    return ":" in name


def label_of(address: str) -> str:
    """An address without its folders, which differ between machines."""
    place, _, attribute = address.rpartition(":")
    return f"{Path(place).name}:{attribute}"


def load_spec(address: str) -> BackendSpec:
    """The spec of the object at path/to/file.py:object or package.module:object, whose file runs."""
    place, thing = object_at(address)
    name = label_of(address)
    file = place if place.endswith(".py") else getattr(sys.modules[place], "__file__", None)
    CODE[name] = "" if file is None else sha256(Path(file).read_bytes()).hexdigest()
    return spec_of(thing, name=name)


def object_at(address: str, *, role: str = "a backend") -> tuple[str, Any]:
    """The file or module of an address, and the object. Runs that file."""
    place, _, attribute = address.rpartition(":")
    path = Path(place) if place.endswith(".py") else None
    if path is not None and not path.is_file():
        raise DataError(f"There is no file {place!r} to take {role} from.")
    with running(place, "cannot be imported"):
        module = importlib.import_module(place) if path is None else _file(path)
        thing = getattr(module, attribute, _NOTHING)
    if thing is _NOTHING:
        public = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise UnknownNameError(f"object in {place}", attribute, public)
    return place, thing


def _file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"efficient_attn_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module by its name.
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def adapt(
    function: Any,
    *,
    signature: str = "plain",
    causal: bool = False,
    key_mask: bool = False,
    cross: bool = False,
    grouped: bool = False,
    exact: bool = False,
    backward: bool = True,
) -> BackendSpec:
    """Wrap a function with another library's signature as a backend spec.

    Undeclared capabilities stay unknown, and checks that need them are skipped.

    Args:
        function: f(q, k, v, …), or its address file.py:object.
        signature: "plain" (key_mask=, causal=), "sdpa" (F.scaled_dot_product_attention) or
            "flash-attn" (flash_attn_func).
        key_mask: Whether it supports key masks.
        cross: Whether it supports cross-attention, with any number of keys.
        grouped: Whether the function supports grouped queries. Otherwise key/value heads are repeated for it.

    Raises:
        UnknownNameError: If the signature does not exist.
        UnsupportedError: If the signature has no place for a key mask.
    """
    one_of("signature", signature, SIGNATURES)
    if key_mask and signature == "flash-attn":
        raise UnsupportedError(f"The signature {signature!r} takes no key mask: leave key_mask out.")
    called, name = function, getattr(function, "__name__", type(function).__name__)
    if isinstance(function, str):
        called, name = object_at(function)[1], label_of(function)
    if isinstance(called, type) or not callable(called):
        raise DtypeError(f"A function f(q, k, v, …) or its address file.py:object is wanted, not {called!r}.")
    capabilities = replace(
        BARE,
        causal=causal,
        streaming=False,
        key_mask=key_mask,
        cross=cross,
        needs_all_queries=causal and not cross,
        exact=exact,
        nonnegative=exact,
        averages=exact,
        gradients=backward,
    )
    return BackendSpec(
        name=name,
        summary=f"A function with the signature of {signature}.",
        options_type=NoOptions,
        capabilities=capabilities,
        builder=lambda problem, options: AdaptedAttention(
            called, problem, signature=signature, grouped=grouped
        ),
        outside=True,
    )


def register(
    name: str,
    *,
    causal: bool = False,
    key_mask: bool = False,
    cross: bool = False,
    exact: bool = False,
    paper: str | None = None,
    formula: str | None = None,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register the decorated function of (q, k, v) as a backend under `name`, with these capabilities.

    Backends with options, parameters or states are registered by `efficient_attn.registry.register`.

    Args:
        causal, key_mask, cross, exact: Capabilities, as for `adapt`.

    Raises:
        RuntimeError: If another function or builder has the name.
    """

    def add(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        spec = adapt(function, causal=causal, key_mask=key_mask, cross=cross, exact=exact)
        summary = (inspect.getdoc(function) or name).partition("\n")[0]
        add_spec(replace(spec, name=name, summary=summary, paper=paper, formula=formula, function=function))
        return function

    return add


@cache
def plugins() -> dict[str, EntryPoint]:
    """Entry points of backends of other packages, by backend name. None is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}


def package_of(plugin: EntryPoint) -> str:
    """Name and version of the package that declares a plug-in."""
    assert plugin.dist is not None, "entry points belong to installed packages"
    return f"{plugin.dist.name} {plugin.dist.version}"


def load_plugin(name: str) -> None:
    """Import a plug-in, which registers its backend."""
    plugin = plugins()[name]
    label = f"The plug-in {name!r} ({package_of(plugin)})"
    with running(label, "cannot be imported"):
        plugin.load()
    if name not in SPECS:
        raise DataError(f"{label} did not register a backend of that name.")
