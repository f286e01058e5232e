"""Everything that is drawn from records, when they are taken or later: the page, the plots, the tables."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from efficient_attn.errors import DataError, OptionError, UnknownNameError
from efficient_attn.report.axes import checked_width, sizes_of
from efficient_attn.report.axes import draw as draw_plot
from efficient_attn.report.details import details, without_failures
from efficient_attn.report.figures import Plot, with_common_limits
from efficient_attn.report.files import slug, write
from efficient_attn.report.html import Run, page
from efficient_attn.report.save import save
from efficient_attn.report.svg import inline
from efficient_attn.report.table import Table, to_csv, to_latex, to_markdown
from efficient_attn.studies.results import Results, read
from efficient_attn.studies.run_files import COMMAND, PLAN, RECORDS, open_folder, run_folder

REPORT, SUMMARY, MARKDOWN, LATEX = "report.html", "summary.csv", "tables.md", "tables.tex"


class Look(NamedTuple):
    """How figures and tables are drawn.

    Attributes:
        labels: {name of a line or row: text in its place}.
        width: Width of figures in inches, at which letters have their stated sizes; None: the default.
        style: `screen`, or `paper`: small letters and no title.
    """

    labels: Mapping[str, str] = {}
    width: float | None = None
    style: str = "screen"


def report(
    *folders: str | Path,
    html: str | Path | None = None,
    out: str | Path | None = None,
    labels: Mapping[str, str] | None = None,
    width: float | None = None,
    style: str = "screen",
) -> list[Path]:
    """Draw runs again from their records: into the folder of the only run, or into `out`; the files.

    Args:
        folders: Folders of runs; several are shown side by side on one page.
        html: Write nothing but the page, to this file.
        out: A folder for all of it; `runs/…` if there are several runs.
        labels: {name: text}: texts for legends and tables in place of the names of lines and rows.
        width: Width of figures in inches, at which letters have their stated sizes.
        style: `screen`, or `paper`: small letters and no title.

    Raises:
        DataError: If there is nothing to read, or a file cannot be read or written.
        OptionError: If figures cannot be drawn so, or nothing drawn has a name of `labels`.
    """
    if html is not None and out is not None:
        raise OptionError("html and out exclude each other: out also receives the page.")
    look = checked_look(labels, width, style)
    results = {label: read(folder) for label, folder in _labelled(folders).items()}
    homes = dict(zip(results, map(_home, folders), strict=True))
    if html is not None:
        runs, _ = _runs(results, homes, look)
        return [write(Path(html), page(_title(runs), runs))]
    only = _home(folders[0]) if len(folders) == 1 else run_folder("report")
    return draw(results, homes, open_folder(out or only, name="out"), look)


def draw_run(results: Results, folder: Path, look: Look) -> list[Path]:
    """Everything that is drawn from one run, in its folder."""
    label = next(iter(_labelled([folder])))
    return draw({label: results}, {label: folder}, folder, look)


def checked_look(labels: Mapping[str, str] | None, width: float | None, style: str) -> Look:
    """The look of figures and tables.

    Raises:
        OptionError: If there is no such style, or nothing fits into the width.
    """
    sizes_of(style)
    return Look(labels or {}, checked_width(width), style)


def draw(results: Mapping[str, Results], homes: Mapping[str, Path], folder: Path, look: Look) -> list[Path]:
    """The summary, the plots, the tables and the page; of several runs each file begins with its label."""
    runs, figures = _runs(results, homes, look)
    begin = {label: f"{slug(label)}-" if len(results) > 1 else "" for label in results}
    paths = [
        write(folder / f"{begin[label]}{SUMMARY}", to_csv(one.summary())) for label, one in results.items()
    ]
    for label, one in results.items():
        paths += [write(folder / f"{begin[label]}{name}", text) for name, text in one.files().items()]
    for (label, name), figure in figures.items():
        paths += save(figure, folder, f"{begin[label]}{name}")
    tables = [
        table._replace(title=f"{table.title}: {run.label}") if len(runs) > 1 else table
        for run in runs
        for table in run.tables
    ]
    paths.append(write(folder / MARKDOWN, "\n\n".join(map(to_markdown, tables)) + "\n"))
    paths.append(write(folder / LATEX, "\n".join(map(to_latex, tables))))
    return [*paths, write(folder / REPORT, page(_title(runs), runs))]


def _runs(
    results: Mapping[str, Results], homes: Mapping[str, Path], look: Look
) -> tuple[list[Run], dict[tuple[str, str], Any]]:
    """The runs for the page, and {(label, name): figure}, each drawn once."""
    shown = {label: one.readable() for label, one in results.items()}
    plots = {
        (label, name): plot
        for label, one in shown.items()
        for name, make in one.plots().items()
        if not (plot := make()).is_empty
    }
    if len(shown) > 1:
        plots = dict(zip(plots, with_common_limits(list(plots.values())), strict=True))
    tables = {label: _tables(one) for label, one in shown.items()}
    _check_labels(look.labels, plots.values(), [table for group in tables.values() for table in group])
    figures = {key: draw_plot(plot, **look._asdict())[0].figure for key, plot in plots.items()}
    numbers = {label: number for number, label in enumerate(shown)}
    drawings = {
        (label, name): inline(figure, name=f"run-{numbers[label]}-{name}", title=plots[label, name].title)
        for (label, name), figure in figures.items()
    }
    runs = [
        Run(
            label=label,
            records=one.records,
            drawings=[svg for (of, _), svg in drawings.items() if of == label],
            sentences=one.sentences(),
            tables=[table.renamed(look.labels) for table in tables[label]],
            notes=results[label].notes,
            environment=results[label].environment,
            command=_text(homes[label] / COMMAND) or _command(results[label]),
            plan=_text(homes[label] / PLAN),
        )
        for label, one in shown.items()
    ]
    return runs, figures


def _tables(shown: Results) -> list[Table]:
    return [
        *(without_failures(table, shown.records) for table in shown.tables()),
        *details(shown.records),
    ]


def _check_labels(labels: Mapping[str, str], plots: Iterable[Plot], tables: Iterable[Table]) -> None:
    known = {name: None for plot in plots for name in plot.names}
    known |= {row[0]: None for table in tables for row in table.rows}
    for label in labels:
        if label not in known:
            raise UnknownNameError("line or row", label, list(known))


def _command(results: Results) -> str:
    words = results.environment.get("command")
    return " ".join(map(str, words)) if isinstance(words, list) else ""


def _labelled(folders: Sequence[str | Path]) -> dict[str, Path]:
    """{shortest end of each path that distinguishes it from the others: path}."""
    paths = [Path(folder) for folder in folders]
    whole = [_home(path).resolve().parts for path in paths]
    if len(set(whole)) < len(whole):
        raise OptionError("The same folder is named twice.")
    for length in range(1, max(map(len, whole), default=0) + 1):
        labels = ["/".join(parts[-length:]) for parts in whole]
        if len(set(labels)) == len(labels):
            return dict(zip(labels, paths, strict=True))
    return {}


def _home(path: str | Path) -> Path:
    """The folder of a run, of which perhaps only the records were named."""
    path = Path(path)
    return path.parent if path.name == RECORDS else path


def _title(runs: Sequence[Run]) -> str:
    return runs[0].label if len(runs) == 1 else f"{len(runs)} runs side by side"


def _text(path: Path) -> str:
    """The text of a file that need not be there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None
