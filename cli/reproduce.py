"""`efficient-attn reproduce`: figures and tables of papers, measured again."""

import sys
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from . import exits, talk
from .options import BudgetOption, OutOption, RoundsOption, ThreadsOption


def _figures(incomplete: str) -> list[str]:
    from efficient_attn.experiments.reproduction import list_figures

    return [name for name in list_figures() if name.startswith(incomplete)]


FigureArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[FIGURE]", help="One of the figures that are listed without it.", autocompletion=_figures
    ),
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="Small sizes, which show that it works and nothing else.")
]


def reproduce_command(
    figure: FigureArgument = None,
    budget: BudgetOption = "100s",
    threads: ThreadsOption = None,
    rounds: RoundsOption = 4,
    quick: QuickOption = False,
    out: OutOption = None,
) -> None:
    """Reproduce a figure or table of a paper, with verdicts.

    Example: efficient-attn reproduce vaswani-table1
    """
    from efficient_attn.sweep.amounts import parse_seconds

    budget_s = parse_seconds(budget, name="--budget")
    if figure is None:
        _list()
        return
    from efficient_attn.experiments import reproduction
    from efficient_attn.experiments.files import open_folder, run_folder
    from efficient_attn.measure.environment import command_line

    reproduction.find(figure)
    folder = open_folder(out or run_folder(f"reproduce-{figure}"), name="--out", fresh=True)
    with talk.progress(0) as show, redirect_stdout(sys.stderr):
        made = reproduction.reproduce(
            figure,
            budget_s=budget_s,
            threads=threads,
            rounds=rounds,
            quick=quick,
            out=folder,
            command=command_line(),
            progress=show,
        )
    talk.print_tables(made.tables())
    for finding in made.findings():
        _say(finding)
    for note in made.notes():
        talk.say(note)
    talk.put(folder)
    raise typer.Exit(_exit_code(made))


def _say(finding: Any) -> None:
    """A claim, the numbers that bear on it, the verdict last."""
    talk.put(finding.claim)
    talk.put(f"  measured: {finding.measured}")
    talk.put(f"  verdict:  {finding.verdict}", bold=True)
    talk.put("")


def _list() -> None:
    from efficient_attn.experiments.reproduction import find, list_figures
    from efficient_attn.report.table import Table

    found = {name: find(name) for name in list_figures()}
    rows = tuple((name, figure.TITLE, figure.PAPER) for name, figure in found.items())
    talk.print_tables([Table("Figures and tables of papers", ("figure", "what it shows", "paper"), rows)])


def _exit_code(made: Any) -> int:
    """How it went; points that did not fit into memory or the budget are expected."""
    if made.interrupted:
        return exits.INTERRUPTED
    if all(record.status != "ok" for record in made.records):
        return exits.NOTHING_MEASURED
    unexpected = [record for record in made.records if record.status not in ("ok", "skipped")]
    return exits.SOME_NOT_MEASURED if unexpected else exits.DONE
