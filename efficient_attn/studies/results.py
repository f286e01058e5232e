"""What an experiment hands back: its records, as a data frame, a plot, sentences, or files."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from efficient_attn.errors import DataError, UnknownNameError
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.records import append
from efficient_attn.report.drawing import draw
from efficient_attn.report.escape import plain
from efficient_attn.report.figures import Plot
from efficient_attn.report.files import Run, write_all
from efficient_attn.report.table import Table, to_html
from efficient_attn.studies import studies
from efficient_attn.studies.points import STUDY
from efficient_attn.studies.run_folder import (
    COMMAND,
    ENVIRONMENT,
    RECORDS,
    open_folder,
    read_text,
    write_json,
)
from efficient_attn.studies.study import Study
from efficient_attn.studies.view import flat_row, sample_rows, view_of

# Columns of every frame, constant or not.
_COLUMNS = ("kind", "label", "tokens")


class Results:
    """Records of one or several runs.

    Attributes:
        records: In the order in which they were measured.
        environment: Machine and software, where known.
        interrupted: The run was ended from the keyboard; what was measured until then is here.
        notes: What should be known beside the numbers.
        runs: Name of the run of each record; empty: there is one run.
        conflict: Reason why the records of several runs cannot be drawn as one run.
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
        self.notes = tuple(notes)
        self.runs = tuple(runs)
        self.conflict = conflict

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        return f"Results({len(self)} records; .to_pandas(), .plot(), .sentences(), .save(folder))"

    def _repr_html_(self) -> str | None:
        return "".join(map(to_html, self.tables())) if self.conflict is None else None

    def check_drawable(self) -> None:
        """Refuse records of several runs that are no single run.

        Raises:
            DataError: If they are none.
        """
        if self.conflict is not None:
            raise DataError(
                f"{self.conflict}. Rows of to_pandas() name their run; `efficient-attn report` shows "
                "the runs side by side."
            )

    def to_pandas(self, raw: bool = False, constant: bool = False) -> Any:
        """One row per case, flat, times as a median with its interval.

        Args:
            raw: One row per sample.
            constant: Keep columns of cases that are alike in all rows; kind, label and tokens stay.
        """
        import pandas

        frame = pandas.DataFrame(self._rows(sample_rows) if raw else self.summary())
        described = [name for name in frame if name in Case.__struct_fields__ and name not in _COLUMNS]
        alike = [name for name in described if len(set(frame[name])) == 1]
        return frame if constant or len(frame) == 1 else frame.drop(columns=alike)

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
        """Flat rows of all measurements; of several runs each row names its own."""
        return self._rows(lambda record: [flat_row(record)])

    def plots(self) -> dict[str, Plot]:
        """All plots by the name of their files."""
        return dict(self._shown("plots"))

    def files(self) -> dict[str, str]:
        """Further files: {name: text}."""
        return dict(self._shown("files"))

    def save(self, folder: str | Path) -> list[Path]:
        """Write records, environment and all that is drawn; records that are there already are not touched.

        Raises:
            DataError: If the folder cannot be written, or the records are no single run.
        """
        self.check_drawable()
        folder = open_folder(folder)
        paths = [folder / RECORDS]
        if not paths[0].exists():
            for record in self.records:
                append(paths[0], record)
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

    def as_run(self, label: str, home: Path) -> Run:
        """Everything that a report shows of this run; its command from its folder."""
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
            command=read_text(home / COMMAND) or words,
        )

    def _rows(self, rows_of: Callable[[Record], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        if not self.runs:
            return [row for record in self.records for row in rows_of(record)]
        pairs = zip(self.runs, self.records, strict=True)
        return [{"run": run, **row} for run, record in pairs for row in rows_of(record)]

    def _shown(self, name: str) -> list[Any]:
        """Everything that the views show by the function of that name."""
        self.check_drawable()
        shown: list[Any] = []
        for view, records in self._parts():
            part = getattr(view, name)(records, self.environment)
            shown += part.items() if isinstance(part, dict) else part
        return shown

    def _parts(self) -> list[tuple[Any, list[Record]]]:
        """Views with their records: of the named study, or by the kind of the records."""
        named = studies().get(str(self.environment.get(STUDY)))
        if named is not None:
            return [(named.view, list(self.records))]
        parts: dict[Study | None, list[Record]] = {}
        for record in self.records:
            parts.setdefault(_smallest(record.case.kind), []).append(record)
        return [(view_of(None) if study is None else study.view, part) for study, part in parts.items()] or [
            (view_of(None), [])
        ]


def _smallest(kind: str) -> Study | None:
    """The study with records of this kind that has the fewest others."""
    able = [study for study in studies().values() if kind in study.kinds]
    return min(able, key=lambda study: (len(study.kinds), study.name != "mse"), default=None)
