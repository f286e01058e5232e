"""Files of a report: summary, plots, tables and one HTML page.

The page loads nothing from elsewhere, runs no script, and its template escapes every text.
"""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import efficient_attn
from efficient_attn.measure.record import Record, write
from efficient_attn.report.drawing import draw, to_bytes
from efficient_attn.report.figures import Plot
from efficient_attn.report.table import Table, full, plain, right_aligned, short, slug, to_csv, to_markdown
from efficient_attn.report.text import flat

REPORT, SUMMARY, MARKDOWN = "report.html", "summary.csv", "tables.md"
KINDS = ("png", "svg", "pdf")

# Longer texts are shortened: of a command, of a cell, a word. The folder of the run has them.
_LONGEST_TEXT, _LONGEST_CELL, _LONG_WORD = 20_000, 300, re.compile(r"\S{81,}")


class Run(NamedTuple):
    """Content of a report on one run.

    Attributes:
        label: Name of the run among several.
        plots: {name of the file: plot}.
        rows: Flat rows of the summary.
        files: {name of a further file: text}.
    """

    label: str
    records: Sequence[Record]
    plots: Mapping[str, Plot]
    sentences: Sequence[str]
    tables: Sequence[Table]
    rows: Sequence[Mapping[str, Any]]
    files: Mapping[str, str]
    notes: Sequence[str]
    environment: Mapping[str, Any]
    command: str

    @property
    def facts(self) -> list[str]:
        """Machine, software and size of the run."""
        names = dict(flat(self.environment))
        torch = f"torch {names['torch.version']}" if "torch.version" in names else None
        machine = names.get("gpu.name") or names.get("processor")
        failed = sum(record.status != "ok" for record in self.records)
        count = f"{len(self.records)} records{f', {failed} of them not measured' * bool(failed)}"
        return [fact for fact in (machine, names.get("utc"), torch, count) if fact]


# Label of a run, name of a file, its plot, and the plot drawn.
_Figure = tuple[str, str, Plot, Any]


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG, SVG and PDF."""
    return [write(folder / f"{name}.{kind}", to_bytes(figure, kind, salt=name)) for kind in KINDS]


def write_all(runs: Sequence[Run], path: Path, *, interactive: bool = False) -> list[Path]:
    """Write all files to a folder, of several runs with the run's label as prefix.

    Args:
        interactive: Also write the page drawn by plotly.
    """
    figures = [
        (run.label, name, plot, draw(plot)[0].figure) for run in runs for name, plot in run.plots.items()
    ]
    prefixes = {run.label: f"{slug(run.label)}-" if len(runs) > 1 else "" for run in runs}
    paths = []
    for run in runs:
        texts = {SUMMARY: to_csv(run.rows), **run.files}
        paths += [write(path / f"{prefixes[run.label]}{name}", text) for name, text in texts.items()]
    for label, name, _, figure in figures:
        paths += save(figure, path, f"{prefixes[label]}{name}")
    tables = [
        table._replace(title=f"{table.title}: {run.label}") if len(runs) > 1 else table
        for run in runs
        for table in run.tables
    ]
    paths.append(write(path / MARKDOWN, "\n\n".join(map(to_markdown, tables)) + "\n"))
    paths.append(write(path / REPORT, page(runs, figures)))
    if interactive:
        from plotly.offline import get_plotlyjs

        from efficient_attn.report.interactive import PAGE, sections

        parts = [sections(run.plots.values(), f"chart-{n}") for n, run in enumerate(runs)]
        text = render(PAGE, title=_title(runs), runs=runs, sections=parts, plotlyjs=get_plotlyjs())
        paths.append(write(path / PAGE, text))
    return paths


def page(runs: Sequence[Run], figures: Sequence[_Figure]) -> str:
    """Text of the page."""
    drawings = [
        (label, f"{plot.title}: {plot.conditions}", to_bytes(figure, "svg", salt=name))
        for label, name, plot, figure in figures
    ]
    # Tables of one title stand together, so that runs are easily compared.
    titles = list(dict.fromkeys(table.title for run in runs for table in run.tables))
    tables = [
        (run.label, table) for title in titles for run in runs for table in run.tables if table.title == title
    ]
    values = [dict(flat(run.environment)) for run in runs]
    names = dict.fromkeys(name for column in values for name in column if name != "command")
    rows = tuple((name, *(column.get(name, "–") for column in values)) for name in names)
    return render(
        "page.html",
        title=_title(runs),
        runs=runs,
        drawings=drawings,
        tables=tables,
        right=right_aligned,
        environment=Table("Environment", ("", *(run.label for run in runs)), rows),
    )


def render(template: str, *, runs: Sequence[Run], **values: Any) -> str:
    """Text of a template of this folder, with every value escaped."""
    from jinja2 import Environment, StrictUndefined

    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_printable)
    # Words are shortened too, such as names of foreign backends.
    jinja.filters["brief"] = lambda text, most=_LONGEST_CELL: short(
        _LONG_WORD.sub(lambda word: short(word[0]), text), most
    )
    jinja.filters["full"] = full
    jinja.filters["base64"] = lambda data: b64encode(data).decode()
    text, css = (files(__package__).joinpath(name).read_text("utf-8") for name in (template, "page.css"))
    return jinja.from_string(text).render(
        css=css, version=efficient_attn.__version__, runs=runs, many=len(runs) > 1, **values
    )


def _title(runs: Sequence[Run]) -> str:
    return short(runs[0].label) if len(runs) == 1 else f"{len(runs)} runs side by side"


def _printable(value: Any) -> Any:
    """Text without control characters, in its lines."""
    # Safe strings of the template are markup of this package.
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return "\n".join(map(plain, value[:_LONGEST_TEXT].split("\n")))
    return value
