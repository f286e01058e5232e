"""Results to stdout, talk and progress to stderr: every text that a command writes goes through here.

Names and messages may be anybody's; each leaves as one line without control characters.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import typer

# A file or a pipe has no width of its own; tables are printed as wide as they are.
_WIDTH_OF_A_FILE = 240


def colours() -> bool | None:
    """False where a terminal is not to be sent colours; None leaves it to what stands at the other end."""
    unable = os.environ.get("TERM", "dumb") in ("", "dumb")
    return False if unable or os.environ.get("NO_COLOR") else None


def say(text: str) -> None:
    """One line to the person at the keyboard."""
    put(text, err=True)


def put(text: object, *, err: bool = False, bold: bool = False) -> None:
    """One line of results."""
    from efficient_attn.report.harmless import plain

    typer.secho(plain(str(text)), err=err, bold=bold or None, color=colours())


def put_json(document: Any) -> None:
    """One JSON document to stdout, in printable ASCII: no text in it reaches a terminal as it is."""
    # Of the control characters JSON leaves this one as it is.
    typer.echo(json.dumps(document, indent=2, allow_nan=False).replace("\x7f", "\\u007f"))


def refuse(message: str) -> None:
    """One line, in red, that says what was wrong."""
    from efficient_attn.report.harmless import plain

    typer.secho(f"error: {plain(' '.join(message.split()))}", fg="red", err=True, color=colours())


def fault(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The traceback of a fault of ours; the text of the error may be somebody else's."""
    for part in traceback.format_exception(kind, error, trace):
        for row in part.splitlines():
            say(row)


def print_tables(tables: Sequence[Any]) -> None:
    """Tables with their notes to stdout."""
    from rich.console import Console

    from efficient_attn.report.table import to_rich

    width = None if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    console = Console(width=width, color_system=None if colours() is False else "auto")
    for table in tables:
        with console.capture() as drawn:
            console.print(to_rich(table))
        typer.echo("\n".join(row.rstrip() for row in drawn.get().rstrip().splitlines()))
        for note in table.notes:
            put(f"  {note}")
        put("")


def draws() -> bool:
    """Whether stderr is a terminal that can draw a bar."""
    return sys.stderr.isatty() and colours() is not False


@contextmanager
def progress(total: int, *, quiet: bool = False) -> Iterator[Callable[[Any], None]]:
    """A display of steps on stderr: a bar on a terminal that can draw one, else a line per finished point."""
    if quiet:
        yield lambda step: None
        return
    if not draws():
        yield _say_step
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from efficient_attn.report.harmless import plain

    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[remaining]}"),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, remaining="")

        def show(step: Any) -> None:
            bar.update(task, completed=step.done, total=step.total, remaining=remaining(step))
            if step.doing is not None:
                bar.update(task, description=plain(step.doing))

        yield show


def _say_step(step: Any) -> None:
    if step.record is None:
        return
    case = step.record.case
    place = "" if case.of == "attention" else f", {case.of}"
    place += "" if case.layer is None else f", layer {case.layer}"
    name = f"{case.label}{place}, {case.tokens} tokens, {case.kind}"
    say(f"[{step.done}/{step.total}] {name}: {step.record.status}; {remaining(step)}")


def remaining(step: Any) -> str:
    """How long it will still take."""
    minutes, seconds = divmod(round(step.remaining_s), 60)
    return f"{minutes}:{seconds:02} left"
