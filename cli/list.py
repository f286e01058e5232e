"""`efficient-attn list`: the backends and what each promises."""

import json
from dataclasses import MISSING, asdict, fields
from typing import Any

import typer

from . import talk
from .options import JsonOption

# What a table shows of the promises; the rest is in the JSON.
_SHOWN = ("causal", "cross", "key_mask", "exact", "averages")
_POWERS = {1: "n", 2: "n²"}


def list_command(as_json: JsonOption = False) -> None:
    """List the backends, what each promises, its options and its paper."""
    from efficient_attn.backends import list_backends, spec

    specs = [spec(name) for name in list_backends()]
    if as_json:
        typer.echo(json.dumps([_row(one) for one in specs], indent=2, ensure_ascii=False))
        return
    talk.print_tables([_table(specs)])


def _row(one: Any) -> dict[str, Any]:
    return {
        "name": one.name,
        "summary": one.summary,
        "paper": one.paper,
        "options": _options(one),
        "size_option": one.size_option,
        **asdict(one.capabilities),
    }


def _options(one: Any) -> dict[str, Any]:
    return {item.name: None if item.default is MISSING else item.default for item in fields(one.options_type)}


def _table(specs: list[Any]) -> Any:
    from efficient_attn.report.table import Table

    rows = []
    for one in specs:
        promises = asdict(one.capabilities)
        marks = ("yes" if promises[name] else "–" for name in _SHOWN)
        growths = (_POWERS[promises[f"{cost}_growth"]] for cost in ("time", "memory"))
        rows.append((one.name, *marks, *growths))
    columns = ("backend", *(name.replace("_", " ") for name in _SHOWN), "time", "memory")
    return Table("What each backend promises", columns, tuple(rows), tuple(map(_note, specs)))


def _note(one: Any) -> str:
    """What it is, what can be chosen, where it was published."""
    options = ", ".join(f"{name}={value}" for name, value in _options(one).items())
    return " ".join(
        filter(None, [f"{one.name}: {one.summary}", options and f"Options: {options}.", one.paper])
    )
