"""Writes docs/api.md, the list of public names, to which autodoc adds signatures and docstrings."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "efficient_attn"
PAGE = Path(__file__).parent / "api.md"

_HEAD = """\
# API

Public names of `efficient_attn`, imported as `ea` on these pages, and of its modules for checking, for
several processes and for Hugging Face. All other names may change at any time.
"""

_HUGGING_FACE = "integrations.transformers"
_INTERCEPT = "integrations.intercept"
# The first fitting beginning of a module's name selects the heading.
_HEADINGS = {
    "Backends": ("backend", "registry", "external", "problem"),
    "In models": ("transformer", "integrations.attach", "integrations.intercept"),
    "In Hugging Face models": (_HUGGING_FACE,),
    "Measuring": ("studies", "runs", "tools", "measure"),
    "On several processes": ("distributed",),
    "Checking": ("testing",),
    "Errors": ("errors",),
}
_MARKUP = re.compile(r"([*_|\\])")


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    names = list(public_names())
    for heading, beginnings in _HEADINGS.items():
        lines += [f"## {heading}", ""]
        for name, module, is_class in names:
            if module.startswith(beginnings):
                directive = "autoclass" if is_class else "autofunction"
                lines += ["```{eval-rst}", f".. {directive}:: {name}", "```", ""]
    return "\n".join(lines)


def public_names() -> Iterator[tuple[str, str, bool]]:
    """Every public name with its whole path, the module behind it, and whether it is a class."""
    for module, names in _assigned("__init__", "_NAMES").items():
        for name in names.split():
            yield f"efficient_attn.{name}", module, _is_class(name, module)
    for study in sorted(path.stem for path in PACKAGE.glob("studies/[!_]*")):
        yield f"efficient_attn.{study}", f"studies.{study}", False
    modules = {name: name for name in ("testing", "distributed")}
    modules |= {_INTERCEPT: "intercept", _HUGGING_FACE: _HUGGING_FACE}
    for module, shown in modules.items():
        for name in _assigned(module, "__all__"):
            yield f"efficient_attn.{shown}.{name}", module, _is_class(name, module)


def escaped(lines: Iterable[str]) -> list[str]:
    """Escape markup in the lines of a docstring, except in backquotes."""
    return ["`".join(_alternately_escaped(line.split("`"))) for line in lines]


def _alternately_escaped(parts: list[str]) -> list[str]:
    parts[::2] = [_MARKUP.sub(r"\\\1", part) for part in parts[::2]]
    return parts


def _is_class(name: str, module: str) -> bool:
    """Whether the definition, found through imports from other modules, is a class."""
    parsed = _parsed(module)
    for x in parsed.body:
        if isinstance(x, (ast.FunctionDef, ast.ClassDef)) and x.name == name:
            return isinstance(x, ast.ClassDef)
    for x in ast.walk(parsed):
        if isinstance(x, ast.ImportFrom) and any(alias.name == name for alias in x.names):
            return _is_class(name, (x.module or "").removeprefix("efficient_attn."))
    raise LookupError(f"efficient_attn.{module} has no {name}.")


def _assigned(module: str, name: str) -> dict | list:
    """The literal that a module assigns to a name."""
    values = [x.value for x in _parsed(module).body if isinstance(x, ast.Assign) and _target(x) == name]
    return ast.literal_eval(values[0])


def _target(x: ast.Assign) -> str:
    return x.targets[0].id if isinstance(x.targets[0], ast.Name) else ""


def _parsed(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
