"""Variants, backends with a choice of their options, with their labels, and names of inputs."""

import itertools
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from efficient_attn.errors import DtypeError, OptionError, UnknownNameError
from efficient_attn.measure.record import Case
from efficient_attn.measure.units import parse_names
from efficient_attn.options import SEED, recorded

# Types of options that texts are converted to, and that records hold.
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_PLAIN = (*_TYPE_NAMES, type(None))

# Label of identity attention, the upper bound on the speed-up of a block.
CEILING = "attention := v"

# The baseline of all comparisons, exact attention through the fused kernel, and the baseline of the papers,
# naive attention.
YARDSTICK, DENSE = "exact", "exact-dense"

# Label of the baseline: each query gets the mean of the values.
UNIFORM_ATTENTION = "uniform attention"

GAUSSIAN = "gaussian"

# Subject of cases of a whole model, and label of its original attention.
MODEL, OWN = "model", "the model's own"

# Backend and label of a plan: a backend for each layer of a model.
PLAN = "plan"

# Names of inputs: several layers of a model, and a single one.
_SEVERAL = re.compile(r"(.*)\(layers=(\d+(?:,\d+)*)\)", re.DOTALL)
_SINGLE = re.compile(r"(.*)\(layer=(\d+)\)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A backend with a choice of its options.

    Attributes:
        backend: Name in records: a registered name, or `file.py:object`.
        target: Argument of `build`: a name, a path, a module or a callable.
        options: All options, including defaults.
        execution: decoded; None: all tokens.
    """

    backend: str
    label: str
    target: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    time_growth: int = 1
    memory_growth: int = 1
    causal: bool = True
    execution: str | None = None

    def case(self, **fields: Any) -> Case:
        """A case of this variant, with these further fields."""
        return Case(
            backend=self.backend, label=self.label, options=self.options, execution=self.execution, **fields
        )


def is_yardstick(item: Variant | Case) -> bool:
    """Whether it is exact attention with default options, which speeds are compared with."""
    return item.backend == YARDSTICK and not any(item.options.values())


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
    backends: Sequence[Any] | str | None,
    settings: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    *,
    usual: Sequence[str] | None = None,
    also: bool = False,
) -> tuple[Variant, ...]:
    """The variants of the named backends, one per combination of the set options.

    None selects `usual`, `["all"]` every registered backend.

    Args:
        usual: None: `compared_backends`, since errors and speed-ups against exact attention are meaningful
            for backends that approximate it alone.
        also: Whether None also selects further variants of the backends, unless their options are set.
    """
    from efficient_attn.backends import compared_backends, list_backends, resolve

    if isinstance(backends, str):
        backends = parse_names([backends], name="backends")
    targets = (compared_backends() if usual is None else usual) if backends is None else backends
    named = [(_name_of(x), x) for x in (list_backends() if [*targets] == ["all"] else targets)]
    if CEILING in dict(named):
        raise OptionError(f"{CEILING!r} is not a backend: it is measured with every block automatically.")
    for backend in settings or {}:
        if backend not in dict(named):
            chosen = ", ".join(name for name, _ in named)
            raise OptionError(f"--set {backend}.…: {backend!r} is not a selected backend ({chosen}).")
    variants: dict[str, Variant] = {}
    for name, target in named:
        choices = [(settings or {}).get(name, {})]
        if also and backends is None and not choices[0]:
            choices += [{option: [x] for option, x in further.items()} for further in resolve(target).also]
        for variant in itertools.chain(*(_variants(name, target, options) for options in choices)):
            if variants.setdefault(variant.label, variant) is not variant:
                raise OptionError(f"Two of the backends are called {variant.label!r}; name each once.")
    return tuple(variants.values())


def _name_of(target: Any) -> str:
    name = target if isinstance(target, str) else getattr(target, "name", getattr(target, "__name__", None))
    return name if isinstance(name, str) else type(target).__name__


def has_address(target: Any) -> bool:
    """Whether another process can resolve the target: a built-in or plug-in name, or a path."""
    from efficient_attn import backends
    from efficient_attn.external import is_address, plugins

    if not isinstance(target, str):
        return False
    spec = backends.SPECS.get(target)
    ours = spec is not None and spec.builder.__module__.startswith(f"{backends.__name__}.")
    return ours or target == CEILING or is_address(target) or target in plugins()


def _variants(name: str, target: Any, settings: Mapping[str, Sequence[Any]]) -> Iterator[Variant]:
    from efficient_attn.backends import resolve
    from efficient_attn.external import is_address, label_of

    spec = resolve(target)
    option_types = typing.get_type_hints(spec.options_type)
    choices = []
    for option, values in settings.items():
        if option not in option_types:
            raise UnknownNameError(f"option of backend {name!r}", option, option_types)
        choices.append([_converted(name, option, value, option_types[option]) for value in values])
    shown = label_of(name) if is_address(name) else name
    for values in itertools.product(*choices):
        options = dict(zip(settings, values, strict=True))
        setting = ", ".join(f"{option}={value}" for option, value in options.items())
        complete = recorded(spec.options_type(**options))
        yield Variant(
            backend=shown,
            label=f"{shown}({setting})" if setting else shown,
            target=target,
            # Values without a JSON form are stored as text.
            options={option: v if isinstance(v, _PLAIN) else str(v) for option, v in complete.items()},
            time_growth=spec.capabilities.time_growth,
            memory_growth=spec.capabilities.memory_growth,
            causal=spec.capabilities.causal,
        )


def _converted(backend: str, option: str, value: Any, option_type: Any) -> Any:
    kinds = typing.get_args(option_type) if isinstance(option_type, types.UnionType) else (option_type,)
    if not isinstance(value, str) or not {*kinds} <= {*_PLAIN}:
        return value
    if value.lower() == "none" and type(None) in kinds:
        return None
    try:
        converted = msgspec.convert(value, option_type, strict=False)
    except msgspec.ValidationError:
        converted = math.nan
    if isinstance(converted, float) and not math.isfinite(converted):
        names = " or ".join(_TYPE_NAMES.get(kind, "none") for kind in kinds)
        raise DtypeError(f"--set {backend}.{option}={value}: {option} is {names}, not {value!r}.")
    return converted


class Sized(NamedTuple):
    """A label without its size, and the size, or None if the backend has none."""

    series: str
    size: int | None


def with_size(variant: Variant, option: str, size: int) -> Variant:
    """The variant with its size set, labelled `name(option=size)`, the size last."""
    name, inner = _split(variant.label)
    label = f"{name}({', '.join([*inner, f'{option}={size}'])})"
    return replace(variant, label=label, options={**variant.options, option: size})


def sized(case: Case) -> Sized:
    """Parse a label: `performer-positive(projection=iid, num_features=64)` has size 64."""
    name, inner = _split(case.label)
    for item in reversed(inner):
        option, _, value = item.partition("=")
        if option != SEED and option in case.options and re.fullmatch(r"\d+", value):
            rest = [setting for setting in inner if setting != item]
            return Sized(f"{name}({', '.join(rest)})" if rest else name, int(value))
    return Sized(case.label, None)


def _split(label: str) -> tuple[str, list[str]]:
    """Split `name(a=1, b=2)` into name and items. A label without items has none."""
    parts = re.fullmatch(r"(.*?)\((.*)\)", label)
    return (parts[1], parts[2].split(", ")) if parts else (label, [])


def joint_name(names: Sequence[str]) -> str:
    """`encoder(layers=0,1,5)` for the inputs `encoder(layer=0)`, `encoder(layer=1)`, `encoder(layer=5)`."""
    if len(names) == 1 or not all(map(_SINGLE.fullmatch, names)):
        return names[0]
    layers = ",".join(name.rpartition("=")[2].removesuffix(")") for name in names)
    return f"{names[0].rpartition('(')[0]}(layers={layers})"


def single_names(inputs: str) -> tuple[str, ...]:
    """Inverse of `joint_name`. Any other name stands for itself."""
    joint = _SEVERAL.fullmatch(inputs)
    return tuple(f"{joint[1]}(layer={layer})" for layer in joint[2].split(",")) if joint else (inputs,)
