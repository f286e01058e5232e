"""Sphinx extension: the directive `reference`, tables of commands, options, quantities and fields.

They are made from the declarations whenever the site is built.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from docutils.nodes import Node
from docutils.nodes import container as Container
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from generate import table

_FLAG = re.compile(r"(?<!\S)--[a-z-]+")


def commands() -> list[str]:
    """Every command with its summary."""
    rows = [[f"`{name}`", _line(command.help)] for name, command in _commands().items()]
    return table(["command", "purpose"], rows)


def options() -> list[str]:
    """Every option with the commands that take it, and its default there."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name, command in _commands().items():
        for one in _shown(command):
            found.setdefault((_form(one), _line(one.help)), {})[name] = _default(one.default)
    rows = [[form, about, _places(places)] for (form, about), places in sorted(found.items())]
    return table(["option", "meaning", "commands (default)"], rows)


def quantities() -> list[str]:
    """Every quantity, with its unit, direction and kind of scatter."""
    from efficient_attn.measure.quantities import CONDITIONS, QUANTITIES
    from efficient_attn.studies import studies

    studies()
    rows = [[one, one.better or "–", one.scatter or "–"] for one in QUANTITIES.values()]
    rows += [[one, "–", f"condition: {one.condition}"] for one in CONDITIONS.values()]
    named = [[_quantity(one), one.unit, one.meaning, better, scatter] for one, better, scatter in rows]
    return table(["name", "unit", "meaning", "better", "scatter"], named)


def _quantity(one: Any) -> str:
    return f"`{one.name}`" if one.field == one.name else f"`{one.name}` (field `{one.field}`)"


def fields() -> list[str]:
    """Fields of a record that describe its case and its outcome."""
    from efficient_attn.measure.quantities import FIELDS
    from efficient_attn.studies import records_schema

    listed = records_schema()["properties"]
    rows = [[f"`{name}`", one["description"]] for name, one in listed.items() if name not in FIELDS]
    return table(["field", "meaning"], rows)


def kinds() -> list[str]:
    """Kinds of records of every study, and the fields of its quantities."""
    from efficient_attn.studies import studies

    rows = [
        [
            f"`{one.name}`",
            ", ".join(f"`{kind}`" for kind in one.kinds),
            ", ".join(f"`{field.name}`" for quantity in one.quantities for field in quantity.fields),
        ]
        for one in studies().values()
    ]
    return table(["study", "kinds", "fields"], rows)


def _commands() -> dict[str, Any]:
    import typer

    from efficient_attn_cli.main import app

    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def _shown(command: Any) -> Iterator[Any]:
    """Options in the help text."""
    return (one for one in command.params if one.param_type_name == "option" and not one.hidden)


def _form(one: Any) -> str:
    """The flag, with its negation or the form of its value."""
    flags = "/".join([*one.opts, *one.secondary_opts])
    return f"`{flags}`" if one.is_flag else f"`{flags}` {one.metavar or 'VALUE'}"


def _default(value: Any) -> str:
    nothing = value is None or value is False or callable(value) or value in ("", [], ())
    return "" if nothing else str(value)


def _places(places: dict[str, str]) -> str:
    return ", ".join(f"`{name}` ({value})" if value else f"`{name}`" for name, value in places.items())


def _line(text: str | None) -> str:
    """The first paragraph in one line, flags as code."""
    return _FLAG.sub(r"`\g<0>`", " ".join((text or "").partition("\n\n")[0].split()))


TABLES: dict[str, Callable[[], list[str]]] = {
    one.__name__: one for one in (commands, options, quantities, fields, kinds)
}


class Reference(Directive):
    """`{reference} TABLE`."""

    required_arguments = 1

    def run(self) -> list[Node]:
        """The table."""
        (name,) = self.arguments
        # Declarations change without the page.
        self.state.document.settings.env.note_reread()
        parent = Container()
        self.state.nested_parse(StringList(TABLES[name]()), self.content_offset, parent)
        return list(parent.children)


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("reference", Reference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
