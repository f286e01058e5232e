"""Public Python names as text, with parameters, attributes and methods."""

import ast
import dataclasses
import inspect
import re
import runpy
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

API = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "api.py"))

# Its import needs an extra, so that its sources are read instead.
FROM_SOURCE = "efficient_attn.integrations.transformers"


def names() -> Iterator[tuple[str, list[str]]]:
    """Every name of the page API, and the classes that these functions return."""
    public = list(API["public_names"]())
    imported = {name: resolved(name) for name, _, _ in public if not name.startswith(FROM_SOURCE)}
    found = {name: value for name, value in imported.items() if inspect.isclass(value)}
    for name, value in sorted(imported.items()):
        if name not in found:
            yield name, parameters(inspect.signature(value))
            for one in returned(value):
                if one not in imported.values():
                    found[f"returned: {one.__module__}.{one.__qualname__}"] = one
    for name, one in sorted(found.items()):
        # Classes that are only returned are not made by users.
        made = constructor(one) if name in imported else []
        # A parameter of a dataclass is its attribute.
        known = made if dataclasses.is_dataclass(one) else []
        fields = {re.split(r"[ =]", line)[0] for line in known}
        yield name, [*made, *(f".{field}" for field in attributes(one) if field not in fields), *methods(one)]
    for name, module, _ in public:
        if name.startswith(FROM_SOURCE):
            yield name, from_source(definition(name.rpartition(".")[2], module))


def resolved(name: str) -> Any:
    import efficient_attn as value

    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def returned(function: Any) -> list[type]:
    """Classes of the library in the type of the returned value."""
    function = inspect.unwrap(function)
    if not getattr(function, "__annotations__", None):
        return []
    kind = typing.get_type_hints(function).get("return")
    ours = [one for one in (kind, *typing.get_args(kind)) if inspect.isclass(one)]
    return [one for one in ours if one.__module__.startswith("efficient_attn.")]


def constructor(one: type) -> list[str]:
    """Parameters; of an error the errors by which it can be caught."""
    if not issubclass(one, BaseException):
        return parameters(inspect.signature(one))
    return [f"is a {base.__name__}" for base in one.__mro__[1:-3]]


def attributes(one: type) -> list[str]:
    """Fields, properties and the attributes that the docstring names."""
    documented = re.split(r"\n\s*Attributes:\n", one.__doc__ or "")[1:]
    found = {name for part in documented for name in re.findall(r"^ +(\w+): ", part, re.MULTILINE)}
    found |= {field.name for field in dataclasses.fields(one)} if dataclasses.is_dataclass(one) else set()
    found |= {*getattr(one, "_fields", ())}
    found |= {name for name, value in members(one) if not inspect.isroutine(value)}
    return [name for name in sorted(found) if not name.startswith("_")]


def methods(one: type) -> list[str]:
    found = {name: value for name, value in members(one) if inspect.isroutine(value)}
    return [f".{name}({', '.join(method(value))})" for name, value in sorted(found.items())]


def method(value: Any) -> list[str]:
    shown = parameters(inspect.signature(value), numbered=False)
    return shown[1:] if shown[:1] in (["self"], ["cls"]) else shown


def members(one: type) -> Iterator[tuple[str, Any]]:
    """Public properties and methods that our classes define."""
    for base in reversed(one.__mro__):
        if base.__module__.startswith("efficient_attn"):
            for name, value in vars(base).items():
                plain = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                is_member = isinstance(plain, property) or hasattr(plain, "func") or inspect.isroutine(plain)
                if is_member and not name.startswith("_"):
                    yield name, plain


def parameters(signature: inspect.Signature, *, numbered: bool = True) -> list[str]:
    """Each with its default; positional ones with their place, since callers rely on it."""
    lines, starred = [], False
    for place, one in enumerate(signature.parameters.values(), start=1):
        default = "" if one.default is one.empty else f" = {default_text(one.default)}"
        positional = one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        if one.kind is one.KEYWORD_ONLY and not (starred or numbered):
            lines.append("*")
        starred |= one.kind in (one.VAR_POSITIONAL, one.KEYWORD_ONLY)
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        lines.append(f"{f'{place}. ' if positional and numbered else stars}{one.name}{default}")
    return lines


def default_text(value: Any) -> str:
    """A default as text that is the same in every process."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__qualname__
    return repr(value)


def definition(name: str, module: str) -> Any:
    """The node that defines a name, found through imports from other modules."""
    body = API["_parsed"](module).body
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    home = next(node.module for node in imports if name in [alias.name for alias in node.names])
    return definition(name, home.removeprefix("efficient_attn."))


def from_source(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """The same of a definition that is not imported; of a class its bases."""
    if isinstance(node, ast.ClassDef):
        return [f"is a {ast.unparse(base)}" for base in node.bases]
    own, empty = node.args, inspect.Parameter.empty

    class Text(str):
        __repr__ = str.__str__

    def made(one: ast.arg, kind: Any, default: ast.expr | None = None) -> inspect.Parameter:
        shown = empty if default is None else Text(ast.unparse(default))
        return inspect.Parameter(one.arg, kind, default=shown)

    positional = [*own.posonlyargs, *own.args]
    defaults = [None] * (len(positional) - len(own.defaults)) + own.defaults
    found = [
        made(one, inspect.Parameter.POSITIONAL_OR_KEYWORD, default)
        for one, default in zip(positional, defaults, strict=True)
    ]
    found += [made(own.vararg, inspect.Parameter.VAR_POSITIONAL)] if own.vararg else []
    named = zip(own.kwonlyargs, own.kw_defaults, strict=True)
    found += [made(one, inspect.Parameter.KEYWORD_ONLY, default) for one, default in named]
    found += [made(own.kwarg, inspect.Parameter.VAR_KEYWORD)] if own.kwarg else []
    return parameters(inspect.Signature(found))
