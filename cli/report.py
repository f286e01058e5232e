"""`efficient-attn report`: page, plots and tables of runs from their records."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from efficient_attn.errors import OptionError

from . import console

# The settings in the brackets of a name have equals signs of their own.
_LABEL = re.compile(r"([^=(]+(?:\([^)]*\))?)=(.+)")


def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders of runs.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write only the page, to this file.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder for the files; omitted: the run's own folder, or a new runs/… for several runs.",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="NAME=TEXT", help="Text in place of the name of a line or row; repeatable."
        ),
    ] = None,
    width: Annotated[
        float | None,
        typer.Option("--width", metavar="INCHES", help="Width of figures; a column of a paper: 3.3."),
    ] = None,
    style: Annotated[
        str,
        typer.Option(
            "--style", metavar="screen|paper", help="Style of figures; paper: small letters, no title."
        ),
    ] = "screen",
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Also write interactive.html, for a browser; needs plotly.")
    ] = False,
) -> None:
    """Redraw runs from their records: page, plots and tables.

    Files: an HTML page, plots as PNG, SVG and PDF, and tables as CSV and Markdown.

    Example: efficient-attn report runs/before runs/after --html both.html
    """
    from efficient_attn.studies.results import report

    paths = report(
        *folders,
        html=html,
        out=out,
        labels=_labels(label or ()),
        width=width,
        style=style,
        interactive=interactive,
    )
    for path in paths:
        console.put(path)


def _labels(texts: Sequence[str]) -> dict[str, str]:
    """{name: text} from `name=text`."""
    labels = {}
    for text in texts:
        if (pair := _LABEL.fullmatch(text)) is None:
            raise OptionError(f'--label cannot be {text!r}. Write name=text: --label "linformer=Linformer".')
        labels[pair[1]] = pair[2]
    return labels
