"""`efficient-attn report`: page, plots and tables of runs from their records."""

from pathlib import Path
from typing import Annotated

import typer

from . import talk

FoldersArgument = Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders of runs.")]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write only the page, to this file.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder for the files; omitted: the run's own folder, or a new runs/… for several runs.",
    ),
]


def report_command(folders: FoldersArgument, html: HtmlOption = None, out: OutOption = None) -> None:
    """Redraw runs from their records: page, plots and tables.

    Files: an HTML page, plots as PNG and SVG, and tables as CSV, Markdown and LaTeX.

    Example: efficient-attn report runs/before runs/after --html both.html
    """
    from efficient_attn.experiments.redraw import report

    for path in report(*folders, html=html, out=out):
        talk.put(path)
