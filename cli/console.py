"""Output of commands: results to stdout, notices and progress to stderr.

Names and messages of other code are printed as one line without control characters.
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

# A file or a pipe has no width; tables are printed in full.
_WIDTH_OF_A_FILE = 240


def colours() -> bool | None:
    """False if colours are switched off; None lets the stream decide."""
    unable = os.environ.get("TERM", "dumb") in ("", "dumb")
    return False if unable or os.environ.get("NO_COLOR") else None


def say(text: str) -> None:
    """Print a notice to stderr."""
    put(text, err=True)


def put(text: object, *, err: bool = False, bold: bool = False) -> None:
    """Print one line of results."""
    from efficient_attn.report.escape import plain

    typer.secho(plain(str(text)), err=err, bold=bold or None, color=colours())


def put_json(document: Any) -> None:
    """Print one JSON document to stdout, in printable ASCII without control characters."""
    # JSON escapes all other control characters.
    typer.echo(json.dumps(document, indent=2, allow_nan=False).replace("\x7f", "\\u007f"))


def refuse(message: str) -> None:
    """Print an error in one red line."""
    from efficient_attn.report.escape import plain

    typer.secho(f"error: {plain(' '.join(message.split()))}", fg="red", err=True, color=colours())


def fault(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an internal error without control characters."""
    for part in traceback.format_exception(kind, error, trace):
        for row in part.splitlines():
            say(row)


def print_tables(tables: Sequence[Any]) -> None:
    """Print tables with their notes to stdout."""
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
    """Whether stderr is a terminal that can draw a progress bar."""
    return sys.stderr.isatty() and colours() is not False


@contextmanager
def progress(total: int, *, quiet: bool = False) -> Iterator[Callable[[Any], None]]:
    """Progress display on stderr: a bar on a terminal, otherwise a line per finished point."""
    if quiet:
        yield lambda step: None
        return
    if not draws():
        yield _say_step
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from efficient_attn.report.escape import plain

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
    outcome = step.doing or f"{name}: {step.record.status}"
    say(f"[{step.done}/{step.total}] {outcome}; {remaining(step)}")


def remaining(step: Any) -> str:
    """Predicted time left; empty before anything is measured."""
    if not step.done:
        return ""
    minutes, seconds = divmod(round(step.remaining_s), 60)
    return f"{minutes}:{seconds:02} left"
