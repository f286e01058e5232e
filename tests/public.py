"""The public interface as text: names with their parameters, commands, exit codes, fields of records.

`tests/public.txt` holds it as of the last release. `python tests/public.py` writes it anew, once the
changelog names every change.
"""

import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from public_names import default_text, names

FILE = Path(__file__).with_suffix(".txt")
CHANGELOG = Path(__file__).parent.parent / "CHANGELOG.md"
HEAD = """\
# The public interface at the last release. tests/test_public.py compares it with the present one: a change
# has an entry in the section Unreleased of CHANGELOG.md that names it. `python tests/public.py` writes this.
"""

Interface = dict[str, list[str]]


def interface() -> Interface:
    """Everything public with its lines: parameters, attributes, options, fields."""
    return {name: lines for part in (names(), backends(), commands(), records()) for name, lines in part}


def backends() -> Iterator[tuple[str, list[str]]]:
    """Names of backends with their options, and with promises other than the default."""
    import efficient_attn as ea

    usual = {one.name: one.default for one in dataclasses.fields(ea.Capabilities)}
    for name in ea.list_backends():
        spec = ea.spec(name)
        options = dataclasses.fields(spec.options_type)
        promises = {one: getattr(spec.capabilities, one) for one in usual}
        yield (
            f"backend {name}",
            [
                *(f"{one.name} = {default_text(one.default)}" for one in options),
                *(f"promises {one} = {kept!r}" for one, kept in promises.items() if kept != usual[one]),
            ],
        )


def commands() -> Iterator[tuple[str, list[str]]]:
    """Commands with options and defaults, and exit codes."""
    import typer

    from efficient_attn_cli import exits, main

    group: Any = typer.main.get_command(main.app)
    for name, command in sorted(group.commands.items()):
        yield f"command {name}", sorted(option(one) for one in command.params if one.name != "help")
    yield "exit codes", [f"{name} = {code}" for name, code in vars(exits).items() if name.isupper()]


def option(one: Any) -> str:
    """Flags, or the name of a positional argument, with default; former flags are not in the help text."""
    flags = "/".join([*one.opts, *one.secondary_opts]) if one.param_type_name == "option" else one.name
    if one.required:
        return f"{flags} (required)"
    # The type of a missing default depends on the version of click.
    has_default = isinstance(one.default, (str, int, float)) and one.default is not False
    default = f" = {one.default}" if has_default else ""
    return f"{flags}{default}{' (hidden)' if getattr(one, 'hidden', False) else ''}"


def records() -> Iterator[tuple[str, list[str]]]:
    """Version of the schema, fields of every record, and fields of the quantities of every study."""
    from efficient_attn.runner.quantity import FIELDS
    from efficient_attn.runner.record import CASE_FIELDS, SCHEMA, STATUSES
    from efficient_attn.studies import studies

    own = {one.name: one for one in studies().values()}
    fields = {name: [f for q in one.quantities for f in q.fields] for name, one in own.items()}
    taken = {field.name for found in fields.values() for field in found}
    yield "records", [f"schema = {SCHEMA}", *(f"status {one}" for one in STATUSES)]
    yield "records: fields of the case", sorted(CASE_FIELDS)
    yield "records: fields of any study", sorted(line(f) for name, f in FIELDS.items() if name not in taken)
    for name, found in sorted(fields.items()):
        yield (
            f"records of {name}",
            [*(f"kind {one}" for one in own[name].kinds), *dict.fromkeys(map(line, found))],
        )


def line(field: Any) -> str:
    return f"{field.name}: {field.type}{f' in {field.unit}' if field.unit else ''}"


def text(found: Interface) -> str:
    """One line for each entry, indented below its owner."""
    return HEAD + "".join(f"{name}\n" + "".join(f"    {one}\n" for one in own) for name, own in found.items())


def parsed(page: str) -> Interface:
    found: Interface = {}
    lines: list[str] = []
    for one in page.splitlines():
        if one.startswith(" "):
            lines.append(one.strip())
        elif not one.startswith("#"):
            found[one] = lines = []
    return found


def changes(before: Interface, now: Interface) -> Iterator[tuple[str, str]]:
    """Pairs (owner, entry) that differ; of an owner that came or went only itself, with no entry."""
    yield from ((owner, "") for owner in sorted(before.keys() ^ now.keys()))
    for owner in sorted(before.keys() & now.keys()):
        yield from ((owner, entry) for entry in sorted({*before[owner]} ^ {*now[owner]}))


def unnamed(found: Iterable[tuple[str, str]], changelog: str) -> list[str]:
    """Changes that no item of the section `Unreleased` names with their owner.

    The owner may be missing where several owners have the same change.
    """
    section = changelog.partition("## [Unreleased]")[2].partition("\n## [")[0]
    items = [re.findall(r"\w+(?:-\w+)*", one) for one in re.split(r"\n(?=- |#)", section)]
    found = list(found)
    owners = Counter(entry for _, entry in found)
    missing = []
    for owner, entry in found:
        wanted = {leaf(entry)} if owners[entry] > 1 and entry else {leaf(owner), leaf(entry)} - {""}
        if not any(wanted <= {*item} for item in items):
            missing.append(f"{owner}: {entry}" if entry else owner)
    return missing


def leaf(line: str) -> str:
    """The name in a line: `seed` of `2. seed = 0`, `bench` of `command bench` and `efficient_attn.bench`."""
    sort = r"\d+\.|backend|command|records of|returned:|kind|status|promises|is a"
    return re.split(r"[ =:/(]", re.sub(rf"^(?:(?:{sort}) |[.*-]+)", "", line))[0].rpartition(".")[2]


def main() -> None:
    now = interface()
    before = parsed(FILE.read_text(encoding="utf-8")) if FILE.exists() else now
    if missing := unnamed(changes(before, now), CHANGELOG.read_text(encoding="utf-8")):
        sys.exit("The section Unreleased of CHANGELOG.md does not name:\n" + "\n".join(missing))
    FILE.write_text(text(now), encoding="utf-8")


if __name__ == "__main__":
    main()
