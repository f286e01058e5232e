"""`efficient-attn report`: page, plots and tables of runs from their records."""

from pathlib import Path
from typing import Annotated

import typer

from . import console


def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders of runs.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the files; the run's own folder if omitted (several runs: a new runs/… folder).",
        ),
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Also write interactive.html; needs plotly.")
    ] = False,
) -> None:
    """Redraw page, plots and tables of runs from their records.

    Writes an HTML page, plots as PNG, SVG and PDF, and tables as CSV and Markdown.

    Example: efficient-attn report runs/short runs/long --out both
    """
    from efficient_attn.runs.results import report

    for path in report(*folders, out=out, interactive=interactive):
        console.put(path)
