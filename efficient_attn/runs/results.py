"""Results: records read from run folders, as data frame, tables, plots, sentences, files and reports."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from efficient_attn.errors import DataError, UnknownNameError, naming_missing
from efficient_attn.measure.record import Case, Record, append, merge_rows, write
from efficient_attn.measure.record import read as read_records
from efficient_attn.report.drawing import draw
from efficient_attn.report.figures import Plot
from efficient_attn.report.files import write_all
from efficient_attn.report.table import Table, plain, to_html
from efficient_attn.report.text import flat
from efficient_attn.runs.default_view import flat_row, samples
from efficient_attn.runs.header import stored_header
from efficient_attn.runs.registry import any_record, studies
from efficient_attn.runs.store import ENVIRONMENT, RECORDS, open_folder, read_json, run_folder
from efficient_attn.runs.study import Run, Study
from efficient_attn.stats.noise_warnings import DURING, background_load, doubts

# Columns of every frame, constant or not.
_COLUMNS = ("kind", "label", "tokens")


class Results:
    """Records of one or several runs: `for record in ea.mse(...)` visits each.

    Attributes:
        records: In the order in which they were measured.
        environment: Machine and software, where known.
        interrupted: The run was ended from the keyboard; what was measured until then is here.
        runs: Name of the run of each record; empty: there is one run.
        conflict: Reason why the records of several runs cannot be drawn as one run.
        complete: False once points have no record, or a file other than the records could not be written.
    """

    def __init__(
        self,
        records: Iterable[Record],
        *,
        environment: Mapping[str, Any] | None = None,
        interrupted: bool = False,
        notes: Iterable[str] = (),
        runs: Iterable[str] = (),
        conflict: str | None = None,
    ) -> None:
        self.records = tuple(records)
        self.environment = dict(environment or {})
        self.interrupted = interrupted
        self._notes = tuple(notes)
        self.runs = tuple(runs)
        self.conflict = conflict
        self.complete = True

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the numbers, such as a noisy machine."""
        return (*self._notes, *doubts(self.records, self.environment))

    @property
    def command(self) -> str:
        """Command line of the run, empty if unknown."""
        words = self.environment.get("command")
        return " ".join(map(str, words)) if isinstance(words, list) else ""

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __repr__(self) -> str:
        return f"Results({len(self)} records; .to_pandas(), .plot(), .sentences(), .save(folder))"

    def _repr_html_(self) -> str | None:
        return "".join(map(to_html, self.tables())) if self.conflict is None else None

    def check_drawable(self) -> None:
        """Refuse records of several runs that are no single run."""
        if self.conflict is not None:
            raise DataError(
                f"{self.conflict}. Rows of to_pandas() name their run; `efficient-attn diff` compares two."
            )

    def to_pandas(self, raw: bool = False, constant: bool = False) -> Any:
        """One flat row per case, times and draws as medians with intervals.

        Args:
            raw: One row per sample.
            constant: Keep columns of cases that are alike in all rows; kind, label and tokens stay.
        """
        import pandas

        rows = self.summary()
        if raw:
            pairs = zip(rows, self.records, strict=True)
            rows = [{**row, **sample} for row, record in pairs for sample in samples(record)]
        frame = pandas.DataFrame(rows)
        described = [name for name in frame if name in Case.__struct_fields__ and name not in _COLUMNS]
        alike = [name for name in described if len(set(frame[name])) == 1]
        return frame if constant or len(frame) == 1 else frame.drop(columns=alike)

    def tables(self) -> list[Table]:
        """What was measured, as tables of text."""
        return self._shown("tables")

    def plot(self, name: str | None = None, *, ax: Any = None) -> Any:
        """Draw one of `plots()`, the first if no name is given, and return its first axes.

        Args:
            ax: Axes for a plot of one chart; a new figure is made if left out.
        """
        plots = self.plots()
        if not plots:
            raise DataError("There is nothing to plot: no record holds a number that the study draws.")
        if name is not None and name not in plots:
            raise UnknownNameError("plot", name, plots)
        plot = plots[name or next(iter(plots))]
        return draw(plot, ax=ax)[0]

    def sentences(self) -> list[str]:
        """A few sentences computed from the records."""
        return self._shown("sentences")

    def summary(self) -> list[dict[str, Any]]:
        """Flat rows of all measurements, each with the name of its run if there are several."""
        if not self.runs:
            return list(map(flat_row, self.records))
        pairs = zip(self.runs, self.records, strict=True)
        return [{"run": run, **flat_row(record)} for run, record in pairs]

    def plots(self) -> dict[str, Plot]:
        """All plots by the name of their files."""
        return dict(self._shown("plots"))

    def files(self) -> dict[str, str]:
        """Further files: {name: text}."""
        return dict(self._shown("files"))

    def save(self, folder: str | Path) -> list[Path]:
        """Write records, environment, tables, plots and the page. Existing records stay untouched.

        Raises:
            DataError: If the folder cannot be written, or the records are no single run.
        """
        self.check_drawable()
        folder = open_folder(folder)
        paths = [folder / RECORDS]
        if not paths[0].exists():
            for record in self.records:
                append(paths[0], record)
        try:
            if self.environment:
                paths.append(write(folder / ENVIRONMENT, self.environment))
            return paths + write_all(self, folder, title=folder.resolve().name)
        # Whatever goes wrong in drawing, the records are safe, and whoever measured them gets them back.
        except Exception as error:
            self.complete = False
            self._notes += (
                f"Not all could be drawn ({type(error).__name__}: {plain(str(error))}). "
                f"The records are safe; `efficient-attn report {folder}` draws them again.",
            )
            return paths

    def _shown(self, name: str) -> list[Any]:
        """Everything that the views of that name show: of the run's study, or by kinds."""
        self.check_drawable()
        header, load = stored_header(self.environment, source=ENVIRONMENT), background_load(self.environment)
        if header is not None:
            parts = {type(header[0]): [*self.records]}
        else:
            parts = {}
            for record in self.records:
                parts.setdefault(_smallest(record.case.kind), []).append(record)
        shown: list[Any] = []
        for kind, records in parts.items():
            study, settled = header or (kind(), kind.settled_type())
            typed = [study.record.of(record) for record in records]
            part = study.view(name, typed, Run(settled, load))
            shown += part.items() if isinstance(part, dict) else part
        return shown


def _smallest(kind: str) -> type[Study]:
    """The study with records of this kind that has the fewest others."""
    able = [study for study in studies().values() if kind in study.kinds]
    return min(able, key=lambda study: (len(study.kinds), study.name() != "mse"), default=Study)


# Entries that identify a machine; times of two are never drawn as one run.
_MACHINE = ("gpu.name", "processor", "machine", "cores_usable", "torch.version")


def read(*paths: str | Path) -> Results:
    """All records in folders of runs, or in files of records.

    Rows of several runs name their run. Such results are drawn together unless two runs measured one case, or
    times are of several machines.

    Raises:
        DataError: If there are none, or a file holds something else.
    """
    if not paths:
        raise DataError("Nothing to read: name at least one folder of a run, or a file of records.")
    runs = {str(path): read_one(path) for path in paths}
    if len(runs) == 1:
        return next(iter(runs.values()))
    return Results(
        [record for run in runs.values() for record in run.records],
        environment=_common([run.environment for run in runs.values()]),
        notes=dict.fromkeys(note for run in runs.values() for note in run._notes),
        runs=[name for name, run in runs.items() for _ in run.records],
        conflict=_conflict(runs),
    )


def read_one(path: str | Path) -> Results:
    """The results in one folder, or in one file of records."""
    path = Path(path)
    file = path / RECORDS if path.is_dir() else path
    environment = read_json(file.parent / ENVIRONMENT) if (file.parent / ENVIRONMENT).exists() else {}
    header = stored_header(environment, source=str(file.parent / ENVIRONMENT))
    reading = read_records(file, any_record() if header is None else header[0].record)
    # Rounds, and repetitions of failed measurements, are rows of their own.
    records = merge_rows(reading.records).values()
    return Results(records, environment=environment, notes=reading.notes(file.name))


def _conflict(runs: Mapping[str, Results]) -> str | None:
    """Reason why these runs cannot be drawn as one, or None."""
    measured: dict[str, tuple[str, Record]] = {}
    for name, run in runs.items():
        for record in run.records:
            first, earlier = measured.setdefault(record.case.key, (name, record))
            if earlier != record:
                case = record.case
                return f"{first} and {name} both measured {case.label}, {case.tokens} tokens, {case.kind}"
    timed = [run for run in runs.values() if any(record.times_s for record in run.records)]
    machines = {}
    for run in timed:
        entries = dict(flat(run.environment))
        parts = [f"{name} {entries[name]}" for name in _MACHINE if name in entries]
        machines[", ".join(parts) or "unrecorded"] = run
    return f"The times are of several machines ({'; '.join(machines)})" if len(machines) > 1 else None


def _common(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Entries on which all runs agree. Conditions during the runs are joined."""
    first, *others = environments
    common = {name: value for name, value in first.items() if all(run.get(name) == value for run in others)}
    lists = [run[DURING] for run in environments if isinstance(run.get(DURING), list)]
    during = [entry for entries in lists for entry in entries]
    return {**common, **({DURING: during} if during else {})}


def report(*folders: str | Path, out: str | Path | None = None, interactive: bool = False) -> list[Path]:
    """Draw runs again from their records, into the folder of the only run or into `out`.

    Args:
        folders: Folders of runs; several are drawn as one run.
        out: A folder for the files; `runs/…` if there are several runs.
        interactive: Also write `interactive.html`, drawn by plotly.
    """
    if interactive:
        with naming_missing("report --interactive"):
            import_module("plotly")
    results = read(*folders)
    results.check_drawable()
    # Perhaps only the records of a run are named.
    homes = [path.parent if path.name == RECORDS else path for path in map(Path, folders)]
    folder = open_folder(out or (homes[0] if len(homes) == 1 else run_folder("report")), name="out")
    title = ", ".join(home.resolve().name for home in homes)
    return write_all(results, folder, title=title, interactive=interactive)
