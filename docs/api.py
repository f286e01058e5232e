"""The page of everything public, read from signatures and docstrings whenever the site is built.

Nothing is imported: the sources are parsed, so that optional packages need not be there.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, wrap

PACKAGE = Path(__file__).parent.parent / "efficient_attn"
PAGE = Path(__file__).parent / "api.md"

_HEAD = """\
# API reference

Everything in `efficient_attn`, imported as `ea` on these pages, and in its modules for checking and for
Hugging Face. What is not here is not public and may change at any time.
"""

_HUGGING_FACE = "integrations.transformers"
# The first fitting beginning of a module's name says under which heading it stands.
_HEADINGS = {
    "Backends": ("backend", "registry", "problem", "calibration"),
    "In models": ("transformer", "integrations.pytorch"),
    "In Hugging Face models": (_HUGGING_FACE,),
    "Measuring": ("experiments", "studies", "measure", "sweep"),
    "Checking": ("testing",),
    "Errors": ("errors",),
}
# Characters of a line of code that a page shows without scrolling.
_WIDTH = 84
_SECTION = re.compile(r"^(Args|Attributes|Raises|Yields):$")
_ENTRY = re.compile(r"^    (\S[^:]*): (.*)$")


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    names = dict(public_names())
    for heading, beginnings in _HEADINGS.items():
        lines += [f"## {heading}", ""]
        for name, module in names.items():
            if module.startswith(beginnings):
                lines += _described(name, module)
    return "\n".join(lines)


def public_names() -> Iterator[tuple[str, str]]:
    """Every public name, as one writes it, with the module that defines it."""
    root = _parsed("__init__")
    home = next(x.value for x in root.body if isinstance(x, ast.Assign) and _target(x) == "_HOME")
    yield from ((f"ea.{name}", module) for name, module in ast.literal_eval(home).items())
    for folder in sorted(one.parent for one in PACKAGE.glob("studies/*/plan.py")):
        yield f"ea.{folder.name}", f"studies.{folder.name}.plan"
    for module in ("testing", _HUGGING_FACE):
        parsed = _parsed(module)
        listed = next(x.value for x in parsed.body if isinstance(x, ast.Assign) and _target(x) == "__all__")
        origins = {
            alias.name: (x.module or "").removeprefix("efficient_attn.")
            for x in parsed.body
            if isinstance(x, ast.ImportFrom)
            for alias in x.names
        }
        for name in ast.literal_eval(listed):
            # What `testing` takes from elsewhere stands with it all the same.
            inside = origins.get(name, module) if module == _HUGGING_FACE else module
            yield f"{module}.{name}", inside


def _described(name: str, module: str) -> list[str]:
    """Heading, signature and docstring of a function or class, and of a class's public methods."""
    short = name.rpartition(".")[2]
    # The options of a study are the parameters of its plan.
    found = _find("plan" if module.startswith("studies.") else short, module)
    lines = [f"### {name}", ""]
    if isinstance(found, ast.FunctionDef):
        return [*lines, *_signature(name, found), *_prose(ast.get_docstring(found))]
    methods = {x.name: x for x in found.body if isinstance(x, ast.FunctionDef)}
    if "__init__" in methods:
        lines += _signature(name, methods["__init__"], bound=True)
    lines += _prose(ast.get_docstring(found))
    for method in methods.values():
        told = ast.get_docstring(method)
        if told and not method.name.startswith("_"):
            shown = any(isinstance(x, ast.Name) and x.id == "property" for x in method.decorator_list)
            lines += [f"`.{method.name}`", ""] if shown else _signature(f".{method.name}", method, bound=True)
            lines += _prose(told)
    return lines


def _find(name: str, module: str) -> ast.FunctionDef | ast.ClassDef:
    """The definition, wherever the module has it from."""
    parsed = _parsed(module)
    for x in parsed.body:
        if isinstance(x, (ast.FunctionDef, ast.ClassDef)) and x.name == name:
            return x
    for x in parsed.body:
        if isinstance(x, ast.ImportFrom) and any(alias.name == name for alias in x.names):
            return _find(name, (x.module or "").removeprefix("efficient_attn."))
    raise LookupError(f"efficient_attn.{module} has no {name}.")


def _parsed(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _target(x: ast.Assign) -> str:
    return x.targets[0].id if isinstance(x.targets[0], ast.Name) else ""


def _signature(name: str, function: ast.FunctionDef, *, bound: bool = False) -> list[str]:
    """The call with its defaults in a block of code; types are said in words below it."""
    arguments = function.args
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        one.annotation = None
    for one in (arguments.vararg, arguments.kwarg):
        if one is not None:
            one.annotation = None
    if bound and arguments.args and not any(map(_is_static, function.decorator_list)):
        del arguments.args[0]
    call = f"{name}({ast.unparse(arguments)})"
    indent = " " * (len(name) + 1)
    return ["```text", *wrap(call, width=_WIDTH, subsequent_indent=indent, break_long_words=False), "```", ""]


def _is_static(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "staticmethod"


def _prose(told: str | None) -> list[str]:
    """A docstring in Markdown: paragraphs, and lists for arguments, attributes and errors."""
    lines: list[str] = []
    listing = False
    for line in dedent(told or "").splitlines():
        section, entry = _SECTION.match(line), _ENTRY.match(line)
        if section:
            listing = True
            lines += ["", f"**{section[1]}**", ""]
        elif listing and entry and not line.startswith("     "):
            lines.append(f"- `{entry[1]}`: {_plain(entry[2])}")
        elif listing and line.strip():
            lines.append(f"  {_plain(line.strip())}")
        else:
            listing = listing and not line.strip()
            lines.append(_plain(line))
    return [*lines, ""]


def _plain(text: str) -> str:
    """Text without what Markdown would take for its own, code in backquotes aside."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_$<\\])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
