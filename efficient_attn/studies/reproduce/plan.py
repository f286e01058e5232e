"""Plan of a figure or table of a paper."""

from dataclasses import replace
from typing import Annotated

from efficient_attn.problem import positive_count
from efficient_attn.studies import options as shared
from efficient_attn.studies.plan import Plan
from efficient_attn.studies.reproduce.figures import Setting, find, list_figures
from efficient_attn.studies.study import Option
from efficient_attn.studies.workload import Workload, settle

# Key of a run's environment that names its figure.
FIGURE = "figure"

# Two minutes, less the start, the drawing and the last point.
BUDGET_S = 100.0


def plan(
    figure: Annotated[
        str | None,
        Option(
            help="Name of the figure; all figures are listed if omitted.",
            argument=True,
            metavar="FIGURE",
        ),
    ] = None,
    *,
    rounds: shared.Rounds = 4,
    quick: Annotated[bool, Option(help="Small sizes, which show that it works and nothing else.")] = False,
    threads: shared.Threads = None,
) -> Plan:
    """Measure a figure or table of a paper again on the CPU: its claims, our numbers, a verdict on each.

    Example: efficient-attn reproduce vaswani-table1
    """
    if figure is None:
        from efficient_attn.report.table import Table

        rows = tuple((name, find(name).TITLE, find(name).PAPER) for name in list_figures())
        listed = Table("Figures and tables of papers", ("figure", "title", "paper"), rows)
        return Plan(points=(), overview=(listed,))
    chosen = find(figure)
    positive_count("rounds", rounds)
    threads = settle(Workload(device="cpu", threads=threads)).threads
    made = chosen.plan(Setting(threads=threads or 1, rounds=rounds, quick=quick))
    return replace(made, about={FIGURE: figure}, budget_s=BUDGET_S)
