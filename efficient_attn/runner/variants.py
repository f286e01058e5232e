"""Variants: backends with a choice of their options."""

import itertools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import PurePath
from pkgutil import iter_modules
from typing import Any

from efficient_attn.errors import DtypeError, OptionError, UnknownNameError
from efficient_attn.runner.proof import prove

# Label of identity attention, the upper bound on the speed-up of a block.
CEILING = "attention := v"

# The baseline of all comparisons, exact attention through the fused kernel; and naive attention, the baseline
# of the papers.
YARDSTICK, DENSE = "exact", "exact-dense"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A backend with a choice of its options.

    Attributes:
        backend: Name in records: a registered name, or `file.py:object`.
        target: Argument of `build`: a name, a path, a module or a callable.
        options: All options, including defaults.
        memory_growth: Declared power of tokens in its memory.
    """

    backend: str
    label: str
    target: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    time_growth: int = 1
    memory_growth: int = 1


def parse_settings(texts: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """{backend: {option: values}} from `backend.option=value,value`."""
    settings: dict[str, dict[str, list[str]]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        backend, dot, option = name.rpartition(".")
        if not (backend and dot and option and equals and values):
            raise OptionError(f"--set cannot be {text!r}. Write backend.option=value: linformer.rank=128.")
        settings.setdefault(backend, {})[option] = values.split(",")
    return settings


def select(
    backends: Sequence[Any] | None,
    settings: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    *,
    rehearse: bool = True,
    exclude: Sequence[str] | None = None,
) -> tuple[Variant, ...]:
    """The variants of the named backends, one per combination of the set options.

    None selects all softmax-approximating backends, for which alone errors and speed-ups against exact
    attention are meaningful. External files and packages are first imported in a child process.

    Args:
        rehearse: Whether to make a trial call there too, for studies that call backends in this process.
        exclude: Names to leave out.

    Raises:
        DataError: If an import or a trial call ends its process or takes too long.
        UnknownNameError: If a backend or one of the set options does not exist.
        OptionError: If a value is invalid, or a setting is for a backend that is not selected.
    """
    targets = _near_softmax() if backends is None else list(backends)
    targets = _without(targets, exclude or ())
    names = [target if isinstance(target, str) else _name(target) for target in targets]
    if CEILING in names:
        raise OptionError(f"{CEILING!r} is not a backend: it is measured with every block automatically.")
    for backend in settings or {}:
        if backend not in names:
            chosen = ", ".join(names)
            raise OptionError(f"--set {backend}.…: {backend!r} is not a selected backend ({chosen}).")
    prove([target for target in targets if isinstance(target, str)], rehearse=rehearse)
    variants = [
        variant
        for name, target in zip(names, targets, strict=True)
        for variant in _variants(name, target, (settings or {}).get(name, {}))
    ]
    return tuple(_distinct(variants))


def _without(targets: list[Any], exclude: Sequence[str]) -> list[Any]:
    names = [target if isinstance(target, str) else _name(target) for target in targets]
    for name in exclude:
        if name not in names:
            raise UnknownNameError("selected backend to exclude", name, names)
    left = [target for target, name in zip(targets, names, strict=True) if name not in exclude]
    if not left:
        raise OptionError(f"exclude leaves no backend of {', '.join(names)}.")
    return left


def backend_names() -> list[str]:
    """Names of our files and of entry points; nothing is loaded, so that completion is fast."""
    found = find_spec("efficient_attn.backends")
    files = iter_modules(found.submodule_search_locations if found else None)
    own = {file.name.replace("_", "-") for file in files}
    brought = {point.name for point in entry_points(group="efficient_attn.backends")}
    return sorted(own | {name for name in brought if name.isprintable()})


def _near_softmax() -> list[str]:
    from efficient_attn.backends import list_backends, spec

    return [name for name in list_backends() if spec(name).capabilities.approximates_softmax]


def ceiling() -> Variant:
    """Identity attention for blocks; not selectable by name."""
    return Variant(backend=CEILING, label=CEILING, target=CEILING)


def has_address(target: Any) -> bool:
    """Whether another process can resolve the target: a built-in or plug-in name, or a path."""
    from efficient_attn import backends
    from efficient_attn.external import is_address

    if target == CEILING:
        return True
    if not isinstance(target, str) or is_address(target):
        return isinstance(target, str)
    return is_ours(target) or any(point.name == target for point in entry_points(group=backends.__name__))


def is_ours(target: Any) -> bool:
    """Whether the target names a built-in backend."""
    from efficient_attn import backends
    from efficient_attn.external import is_address

    if not isinstance(target, str) or is_address(target):
        return False
    return bool(backends.resolve(target).builder.__module__.startswith(f"{backends.__name__}."))


def _variants(name: str, target: Any, settings: Mapping[str, Sequence[Any]]) -> list[Variant]:
    from efficient_attn.backends import resolve

    spec = resolve(target)
    known = typing.get_type_hints(spec.options_type)
    for option in settings:
        if option not in known:
            raise UnknownNameError(f"option of backend {name!r}", option, known)
    choices = [
        [_converted(name, option, value, known[option]) for value in values]
        for option, values in settings.items()
    ]
    shown = _shown_name(name)
    variants = []
    for values in itertools.product(*choices):
        chosen = dict(zip(settings, values, strict=True))
        setting = ", ".join(f"{option}={value}" for option, value in chosen.items())
        variants.append(
            Variant(
                backend=shown,
                label=f"{shown}({setting})" if setting else shown,
                target=target,
                options=_plain(spec.options_type(**chosen)),
                time_growth=spec.capabilities.time_growth,
                memory_growth=spec.capabilities.memory_growth,
            )
        )
    return variants


def _plain(options: Any) -> dict[str, Any]:
    """The options as JSON values."""
    plain = (bool, int, float, str, type(None))
    known = asdict(options)
    return {name: value if isinstance(value, plain) else str(value) for name, value in known.items()}


def _name(target: Any) -> str:
    own = getattr(target, "name", None) or getattr(target, "__name__", None)
    return own if isinstance(own, str) else type(target).__name__


def _shown_name(name: str) -> str:
    """A path without its folders, which are specific to one machine."""
    file, colon, thing = name.rpartition(":")
    return f"{PurePath(file).name}:{thing}" if colon else name


def _distinct(variants: Sequence[Variant]) -> list[Variant]:
    labels = [variant.label for variant in variants]
    for label in labels:
        if labels.count(label) > 1:
            raise OptionError(f"Two of the backends are called {label!r}; name each once.")
    return list(variants)


def _converted(backend: str, option: str, value: Any, wanted: Any) -> Any:
    """Convert the text of an option to its type."""
    if not isinstance(value, str):
        return value
    kinds = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    if value.lower() == "none" and type(None) in kinds:
        return None
    for kind in kinds:
        parsed = _PARSERS.get(kind, str)(value)
        if parsed is not None:
            return parsed
    names = " or ".join(_TYPE_NAMES.get(kind, str(kind)) for kind in kinds)
    raise DtypeError(f"--set {backend}.{option}={value}: {option} is {names}, not {value!r}.")


def _whole(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdecimal() else None


def _real(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _answer(text: str) -> bool | None:
    return {"true": True, "false": False}.get(text.lower())


_PARSERS: dict[Any, Any] = {int: _whole, float: _real, bool: _answer, type(None): lambda text: None}
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
