"""Output of commands: results to stdout, notices and progress to stderr.

Names and messages of other code are printed as one line without control characters.
"""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import typer


def colours() -> bool | None:
    """False if colours are switched off, and None where the stream decides."""
    unable = os.environ.get("TERM", "dumb") in ("", "dumb")
    return False if unable or os.environ.get("NO_COLOR") else None


def put(text: object, *, err: bool = False) -> None:
    """Print one line of results."""
    from efficient_attn.report.table import plain

    typer.secho(plain(str(text)), err=err, color=colours())


# Print a notice to stderr.
say = partial(put, err=True)


def put_json(document: Any) -> None:
    """Print one JSON document to stdout, in printable ASCII without control characters."""
    # JSON escapes all other control characters.
    typer.echo(json.dumps(document, indent=2, allow_nan=False).replace("\x7f", "\\u007f"))


def refuse(message: str) -> None:
    """Print an error in red."""
    tell(f"error: {' '.join(message.split())}", err=True, fg="red")


def print_tables(tables: Sequence[Any]) -> None:
    """Print tables with their notes to stdout."""
    from efficient_attn.report.table import to_rich

    console = _console()
    told: set[str] = set()
    for table in (table for table in tables if not table.detail):
        with console.capture() as drawn:
            console.print(to_rich(table, console.width))
        typer.echo("\n".join(row.rstrip() for row in drawn.get().rstrip().splitlines()))
        for note in dict.fromkeys(note for note in table.notes if note not in told):
            tell(note, indent="  ")
        told |= {*table.notes}
        typer.echo()


def tell(text: object, *, indent: str = "", err: bool = False, fg: str | None = None) -> None:
    """Print a sentence or note: one line, or on a terminal lines that end between words."""
    from efficient_attn.report.table import plain

    # Names and paths that are longer than a line stay whole, so that they can be copied.
    lines = textwrap.fill(
        plain(str(text)),
        _console(err=err).width if (sys.stderr if err else sys.stdout).isatty() else sys.maxsize,
        initial_indent=indent,
        # A name that has spaces cannot forge a message of its own.
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    typer.secho(lines, fg=fg, err=err, color=colours())


def _console(*, err: bool = False) -> Any:
    from rich.console import Console

    from efficient_attn.report.table import WIDEST

    stream = sys.stderr if err else sys.stdout
    console = Console(stderr=err, color_system=None if colours() is False else "auto")
    console.width = min(console.width, WIDEST) if stream.isatty() else WIDEST
    return console


@contextmanager
def live_bar(first: Callable[[Any], bool] | None) -> Iterator[Callable[[Any], None]]:
    """Progress as one bar on a terminal, as lines elsewhere.

    Args:
        first: Function of each step until it has printed something and returns True.
    """
    if not sys.stderr.isatty() or colours() is False:
        yield lambda step: say(str(step))
        return
    from rich.progress import BarColumn, Progress, TextColumn

    from efficient_attn.report.table import plain

    # A thread that redraws the bar would disturb measurements.
    text = TextColumn("{task.completed}/{task.total} · {task.fields[text]}", markup=False)
    bar = Progress(BarColumn(20), text, console=_console(err=True), auto_refresh=False, transient=True)
    task = bar.add_task("", text="")

    def show(step: Any) -> None:
        nonlocal first
        bar.stop()
        if first is not None and first(step):
            first = None
        # The first record starts the bar, so that notices before it have lines of their own.
        bar.start()
        spent = "" if step.spent is None else f"{100 * step.spent:.0f} % of the budget · "
        words = plain(f"{spent}{step.left} · {step.current}")
        bar.update(task, total=step.total, completed=step.done, text=words, refresh=True)

    try:
        yield show
    finally:
        bar.stop()
