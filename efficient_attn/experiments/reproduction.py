"""Reproduction of paper results: claims, measurements and a verdict on each.

A figure is a file in `experiments/reproduce/`: it measures records, and whatever is shown is computed from
them, so that a folder can be judged and drawn again.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from efficient_attn.analysis.doubts import DURING, doubts
from efficient_attn.analysis.verdicts import Finding
from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.experiments import reproduce as figures
from efficient_attn.experiments.files import COMMAND, ENVIRONMENT, RECORDS, open_folder, write_json
from efficient_attn.experiments.folder import only_writer
from efficient_attn.experiments.workload import Workload, settle
from efficient_attn.measure.conditions import between, moment
from efficient_attn.measure.environment import environment
from efficient_attn.problem import positive_count
from efficient_attn.report.axes import draw
from efficient_attn.report.figures import Plot
from efficient_attn.report.files import write
from efficient_attn.report.save import save
from efficient_attn.report.table import Table, to_csv, to_markdown
from efficient_attn.sweep.records import Record, append
from efficient_attn.sweep.run import ROUNDS, Step

# Two minutes, without starting, drawing and the last point.
DEFAULT_BUDGET_S = 100.0

TABLE, TABLE_CSV, VERDICTS = "table.md", "table.csv", "verdicts.md"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How much may be measured.

    Attributes:
        budget_s: Seconds of measuring; points that do not fit are skipped with a reason.
        rounds: How often each time is taken up.
        quick: Small sizes, which show that it works and nothing else.
    """

    threads: int
    budget_s: float = DEFAULT_BUDGET_S
    rounds: int = ROUNDS
    quick: bool = False


class Figure(Protocol):
    """Content of a file of `experiments/reproduce/`; it imports no torch at its top.

    Attributes:
        TITLE: Content of the figure or table.
        PAPER: Authors, year, title, address.
    """

    TITLE: str
    PAPER: str

    @staticmethod
    def measure(
        setting: Setting, *, emit: Callable[[Record], None], progress: Callable[[Step], None] | None
    ) -> bool:
        """Measure everything; `emit` gets each record as soon as it exists. False: interrupted."""

    @staticmethod
    def findings(records: Sequence[Record]) -> list[Finding]:
        """A verdict on every claim, computed from the records."""

    @staticmethod
    def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
        """The numbers, flat, with their units in the names."""

    @staticmethod
    def tables(records: Sequence[Record]) -> list[Table]:
        """The numbers in the paper's form, printed and measured."""

    @staticmethod
    def draw(records: Sequence[Record]) -> Plot:
        """A plot in the paper's quantities."""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Records of a figure, and the verdicts on its paper's claims.

    Attributes:
        interrupted: The run was ended from the keyboard; the records until then are kept.
    """

    name: str
    figure: Figure
    records: tuple[Record, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    def findings(self) -> list[Finding]:
        """A verdict on every claim."""
        return self.figure.findings(self.records)

    def tables(self) -> list[Table]:
        """The numbers, printed and measured."""
        return self.figure.tables(self.records)

    def notes(self) -> list[str]:
        """Noise warnings of the times."""
        return doubts(self.records, self.environment)

    def plot(self) -> Any:
        """The axes of the figure."""
        return draw(self.figure.draw(self.records))[0]

    def save(self, folder: str | Path) -> None:
        """Write plot, tables and verdicts; the records are there already, or are written too."""
        folder = open_folder(folder)
        if not (folder / RECORDS).exists():
            for record in self.records:
                append(folder / RECORDS, record)
        claims = Table(
            "Verdicts", ("claim", "measured", "verdict"), tuple(self.findings()), tuple(self.notes())
        )
        head = f"# {self.name}: {self.figure.TITLE}\n\n{self.figure.PAPER}\n\n"
        write(folder / TABLE, head + "\n\n".join(map(to_markdown, self.tables())) + "\n")
        # Words are aligned to the left, although some begin with a number.
        write(folder / VERDICTS, head + to_markdown(claims).replace("---:", "---") + "\n")
        write(folder / TABLE_CSV, to_csv(self.figure.rows(self.records)))
        save(self.plot().figure, folder, self.name)


def list_figures() -> tuple[str, ...]:
    """The names of all figures, sorted."""
    files = pkgutil.iter_modules(figures.__path__)
    return tuple(sorted(file.name.replace("_", "-") for file in files if not file.name.startswith("_")))


def find(name: str) -> Figure:
    """The figure of that name.

    Raises:
        UnknownNameError: If there is none.
    """
    if name not in list_figures():
        raise UnknownNameError("figure", name, list_figures())
    module: Any = importlib.import_module(f"{figures.__name__}.{name.replace('-', '_')}")
    return module


def reproduce(
    name: str,
    *,
    budget_s: float = DEFAULT_BUDGET_S,
    threads: int | None = None,
    rounds: int = ROUNDS,
    quick: bool = False,
    out: str | Path | None = None,
    command: Sequence[str] = (),
    progress: Callable[[Step], None] | None = None,
) -> Reproduction:
    """Measure a figure or table of a paper again, on the CPU.

    Args:
        name: One of `list_figures()`.
        budget_s: Seconds of measuring; points that do not fit are skipped with a reason.
        rounds: How often each time is taken up; more makes it more certain.
        quick: Small sizes, which show that it works and nothing else.
        out: A folder for records, environment, plot, tables and verdicts.
    """
    figure = find(name)
    if not budget_s > 0:
        raise OptionError(f"budget_s is a number of seconds above 0, not {budget_s!r}.")
    positive_count("rounds", rounds)
    workload = settle(Workload(device="cpu", threads=threads))
    setting = Setting(threads=workload.threads or 1, budget_s=budget_s, rounds=rounds, quick=quick)
    machine = environment(command=command)
    records: list[Record] = []
    folder = None if out is None else open_folder(out, name="out", fresh=True)

    def emit(record: Record) -> None:
        if folder is not None:
            append(folder / RECORDS, record)
        records.append(record)

    with nullcontext() if folder is None else only_writer(folder):
        start = moment()
        complete = figure.measure(setting, emit=emit, progress=progress)
        machine[DURING] = [between(start, moment(), device="cpu")]
        made = Reproduction(
            name=name, figure=figure, records=tuple(records), environment=machine, interrupted=not complete
        )
        if folder is not None:
            write_json(folder / ENVIRONMENT, machine)
            write(folder / COMMAND, " ".join(machine["command"]) + "\n")
            if any(record.status == "ok" for record in records):
                made.save(folder)
    return made
