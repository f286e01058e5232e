"""`efficient-attn report`: runs drawn again from their records."""

from pathlib import Path
from typing import Annotated

import typer

from . import talk

FoldersArgument = Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders of runs.")]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write nothing but the page, to this file.")
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Where to write; the folder of the run if there is only one."),
]


def report_command(folders: FoldersArgument, html: HtmlOption = None, out: OutOption = None) -> None:
    """Draw runs again from their records: one HTML page, plots, and tables as CSV, Markdown and LaTeX.

    Example: efficient-attn report runs/bench-20260101T000000Z results/laptop/bench --html both.html
    """
    from efficient_attn.experiments.redraw import report

    for path in report(*folders, html=html, out=out):
        talk.put(path)
