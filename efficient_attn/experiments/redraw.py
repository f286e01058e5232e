"""Everything that is drawn from records, when they are taken or later: the page, the plots, the tables."""

from collections.abc import Sequence
from pathlib import Path

from efficient_attn.errors import DataError, OptionError
from efficient_attn.experiments.files import COMMAND, PLAN, RECORDS, open_folder, run_folder
from efficient_attn.experiments.results import Results, read
from efficient_attn.report import plot as cost_plot
from efficient_attn.report.details import details, without_failures
from efficient_attn.report.files import slug, write
from efficient_attn.report.html import Run, page
from efficient_attn.report.table import to_csv, to_latex, to_markdown

REPORT, SUMMARY, MARKDOWN, LATEX = "report.html", "summary.csv", "tables.md", "tables.tex"


def report(*folders: str | Path, html: str | Path | None = None, out: str | Path | None = None) -> list[Path]:
    """Draw runs again from their records: into the folder of the only run, or into `out`; the files.

    Args:
        folders: Of runs; several are told side by side on one page.
        html: Write nothing but the page, to this file.
        out: A folder for all of it; `runs/…` if there are several runs.

    Raises:
        DataError: If there is nothing to read, or a file cannot be read or written.
    """
    if html is not None and out is not None:
        raise OptionError("html and out exclude each other: the page is among what is written to out.")
    results = {label: read(folder) for label, folder in _labelled(folders).items()}
    everything = list(results.values())
    runs = [
        _run(label, one, _home(folder), everything)
        for (label, one), folder in zip(results.items(), folders, strict=True)
    ]
    if html is not None:
        return [write(Path(html), page(_title(runs), runs))]
    only = _home(folders[0]) if len(folders) == 1 else run_folder("report")
    target = open_folder(out or only, name="out")
    return draw(results, runs, target)


def draw_run(results: Results, folder: Path) -> list[Path]:
    """Everything that is drawn from one run, in its folder."""
    label = next(iter(_labelled([folder])))
    return draw({label: results}, [_run(label, results, folder, [results])], folder)


def draw(results: dict[str, Results], runs: Sequence[Run], folder: Path) -> list[Path]:
    """The summary, the plots, the tables and the page; of several runs each file begins with its label."""
    paths = []
    for label, one in results.items():
        begin = f"{slug(label)}-" if len(results) > 1 else ""
        paths.append(write(folder / f"{begin}{SUMMARY}", to_csv(one.summary())))
        shown = one.readable()
        for name, plot in shown.plots().items():
            paths += cost_plot.save(plot(), folder, f"{begin}{name}")
    tables = [
        table._replace(title=f"{table.title}: {run.label}") if len(runs) > 1 else table
        for run in runs
        for table in run.tables
    ]
    paths.append(write(folder / MARKDOWN, "\n\n".join(map(to_markdown, tables)) + "\n"))
    paths.append(write(folder / LATEX, "\n".join(map(to_latex, tables))))
    return [*paths, write(folder / REPORT, page(_title(runs), runs))]


def _run(label: str, results: Results, folder: Path, everything: Sequence[Results]) -> Run:
    """The run as a page shows it; runs on one page share the axes' scale."""
    shown = results.readable()
    name = f"run-{everything.index(results)}"
    return Run(
        label=label,
        records=shown.records,
        drawings=shown.drawings(name, everything if len(everything) > 1 else ()),
        sentences=shown.sentences(),
        tables=[
            *(without_failures(table, shown.records) for table in shown.tables()),
            *details(shown.records),
        ],
        notes=results.notes,
        environment=results.environment,
        command=_text(folder / COMMAND) or _command(results),
        plan=_text(folder / PLAN),
    )


def _command(results: Results) -> str:
    words = results.environment.get("command")
    return " ".join(map(str, words)) if isinstance(words, list) else ""


def _labelled(folders: Sequence[str | Path]) -> dict[str, Path]:
    """{as much of the end of each path as tells it from the others: path}."""
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
