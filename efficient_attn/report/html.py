"""One HTML page of one or several runs: nothing is loaded from elsewhere, and no script runs.

Every text is escaped by the template.
"""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import efficient_attn
from efficient_attn.report.escape import plain, short
from efficient_attn.report.figures import Plot
from efficient_attn.report.methods_paragraph import flat, how_measured
from efficient_attn.report.table import Table, right_aligned
from efficient_attn.runner.records import Record

# Longer texts are shortened: of a command, of a cell, a word. The folder of the run has them.
_LONGEST_TEXT, _LONGEST_CELL, _LONG_WORD = 20_000, 300, re.compile(r"\S{81,}")


class Run(NamedTuple):
    """Content of a report on one run.

    Attributes:
        label: Name of the run among others.
        plots: {name of the file: plot}.
        rows: Flat rows of the summary.
        files: {name of a further file: its text}.
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
        """Machine, software and size of the run, for the head of the page."""
        known = dict(flat(self.environment))
        found = [known.get("gpu.name") or known.get("processor"), known.get("utc")]
        torch = f"torch {known['torch.version']}" if "torch.version" in known else None
        return [fact for fact in (*found, torch, f"{len(self.records)} records") if fact]

    @property
    def method(self) -> str:
        """The paragraph for a paper."""
        return how_measured(self.records, self.environment)


def page(runs: Sequence[Run], drawings: Sequence[tuple[str, str, bytes]]) -> str:
    """The page, complete in one text; drawings are (label of the run, title, SVG)."""
    from jinja2 import Environment, StrictUndefined

    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_printable)
    jinja.filters["brief"] = _brief
    jinja.filters["base64"] = lambda data: b64encode(data).decode()
    # Tables of one title stand together, so that runs are easily compared.
    titles = list(dict.fromkeys(table.title for run in runs for table in run.tables))
    tables = [
        (run.label, table) for title in titles for run in runs for table in run.tables if table.title == title
    ]
    return jinja.from_string(_text("page.html")).render(
        title=short(runs[0].label) if len(runs) == 1 else f"{len(runs)} runs side by side",
        css=_text("page.css"),
        runs=runs,
        many=len(runs) > 1,
        drawings=drawings,
        tables=tables,
        right=right_aligned,
        environment=_environment(runs),
        version=efficient_attn.__version__,
    )


def _brief(text: str, most: int = _LONGEST_CELL) -> str:
    """The text with shortened words, such as names of foreign backends."""
    return short(_LONG_WORD.sub(lambda found: short(found[0]), text), most)


def _printable(value: Any) -> Any:
    """Text without control characters; lines stay lines where a command has several."""
    # Safe strings of the template are markup of this package.
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return "\n".join(map(plain, value[:_LONGEST_TEXT].split("\n")))
    return value


def _environment(runs: Sequence[Run]) -> Table:
    """One column per run."""
    known = [dict(flat(run.environment)) for run in runs]
    names = dict.fromkeys(name for one in known for name in one if name != "command")
    rows = tuple((name, *(one.get(name, "–") for one in known)) for name in names)
    return Table("Environment", ("", *(run.label for run in runs)), rows)


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
