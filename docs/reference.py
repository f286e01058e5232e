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
    places_of: dict[tuple[str, str], dict[str, str]] = {}
    for name, command in _commands().items():
        for option in _shown(command):
            places_of.setdefault((_form(option), _line(option.help)), {})[name] = _default(option.default)
    rows = [[form, about, _places(places)] for (form, about), places in sorted(places_of.items())]
    return table(["option", "meaning", "commands (default)"], rows)


def quantities() -> list[str]:
    """Every quantity, with its unit, direction and kind of scatter."""
    from efficient_attn.runs.registry import any_record

    declared = any_record().quantities().values()
    rows = [[x, x.better or "–", x.scatter or "–"] for x in declared if x.compared]
    rows += [[x, "–", "not compared"] for x in declared if not x.compared]
    named = [
        [_quantity(quantity), quantity.unit, quantity.meaning, better, scatter]
        for quantity, better, scatter in rows
    ]
    return table(["name", "unit", "meaning", "better", "scatter"], named)


def _quantity(quantity: Any) -> str:
    field = "" if quantity.field == quantity.name else f" (field `{quantity.field}`)"
    return f"`{quantity.name}`{field}"


def fields() -> list[str]:
    """Fields of a record that describe its case and its outcome."""
    from efficient_attn.runs.registry import any_record, records_schema

    listed, measured = records_schema()["properties"], any_record().fields()
    rows = [[f"`{name}`", field["description"]] for name, field in listed.items() if name not in measured]
    return table(["field", "meaning"], rows)


def kinds() -> list[str]:
    """Kinds of records of every study, and the fields that it declares itself."""
    from efficient_attn.measure.record import Record
    from efficient_attn.runs.registry import studies

    rows = [
        [
            f"`{name}`",
            ", ".join(f"`{kind}`" for kind in study.kinds),
            ", ".join(f"`{name}`" for name in study.record.fields() if name not in Record.fields()),
        ]
        for name, study in studies().items()
    ]
    return table(["study", "kinds", "fields"], rows)


def _commands() -> dict[str, Any]:
    import typer

    from efficient_attn_cli.main import app

    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def _shown(command: Any) -> Iterator[Any]:
    """Options in the help text."""
    return (option for option in command.params if option.param_type_name == "option" and not option.hidden)


def _form(option: Any) -> str:
    """The flag, with its negation or the form of its value."""
    flags = "/".join([*option.opts, *option.secondary_opts])
    return f"`{flags}`" if option.is_flag else f"`{flags}` {option.metavar or 'VALUE'}"


def _default(value: Any) -> str:
    nothing = value is None or value is False or callable(value) or value in ("", [], ())
    return "" if nothing else str(value)


def _places(places: dict[str, str]) -> str:
    return ", ".join(f"`{name}` ({value})" if value else f"`{name}`" for name, value in places.items())


def _line(text: str | None) -> str:
    """The first paragraph in one line, flags as code."""
    return _FLAG.sub(r"`\g<0>`", " ".join((text or "").partition("\n\n")[0].split()))


TABLES: dict[str, Callable[[], list[str]]] = {
    function.__name__: function for function in (commands, options, quantities, fields, kinds)
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
