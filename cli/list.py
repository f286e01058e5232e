"""`efficient-attn list`: the backends, their capabilities, options and formulas."""

from dataclasses import MISSING, asdict, fields
from typing import Annotated, Any

import typer

from . import console
from .flags import JsonOption

# Capabilities shown by the table; JSON holds all of them.
_SHOWN = ("causal", "cross", "key_mask", "exact", "averages")
# Squared norm of the sum or difference of a pair at which errors of random features are compared.
_SQUARE = 10.0
_POWERS = {1: "n", 2: "n²"}


def list_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The backend to describe; all if omitted.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the backends, or show formula and options of one."""
    from efficient_attn.backends import list_backends, resolve
    from efficient_attn.external import package_of, plugins

    names = list_backends()
    if name is not None:
        spec = resolve(name)
        if as_json:
            console.put_json(_row(spec))
        else:
            _describe(spec)
        return
    specs = [resolve(name) for name in names]
    # Named, not imported: the capabilities of a plug-in are known once its backend is used.
    outside = [plugin for name, plugin in sorted(plugins().items()) if name not in names]
    if as_json:
        rows = [_row(spec) for spec in specs]
        nothing = dict.fromkeys(rows[0])
        rows += [nothing | {"name": plugin.name, "plugin": package_of(plugin)} for plugin in outside]
        console.put_json(rows)
        return
    console.print_tables([_table(specs)])
    for plugin in outside:
        about = f"{plugin.name}: of {package_of(plugin)}, imported on first use."
        console.tell(f"{about} efficient-attn list {plugin.name} describes it.")


def _describe(spec: Any) -> None:
    from efficient_attn.theory.kernel import KINDS, unbiased_from

    texts = {item.name: item.metadata.get("help", "") for item in fields(spec.options_type)}
    options = {
        f"option {name}": f"{str(value).lower()}: {texts[name]}" for name, value in _options(spec).items()
    }
    capabilities = {name.replace("_", " "): value for name, value in asdict(spec.capabilities).items()}
    about = {"formula": spec.formula, "paper": spec.paper, "size": spec.size_option}
    number = _fewer_products_from(spec)
    about["fewer products"] = number and f"than exact from {number} tokens, counted for heads of 64"
    if kind := KINDS.get(spec.name):
        below = unbiased_from(_SQUARE, kind=kind, head_dim=64)
        place = f"at |x {'−' if kind == 'trigonometric' else '+'} y|² = {_SQUARE:g}, heads of 64"
        about["norms=fixed"] = f"smaller error of a kernel entry below {below} features {place}"
    console.tell(f"{spec.name}: {spec.summary}")
    for name, value in {**about, **options, **capabilities}.items():
        if isinstance(value, bool):
            value = "yes" if value else "no"
        if isinstance(value, tuple):
            value = ", ".join(value)
        if value is not None:
            console.tell(f"{name:21}{value}", indent="  ")


def _row(spec: Any) -> dict[str, Any]:
    about = {name: getattr(spec, name) for name in ("name", "summary", "formula", "paper", "size_option")}
    about["fewer_products_from"] = _fewer_products_from(spec)
    return {**about, "options": _options(spec), "plugin": None, **asdict(spec.capabilities)}


def _fewer_products_from(spec: Any) -> int | None:
    from efficient_attn.backends import resolve
    from efficient_attn.theory.complexity import fewer_products_from

    return fewer_products_from(spec, resolve("exact"))


def _options(spec: Any) -> dict[str, Any]:
    return {
        field.name: None if field.default is MISSING else field.default for field in fields(spec.options_type)
    }


def _table(specs: list[Any]) -> Any:
    from efficient_attn.report.table import Table

    rows = []
    for spec in specs:
        capabilities = asdict(spec.capabilities)
        marks = ("yes" if capabilities[name] else "–" for name in _SHOWN)
        growths = (_POWERS[capabilities[f"{cost}_growth"]] for cost in ("time", "memory"))
        rows.append((spec.name, *marks, *growths, str(_fewer_products_from(spec) or "–")))
    columns = ("backend", *(name.replace("_", " ") for name in _SHOWN), "time", "memory", "fewer products")
    notes = (
        "Fewer products: tokens from which there are fewer multiplications than in exact attention, counted "
        "for heads of 64 and default options. Times are measured by `efficient-attn bench`.",
        "`efficient-attn list NAME` shows formula, paper and options of a backend.",
    )
    return Table("Capabilities of each backend", columns, tuple(rows), notes)
