"""Tables to stdout, talk and progress to stderr."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    from efficient_attn.report.harmless import plain

    typer.echo(plain(text), err=True)


def print_tables(tables: Sequence[Any]) -> None:
    """Tables with their notes to stdout."""
    from rich.console import Console

    from efficient_attn.report.harmless import plain
    from efficient_attn.report.table import to_rich

    width = None if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    console = Console(width=width, color_system=None if colours() is False else "auto")
    for table in tables:
        with console.capture() as drawn:
            console.print(to_rich(table))
        typer.echo("\n".join(row.rstrip() for row in drawn.get().rstrip().splitlines()))
        for note in table.notes:
            typer.echo(f"  {plain(note)}")
        typer.echo()


def draws() -> bool:
    """Whether stderr is a terminal that can draw a bar."""
    return sys.stderr.isatty() and colours() is not False


@contextmanager
def progress(total: int) -> Iterator[Callable[[Any], None]]:
    """A display of steps on stderr: a bar on a terminal that can draw one, else a line per finished point."""
    if not draws():
        yield _say_step
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
                bar.update(task, description=step.doing)

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
