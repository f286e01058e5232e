"""Views of the records of a figure: its tables, its plot, and a verdict on every claim."""

from collections.abc import Sequence
from typing import Any

from efficient_attn.report.table import Table, to_markdown
from efficient_attn.runner.record import Record
from efficient_attn.stats.noise_warnings import IDLE, disturbance, doubts
from efficient_attn.stats.verdicts import Finding, not_measured
from efficient_attn.studies.reproduce.figures import find, list_figures
from efficient_attn.studies.reproduce.plan import FIGURE
from efficient_attn.studies.view import Environment, Plots


def figure_of(environment: Environment) -> tuple[str, Any] | None:
    """The name of a run's figure and the figure, from the command if the run was written before."""
    command = environment.get("command")
    words = [environment.get(FIGURE), *(command if isinstance(command, list) else [])]
    name = next((word for word in words if word in list_figures()), None)
    return None if name is None else (name, find(name))


def findings(records: Sequence[Record], environment: Environment) -> list[Finding]:
    """A verdict on every claim."""
    found = figure_of(environment)
    return [] if found is None else found[1].findings(records)


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """The numbers as the paper prints them, with our numbers and the reasons of missing points."""
    found = figure_of(environment)
    made = [] if found is None else found[1].tables(records)
    return [*made[:-1], *(one._replace(notes=(*one.notes, *not_measured(records))) for one in made[-1:])]


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The claims with their verdicts, and a warning if the times of the run support none."""
    load = disturbance(records, environment) if any(record.times_s for record in records) else None
    warning = f"Verdicts on times: could not tell on this machine now, {load}; {IDLE}."
    return [warning] * (load is not None) + [
        f"{one.claim}: {one.verdict}. Measured: {one.measured}." for one in findings(records, environment)
    ]


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The figure."""
    found = figure_of(environment)
    measured = any(record.status == "ok" for record in records)
    return {found[0]: found[1].draw(records)} if found and measured else {}


def files(records: Sequence[Record], environment: Environment) -> dict[str, str]:
    """The verdicts as a Markdown table."""
    found = figure_of(environment)
    if found is None:
        return {}
    name, figure = found
    notes = tuple(doubts(records, environment))
    claims = Table("Verdicts", ("claim", "measured", "verdict"), tuple(figure.findings(records)), notes)
    # Text is aligned to the left, although some of it begins with a number.
    table = to_markdown(claims).replace("---:", "---")
    return {"verdicts.md": f"# {name}: {figure.TITLE}\n\n{figure.PAPER}\n\n{table}\n"}
