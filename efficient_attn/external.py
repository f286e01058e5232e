"""External attention: a function, a module, an object in a user's file, or a plug-in of another package."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.contained import running
from efficient_attn.errors import DataError, DtypeError, UnknownNameError, UnsupportedError
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import SPECS, BackendSpec, Capabilities, NoOptions

# Capabilities of a function of q, k and v without declared ones.
BARE = Capabilities(causal=False, key_mask=False, nonnegative=False, averages=False, compile=False)

_NOTHING = object()

# Entry points by which other packages declare backends, imported on first use.
GROUP = "efficient_attn.backends"

# SHA-256 of the file behind each loaded address, by the backend's name in records.
CODE: dict[str, str] = {}


class CalledAttention(nn.Module):
    """Core of a backend that calls a function or module f(q, k, v) → output.

    Attributes:
        takes_scale: False: the factor on q·k is the function's own.
    """

    takes_scale = False

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return self.function(q, k, v)


def spec_of(thing: Any, *, name: str | None = None) -> BackendSpec:
    """The spec of a BackendSpec, a built backend, a registered builder, a module or a function.

    Raises:
        DtypeError: If the object is none of these.
    """
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
    core = CalledAttention(thing)
    return BackendSpec(
        name=label,
        summary="An attention from outside the table.",
        options_type=NoOptions,
        capabilities=BARE,
        builder=lambda problem, options: core,
        outside=True,
    )


def _core_of(built: Backend, problem: AttentionProblem, options: NoOptions) -> nn.Module:
    """Core of a built backend, for the problem that it was built for."""
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
    """The address without folders, which are specific to one machine."""
    place, _, attribute = address.rpartition(":")
    return f"{Path(place).name}:{attribute}"


def load(address: str) -> BackendSpec:
    """The spec of the object at path/to/file.py:object or package.module:object; runs that file.

    Raises:
        DataError: If there is no such file or module, or it cannot be imported.
        UnknownNameError: If the file or module has no such object.
    """
    place, thing = object_at(address)
    name = label_of(address)
    file = place if place.endswith(".py") else getattr(sys.modules[place], "__file__", None)
    CODE[name] = "" if file is None else sha256(Path(file).read_bytes()).hexdigest()
    return spec_of(thing, name=name)


def object_at(address: str, *, role: str = "a backend") -> tuple[str, Any]:
    """The file or module of an address, and the object; runs that file.

    Args:
        role: The object's part, named if there is no such file.

    Raises:
        DataError: If there is no such file or module, or it cannot be imported.
        UnknownNameError: If the file or module has no such object.
    """
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
    assert spec is not None, "a path that ends in .py has a loader"
    loader, module = spec.loader, importlib.util.module_from_spec(spec)
    assert loader is not None, "a path that ends in .py has a loader"
    # Dataclasses look their module up by its name.
    sys.modules[module.__name__] = module
    loader.exec_module(module)
    return module


class Plugin(NamedTuple):
    """A backend that another package declares.

    Attributes:
        module: Module whose import registers the backend.
        distribution: Package that declares it.
        version: Version of the package.
    """

    name: str
    module: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"plug-in {self.name!r} ({self.distribution} {self.version})"


@cache
def plugins() -> dict[str, Plugin]:
    """All plug-ins by backend name; none is imported."""
    by_name = {}
    for point in entry_points(group=GROUP):
        assert point.dist is not None, "entry points belong to installed packages"
        by_name[point.name] = Plugin(point.name, point.value, point.dist.name, point.dist.version)
    return by_name


def load_plugin(name: str) -> None:
    """Import a plug-in, which registers its backend.

    Raises:
        DataError: If the import fails or does not register the declared name.
    """
    plugin = plugins()[name]
    with running(f"The {plugin}", "cannot be imported"):
        EntryPoint(name, plugin.module, GROUP).load()
    if name not in SPECS:
        raise DataError(f"The {plugin} did not register a backend of that name.")
