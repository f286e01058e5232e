"""Files of a report: summary, plots, tables and one HTML page.

The page loads nothing from elsewhere, runs no script, and its template escapes every text.
"""

import re
from base64 import b64encode
from importlib.resources import files
from pathlib import Path
from typing import Any

import efficient_attn
from efficient_attn.measure.record import write
from efficient_attn.report.drawing import draw, to_bytes
from efficient_attn.report.table import full, plain, right_aligned, short, to_csv, to_markdown
from efficient_attn.report.text import flat

REPORT, SUMMARY, MARKDOWN = "report.html", "summary.csv", "tables.md"
KINDS = ("png", "svg", "pdf")

# Longer texts are shortened: of a command, of a cell, a word. The folder of the run has them.
_LONGEST_TEXT, _LONGEST_CELL, _LONG_WORD = 20_000, 300, re.compile(r"\S{81,}")


def save(figure: Any, folder: Path, name: str, svg: bytes | None = None) -> list[Path]:
    """Write a figure as PNG, SVG and PDF, the SVG as given if it was drawn before."""
    drawn = {"svg": svg or to_bytes(figure, "svg", salt=name)}
    drawn |= {kind: to_bytes(figure, kind, salt=name) for kind in KINDS if kind not in drawn}
    return [write(folder / f"{name}.{kind}", drawn[kind]) for kind in KINDS]


def write_all(run: Any, folder: Path, *, title: str, interactive: bool = False) -> list[Path]:
    """Write all files of results to a folder, and on request the page drawn by plotly."""
    plots, tables = run.plots(), run.tables()
    figures = {name: draw(plot)[0].figure for name, plot in plots.items() if not plot.is_empty}
    texts = {SUMMARY: to_csv(run.summary()), **run.files()}
    paths = [write(folder / name, text) for name, text in texts.items()]
    pages = {name: to_bytes(figure, "svg", salt=name) for name, figure in figures.items()}
    for name, figure in figures.items():
        paths += save(figure, folder, name, pages[name])
    paths.append(write(folder / MARKDOWN, "\n\n".join(map(to_markdown, tables)) + "\n"))
    drawings = [(f"{plots[name].title}: {plots[name].conditions}", page) for name, page in pages.items()]
    environment = {name: value for name, value in flat(run.environment) if name != "command"}
    content = {"drawings": drawings, "tables": tables, "environment": environment}
    paths.append(write(folder / REPORT, render("page.html", run, title, **content)))
    if interactive:
        from plotly.offline import get_plotlyjs

        from efficient_attn.report.interactive import PAGE, sections

        charts = {"sections": sections(plots.values()), "plotlyjs": get_plotlyjs()}
        paths.append(write(folder / PAGE, render(PAGE, run, title, **charts)))
    return paths


def _facts(run: Any) -> list[str]:
    names = dict(flat(run.environment))
    torch = f"torch {names['torch.version']}" if "torch.version" in names else None
    machine = names.get("gpu.name") or names.get("processor")
    failed = sum(record.status != "ok" for record in run.records)
    count = f"{len(run.records)} records{f', {failed} of them not measured' * bool(failed)}"
    return [fact for fact in (machine, names.get("utc"), torch, count) if fact]


def render(template: str, run: Any, title: str, **values: Any) -> str:
    """Text of a template of this folder, with every value escaped."""
    from jinja2 import Environment, StrictUndefined

    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_printable)
    # Words are shortened too, such as names of foreign backends.
    jinja.filters["brief"] = lambda text, most=_LONGEST_CELL: short(
        _LONG_WORD.sub(lambda word: short(word[0]), text), most
    )
    jinja.filters |= {"full": full, "right": right_aligned}
    jinja.filters["base64"] = lambda data: b64encode(data).decode()
    text, css = (files(__package__).joinpath(name).read_text("utf-8") for name in (template, "page.css"))
    values |= {"css": css, "version": efficient_attn.__version__, "title": short(title)}
    return jinja.from_string(text).render(run=run, facts=_facts(run), **values)


def _printable(value: Any) -> Any:
    """Text without control characters, in its lines."""
    # Safe strings of the template are markup of this package.
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return "\n".join(map(plain, value[:_LONGEST_TEXT].split("\n")))
    return value
