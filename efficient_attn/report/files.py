"""Files of a report: summary, plots, tables and one HTML page.

The page loads nothing from elsewhere, runs no script, and its template escapes every text.
"""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import efficient_attn
from efficient_attn.measure.record import write
from efficient_attn.report.drawing import draw, to_bytes
from efficient_attn.report.figures import Plot
from efficient_attn.report.table import Table, full, plain, right_aligned, short, slug, to_csv, to_markdown
from efficient_attn.report.text import flat

REPORT, SUMMARY, MARKDOWN = "report.html", "summary.csv", "tables.md"
KINDS = ("png", "svg", "pdf")

# Longer texts are shortened: of a command, of a cell, a word. The folder of the run has them.
_LONGEST_TEXT, _LONGEST_CELL, _LONG_WORD = 20_000, 300, re.compile(r"\S{81,}")


# Label of a run, name of a file, its plot, and the plot drawn.
_Figure = tuple[str, str, Plot, Any]


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG, SVG and PDF."""
    return [write(folder / f"{name}.{kind}", to_bytes(figure, kind, salt=name)) for kind in KINDS]


def write_all(runs: Mapping[str, Any], folder: Path, *, interactive: bool = False) -> list[Path]:
    """Write all files to a folder, of several runs with the run's label as prefix.

    Args:
        runs: Results by the label of their run.
        interactive: Also write the page drawn by plotly.
    """
    plots = {label: run.plots() for label, run in runs.items()}
    figures = [
        (label, name, plot, draw(plot)[0].figure)
        for label in runs
        for name, plot in plots[label].items()
        if not plot.is_empty
    ]
    tables = [(label, table) for label, run in runs.items() for table in run.tables()]
    # Tables of one title stand together, so that runs are easily compared.
    titles = list(dict.fromkeys(table.title for _, table in tables))
    tables.sort(key=lambda pair: titles.index(pair[1].title))
    if len(runs) > 1:
        tables = [(label, table._replace(title=f"{table.title}: {label}")) for label, table in tables]
    prefixes = {label: f"{slug(label)}-" if len(runs) > 1 else "" for label in runs}
    paths = []
    for label, run in runs.items():
        texts = {SUMMARY: to_csv(run.summary()), **run.files()}
        paths += [write(folder / f"{prefixes[label]}{name}", text) for name, text in texts.items()]
    for label, name, _, figure in figures:
        paths += save(figure, folder, f"{prefixes[label]}{name}")
    markdown = "\n\n".join(to_markdown(table) for _, table in tables)
    paths.append(write(folder / MARKDOWN, f"{markdown}\n"))
    paths.append(write(folder / REPORT, page(runs, figures, [table for _, table in tables])))
    if interactive:
        from plotly.offline import get_plotlyjs

        from efficient_attn.report.interactive import PAGE, sections

        parts = {label: sections(plots[label].values(), f"chart-{n}") for n, label in enumerate(runs)}
        paths.append(write(folder / PAGE, render(PAGE, runs, sections=parts, plotlyjs=get_plotlyjs())))
    return paths


def page(runs: Mapping[str, Any], figures: Sequence[_Figure], tables: Sequence[Table]) -> str:
    """Text of the page."""
    drawings = [
        (label, f"{plot.title}: {plot.conditions}", to_bytes(figure, "svg", salt=name))
        for label, name, plot, figure in figures
    ]
    values = [dict(flat(run.environment)) for run in runs.values()]
    names = dict.fromkeys(name for column in values for name in column if name != "command")
    rows = tuple((name, *(column.get(name, "–") for column in values)) for name in names)
    environment = Table("Environment", ("", *runs), rows)
    return render("page.html", runs, drawings=drawings, tables=tables, environment=environment)


def _facts(run: Any) -> list[str]:
    """Machine, software and size of a run."""
    names = dict(flat(run.environment))
    torch = f"torch {names['torch.version']}" if "torch.version" in names else None
    machine = names.get("gpu.name") or names.get("processor")
    failed = sum(record.status != "ok" for record in run.records)
    count = f"{len(run.records)} records{f', {failed} of them not measured' * bool(failed)}"
    return [fact for fact in (machine, names.get("utc"), torch, count) if fact]


def render(template: str, runs: Mapping[str, Any], **values: Any) -> str:
    """Text of a template of this folder, with every value escaped."""
    from jinja2 import Environment, StrictUndefined

    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_printable)
    # Words are shortened too, such as names of foreign backends.
    jinja.filters["brief"] = lambda text, most=_LONGEST_CELL: short(
        _LONG_WORD.sub(lambda word: short(word[0]), text), most
    )
    jinja.filters |= {"full": full, "right": right_aligned, "facts": _facts}
    jinja.filters["base64"] = lambda data: b64encode(data).decode()
    text, css = (files(__package__).joinpath(name).read_text("utf-8") for name in (template, "page.css"))
    title = short(next(iter(runs))) if len(runs) == 1 else f"{len(runs)} runs side by side"
    values |= {"css": css, "version": efficient_attn.__version__, "title": title}
    return jinja.from_string(text).render(runs=runs, many=len(runs) > 1, **values)


def _printable(value: Any) -> Any:
    """Text without control characters, in its lines."""
    # Safe strings of the template are markup of this package.
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return "\n".join(map(plain, value[:_LONGEST_TEXT].split("\n")))
    return value
