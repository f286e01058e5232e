"""What an experiment hands back: its records, as a data frame, a plot, sentences, or files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from efficient_attn.errors import DataError, UnknownNameError
from efficient_attn.report.axes import draw
from efficient_attn.report.escape import plain
from efficient_attn.report.figures import Plot
from efficient_attn.report.files import write
from efficient_attn.report.html import Run
from efficient_attn.report.outputs import write_all
from efficient_attn.report.table import Table, to_html
from efficient_attn.runner.record import Record
from efficient_attn.runner.records import append
from efficient_attn.runner.records import read as read_records
from efficient_attn.stats.noise_warnings import doubts
from efficient_attn.studies import studies
from efficient_attn.studies.plan import STUDY
from efficient_attn.studies.run_folder import (
    COMMAND,
    ENVIRONMENT,
    PLAN,
    RECORDS,
    open_folder,
    read_json,
    read_text,
    write_json,
)
from efficient_attn.studies.shard import SHARD, by_run, common, in_order, missing, whole_plan
from efficient_attn.studies.view import flat_row, sample_rows, view_of


class Results:
    """Records of one or several runs.

    Attributes:
        records: In the order in which they were measured.
        environment: Machine and software, where known.
        interrupted: The run was ended from the keyboard; what was measured until then is here.
        notes: What should be known beside the numbers.
    """

    def __init__(
        self,
        records: Iterable[Record],
        *,
        environment: Mapping[str, Any] | None = None,
        interrupted: bool = False,
        notes: Iterable[str] = (),
    ) -> None:
        self.records = tuple(records)
        self.environment = dict(environment or {})
        self.interrupted = interrupted
        self.notes = tuple(notes)

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        return f"Results({len(self)} records; .to_pandas(), .plot(), .sentences(), .save(folder))"

    def _repr_html_(self) -> str:
        return "".join(map(to_html, self.tables()))

    def to_pandas(self, raw: bool = False) -> Any:
        """One row per case, flat, times as a median with its interval; raw: one row per sample."""
        import pandas

        if raw:
            return pandas.DataFrame([row for record in self.records for row in sample_rows(record)])
        return pandas.DataFrame(self.summary())

    def tables(self) -> list[Table]:
        """What was measured, as tables of text."""
        return self._shown("tables")

    def plot(
        self,
        name: str | None = None,
        *,
        ax: Any = None,
        labels: Mapping[str, str] | None = None,
        width: float | None = None,
        style: str = "screen",
    ) -> Any:
        """Draw one of `plots()`, the first if no name is given; the first axes.

        Args:
            ax: Axes for a plot of one chart; a new figure is made if left out.
            labels: {name: text}: texts for the legend in place of the names of lines.
            width: Of the figure, in inches, at which letters have their stated sizes.
            style: `screen`, or `paper`: small letters and no title.
        """
        known = self.plots()
        if not known:
            raise DataError("There is nothing to plot: no record holds a number.")
        if name is not None and name not in known:
            raise UnknownNameError("plot", name, known)
        plot = known[name or next(iter(known))]
        return draw(plot, ax=ax, labels=labels, width=width, style=style)[0]

    def sentences(self) -> list[str]:
        """A few sentences computed from the records."""
        return self._shown("sentences")

    def summary(self) -> list[dict[str, Any]]:
        """Flat rows of what was measured."""
        return [flat_row(record) for record in self.records]

    def plots(self) -> dict[str, Plot]:
        """All plots by the name of their files."""
        return dict(self._shown("plots"))

    def files(self) -> dict[str, str]:
        """Further files: {name: text}."""
        return dict(self._shown("files"))

    def save(self, folder: str | Path) -> list[Path]:
        """Write records, environment and all that is drawn; records that are there already are not touched.

        Raises:
            DataError: If the folder cannot be written.
        """
        folder = open_folder(folder)
        paths = [folder / RECORDS]
        if not paths[0].exists():
            for record in self.records:
                append(paths[0], record)
            if not self.records and SHARD in self.environment:
                # A share without points is read with the others.
                write(paths[0], "")
        if self.environment:
            paths.append(write_json(folder / ENVIRONMENT, self.environment))
        try:
            return paths + write_all([self.as_run(folder.resolve().name, folder)], folder, {})
        # Whatever goes wrong in drawing, the records are safe, and whoever measured them gets them back.
        except Exception as error:
            self.notes += (
                f"Not all could be drawn ({type(error).__name__}: {plain(str(error))}). "
                f"The records are safe; `efficient-attn report {folder}` draws them again.",
            )
            return paths

    def as_run(self, label: str, *homes: Path) -> Run:
        """Everything that a report shows of this run; commands and plan from the folders of its shares."""
        command = self.environment.get("command")
        words = " ".join(map(str, command)) if isinstance(command, list) else ""
        return Run(
            label=label,
            records=self.records,
            plots={name: plot for name, plot in self.plots().items() if not plot.is_empty},
            sentences=self.sentences(),
            tables=self.tables(),
            rows=self.summary(),
            files=self.files(),
            notes=self.notes,
            environment=self.environment,
            command="\n".join(filter(None, (read_text(home / COMMAND) for home in homes))) or words,
            plan=whole_plan(read_text(homes[0] / PLAN)) if len(homes) > 1 else read_text(homes[0] / PLAN),
        )

    def _shown(self, name: str) -> list[Any]:
        """Everything that the views of the records show by the function of that name."""
        found: list[Any] = []
        for view, records in self._parts():
            part = getattr(view, name)(records, self.environment)
            found += part.items() if isinstance(part, dict) else part
        return found

    def _parts(self) -> list[tuple[Any, list[Record]]]:
        """The views of the records, each with its records."""
        name = self.environment.get(STUDY)
        command = self.environment.get("command")
        if name is None and isinstance(command, list) and command[1:2] == ["reproduce"]:
            # Folders of figures formerly had the name of the study in the command alone.
            name = "reproduce"
        if isinstance(name, str) and name in studies():
            return [(studies()[name].view, list(self.records))]
        left, parts = list(self.records), []
        # A study of several kinds takes its records first: others have some of these kinds too.
        for study in sorted(studies().values(), key=lambda study: (-len(study.kinds), study.name)):
            own = study.own(left)
            if own:
                parts.append((study.view, own))
                taken = set(map(id, own))
                left = [record for record in left if id(record) not in taken]
        return parts + ([(view_of(None), left)] if left or not parts else [])


def read(*paths: str | Path) -> Results:
    """The results in folders of runs, or in files of records, taken together; shares of a run are one run.

    Raises:
        DataError: If there are none, or a file holds something else.
    """
    if not paths:
        raise DataError("Nothing to read: name at least one folder of a run, or a file of records.")
    runs = [run for run, _ in join_shares([read_one(path) for path in paths])]
    return runs[0] if len(runs) == 1 else _together(runs)


def read_one(path: str | Path) -> Results:
    """The results in one folder, or in one file of records."""
    studies()
    path = Path(path)
    file = path / RECORDS if path.is_dir() else path
    reading = read_records(file)
    # A repetition of a failed measurement stands in the file besides the failure.
    latest = {record.case.key: record for record in reading.records}.values()
    torn = [f"The last line of {file.name} was cut off and is left out."] if reading.torn else []
    known = read_json(file.parent / ENVIRONMENT) if (file.parent / ENVIRONMENT).exists() else {}
    return Results(latest, environment=known, notes=[*torn, *doubts(latest, known)])


def join_shares(parts: Sequence[Results]) -> list[tuple[Results, list[int]]]:
    """Every run with the indices of its parts: shares of one run are joined in the order of its plan."""
    found = []
    for group in by_run([part.environment for part in parts]):
        shares = [parts[index] for index in group]
        environments = [share.environment for share in shares]
        run = shares[0] if len(shares) == 1 else _together(shares, common(environments))
        records = in_order(run.records, environments[0]) if len(shares) > 1 else run.records
        # A share that was measured here has a note on all others.
        stale = {note for one in environments for note in missing([one])}
        notes = [*missing(environments), *(note for note in run.notes if note not in stale)]
        found.append((Results(records, environment=run.environment, notes=notes), group))
    return found


def _together(runs: Sequence[Results], environment: Mapping[str, Any] | None = None) -> Results:
    """The records of all runs; two machines have no common environment."""
    records = [record for run in runs for record in run.records]
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    return Results(records, environment=environment, notes=notes)
