"""What an experiment hands back: its records, as a data frame, a plot, sentences, or files."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from efficient_attn.analysis.comparison import asked_error, comparison_rows, comparisons, without_compared
from efficient_attn.analysis.curves import QUANTITIES
from efficient_attn.analysis.doubts import doubts
from efficient_attn.analysis.head_errors import HEADS
from efficient_attn.analysis.kernel import kernel_records
from efficient_attn.analysis.rate import rate_shares
from efficient_attn.analysis.rows import SAMPLES, flat_row, sample_rows
from efficient_attn.analysis.summary import summary
from efficient_attn.analysis.swaps import swap_rows, swaps, without_swaps
from efficient_attn.analysis.training import training_rows
from efficient_attn.errors import DataError, UnknownNameError
from efficient_attn.experiments.files import ENVIRONMENT, RECORDS, open_folder, read_json, write_json
from efficient_attn.report import plot as cost_plot
from efficient_attn.report.comparison import comparison_sentences, comparison_tables
from efficient_attn.report.comparison_plot import COMPARISON, plot_comparisons
from efficient_attn.report.cost_table import tables
from efficient_attn.report.error_overview import overview_tables
from efficient_attn.report.harmless import plain
from efficient_attn.report.head_errors import head_error_tables, plot_heads
from efficient_attn.report.heads import head_tables
from efficient_attn.report.kernel_errors import kernel_sentences, kernel_tables
from efficient_attn.report.kernel_plot import OVER, kernel_plots, plot_kernel
from efficient_attn.report.parts import part_tables
from efficient_attn.report.pays import crossover_tables
from efficient_attn.report.readable import readable
from efficient_attn.report.recall import recall_sentences, recall_tables
from efficient_attn.report.recall_plot import RECALL, plot_recall
from efficient_attn.report.sentences import bench_sentences
from efficient_attn.report.swap_plot import SWAP, plot_swaps
from efficient_attn.report.swap_sentences import swap_sentences
from efficient_attn.report.swaps import swap_tables
from efficient_attn.report.table import Table, to_html
from efficient_attn.report.train_plot import TRAINING, plot_training
from efficient_attn.report.training import training_sentences, training_tables
from efficient_attn.sweep.case import KINDS, Record
from efficient_attn.sweep.records import append
from efficient_attn.sweep.records import read as read_records

# Where errors are drawn, tabled and put into words; loaded when there are errors to show.
_ERROR_REPORTS = (
    "efficient_attn.report.error_plot",
    "efficient_attn.report.error_table",
    "efficient_attn.experiments.mse",
)


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
        shares = rate_shares(self.records)
        return pandas.DataFrame([flat_row(record, shares.get(record.case.key)) for record in self.records])

    def tables(self) -> list[Table]:
        """What was measured, as tables of text."""
        alone = self._apart()
        costs = [record for record in alone.records if record.case.kind in QUANTITIES.values()]
        made = [
            *swap_tables(self.records),
            *comparison_tables(self.records),
            *tables(costs),
            *crossover_tables(costs),
            *head_tables(costs),
        ]
        errors = alone._of_kind("error")
        if errors:
            made += _errors("tables")(errors) + overview_tables(errors)
            made += head_error_tables(errors) + part_tables(errors)
        made += kernel_tables(self.records) + recall_tables(self.records)
        return made + training_tables(self.records)

    def plot(self, y: str | None = None, x: str | None = None, *, ax: Any = None) -> Any:
        """Draw one quantity of every backend against tokens, or an error against the size; the axes."""
        y = y or (SWAP if swaps(self.records) else None)
        y = y or (COMPARISON if comparisons(self.records) else None)
        y = y or (TRAINING if self._of_kind("train") else None)
        y = y or (RECALL if self._of_kind("recall") else None)
        y = y or ("time_s" if self._of_kind("time") else "output_relative_error")
        whole = {SWAP: plot_swaps, TRAINING: plot_training, RECALL: plot_recall}
        if y == COMPARISON:
            return plot_comparisons(self.records, self._max_error)
        if y in whole:
            return whole[y](self.records)
        if y in QUANTITIES:
            if x not in (None, "tokens"):
                raise UnknownNameError(f"x axis for {y}", str(x), ["tokens"])
            return cost_plot.plot(self.records, y=y, ax=ax)
        if y in OVER or (kernel_records(self.records) and not self._of_kind("error")):
            return plot_kernel(self.records, x=x or OVER.get(y, "size"))
        if y == HEADS:
            return plot_heads(self._of_kind("error"))
        if y not in SAMPLES.values():
            raise UnknownNameError("quantity to plot", y, [*QUANTITIES, *SAMPLES.values()])
        return _errors("plot")(self._of_kind("error"), y=y, x=x, ax=ax)

    def sentences(self) -> list[str]:
        """A few sentences computed from the records."""
        alone = self._apart()
        told = swap_sentences(self.records, self.environment)
        told += comparison_sentences(self.records, self._max_error, self.environment)
        told += bench_sentences(alone.records, self.environment)
        errors = alone._of_kind("error")
        told += _errors("sentences")(errors, environment=self.environment) if errors else []
        told += kernel_sentences(self.records) + recall_sentences(self.records)
        return told + training_sentences(self.records)

    def summary(self) -> list[dict[str, Any]]:
        """Flat rows: comparisons; time and memory of a backend at a length side by side; then errors."""
        alone = self._apart().records
        errors = [flat_row(record) for record in alone if record.case.kind in ("error", "recall")]
        made = swap_rows(self.records) + comparison_rows(self.records)
        return made + summary(alone) + errors + training_rows(alone)

    def save(self, folder: str | Path) -> list[Path]:
        """Write records, environment and all that is drawn; records that are there already are not touched.

        Raises:
            DataError: If the folder cannot be written.
        """
        folder = open_folder(folder)
        from efficient_attn.experiments import redraw

        paths = [folder / RECORDS]
        if not paths[0].exists():
            for record in self.records:
                append(paths[0], record)
        if self.environment:
            paths.append(write_json(folder / ENVIRONMENT, self.environment))
        try:
            return paths + redraw.draw_run(self, folder)
        # Whatever goes wrong in drawing, the records are safe, and whoever measured them gets them back.
        except Exception as error:
            self.notes += (
                f"Not all could be drawn ({type(error).__name__}: {plain(str(error))}). "
                f"The records are safe; `efficient-attn report {folder}` draws them again.",
            )
            return paths

    def readable(self) -> "Results":
        """The same with texts that are safe to show and no longer than somebody reads."""
        return Results(
            readable(self.records),
            environment=self.environment,
            interrupted=self.interrupted,
            notes=map(plain, self.notes),
        )

    def plots(self) -> dict[str, str]:
        """The plots worth a file: {name: quantity}."""
        alone = self._apart()
        ok = {kind for kind in KINDS if any(record.status == "ok" for record in alone._of_kind(kind))}
        wanted = {
            "time": "time_s",
            "memory": "peak_bytes",
            "error": "output_relative_error",
            "recall": RECALL,
        }
        plots = {SWAP: SWAP} if swaps(self.records) else {}
        plots |= {COMPARISON: COMPARISON} if comparisons(self.records) else {}
        plots |= {kind: quantity for kind, quantity in wanted.items() if kind in ok}
        plots |= {TRAINING: TRAINING} if any(record.train_steps for record in self.records) else {}
        plots |= {"error-heads": HEADS} if any(getattr(r, HEADS) for r in self.records) else {}
        return plots | kernel_plots(self.records)

    @property
    def _max_error(self) -> float:
        """The error that the run asked about."""
        return asked_error(self.environment)

    def _apart(self) -> "Results":
        """Without the records of comparisons and models, which are shown in their own ways."""
        return Results(without_swaps(without_compared(self.records, comparisons(self.records))))

    def _of_kind(self, kind: str) -> list[Record]:
        """Errors of a kernel entry are told apart: they are of no input."""
        kernel = set(map(id, kernel_records(self.records)))
        return [record for record in self.records if record.case.kind == kind and id(record) not in kernel]


def read(*paths: str | Path) -> Results:
    """The results in folders of runs, or in files of records, taken together.

    Raises:
        DataError: If there are none, or a file holds something else.
    """
    if not paths:
        raise DataError("Nothing to read: name at least one folder of a run, or a file of records.")
    records: list[Record] = []
    notes: list[str] = []
    environment: Mapping[str, Any] = {}
    for path in map(Path, paths):
        file = path / RECORDS if path.is_dir() else path
        reading = read_records(file)
        # What was measured again after a failure stands in the file twice.
        latest = {record.case.key: record for record in reading.records}.values()
        records += latest
        if reading.torn:
            notes.append(f"The last line of {file.name} was cut off and is left out.")
        known = read_json(file.parent / ENVIRONMENT) if (file.parent / ENVIRONMENT).exists() else {}
        environment = known or environment
        notes += doubts(latest, known)
    # Two machines have no common environment.
    return Results(records, environment=environment if len(paths) == 1 else None, notes=notes)


def _errors(verb: str) -> Callable[..., Any]:
    """`tables`, `plot` or `sentences` of errors, from the first of their modules that has it."""
    for name in _ERROR_REPORTS:
        if find_spec(name) is not None and hasattr(module := import_module(name), verb):
            return getattr(module, verb)
    raise UnknownNameError("report of errors", verb, ["to_pandas", "summary"])
