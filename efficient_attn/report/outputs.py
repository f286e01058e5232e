"""Files of a report: summary, plots, tables and page of one or several runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from efficient_attn.errors import UnknownNameError
from efficient_attn.report.axes import draw
from efficient_attn.report.files import slug, write
from efficient_attn.report.html import Run, page
from efficient_attn.report.save import save, to_bytes
from efficient_attn.report.table import to_csv, to_markdown

REPORT, SUMMARY, MARKDOWN = "report.html", "summary.csv", "tables.md"

Figures = dict[tuple[str, str], Any]


def write_page(runs: Sequence[Run], path: Path, look: Mapping[str, Any]) -> Path:
    """Write the page alone; `look` are arguments of `draw`."""
    runs = _renamed(runs, look.get("labels") or {})
    return _write_page(runs, path, _figures(runs, look))


def write_all(runs: Sequence[Run], folder: Path, look: Mapping[str, Any]) -> list[Path]:
    """Write all files; of several runs each file begins with the run's label."""
    runs = _renamed(runs, look.get("labels") or {})
    figures = _figures(runs, look)
    begin = {run.label: f"{slug(run.label)}-" if len(runs) > 1 else "" for run in runs}
    paths = []
    for run in runs:
        texts = {SUMMARY: to_csv(run.rows), **run.files}
        paths += [write(folder / f"{begin[run.label]}{name}", text) for name, text in texts.items()]
    for (label, name), figure in figures.items():
        paths += save(figure, folder, f"{begin[label]}{name}")
    tables = [
        table._replace(title=f"{table.title}: {run.label}") if len(runs) > 1 else table
        for run in runs
        for table in run.tables
    ]
    paths.append(write(folder / MARKDOWN, "\n\n".join(map(to_markdown, tables)) + "\n"))
    return [*paths, _write_page(runs, folder / REPORT, figures)]


def _renamed(runs: Sequence[Run], labels: Mapping[str, str]) -> list[Run]:
    """The runs with renamed rows of tables; every label has to name a line or a row."""
    known = {name: None for run in runs for plot in run.plots.values() for name in plot.names}
    known |= {row[0]: None for run in runs for table in run.tables for row in table.rows}
    for label in labels:
        if label not in known:
            raise UnknownNameError("line or row", label, list(known))
    return [run._replace(tables=[one.renamed(labels) for one in run.tables]) for run in runs]


def _figures(runs: Sequence[Run], look: Mapping[str, Any]) -> Figures:
    """{(label of the run, name): figure}, each drawn once."""
    return {
        (run.label, name): draw(plot, **look)[0].figure for run in runs for name, plot in run.plots.items()
    }


def _write_page(runs: Sequence[Run], path: Path, figures: Figures) -> Path:
    titles = {
        (run.label, name): f"{plot.title}: {plot.conditions}"
        for run in runs
        for name, plot in run.plots.items()
    }
    drawings = [(key[0], titles[key], to_bytes(one, "svg", salt=key[1])) for key, one in figures.items()]
    return write(path, page(runs, drawings))
