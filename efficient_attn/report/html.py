"""One HTML page of one or several runs: nothing is loaded from elsewhere, and no script runs.

Every text is escaped by the template; only figures, made here from escaped text, are passed as they are.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any, NamedTuple

from efficient_attn.report.escape import plain
from efficient_attn.report.methods_paragraph import flat, how_measured
from efficient_attn.report.shorten import short
from efficient_attn.report.svg import variables
from efficient_attn.report.table import Table, right_aligned
from efficient_attn.runner.records import Record

# Lines of a plan or a command beyond this many characters are not shown; the folder of the run has them.
_LONGEST_TEXT, _LONGEST_VALUE = 20_000, 300


# A growth, as sentences and tables write it.
_POWER = re.compile(r"\bn\^(\d+(?:\.\d+)?)")


class Run(NamedTuple):
    """Content of a page on one run.

    Attributes:
        label: Name of the run among others.
        drawings: Figures as `svg` elements.
        plan: The text of a file that repeats the run; empty where there is none.
    """

    label: str
    records: Sequence[Record]
    drawings: Sequence[str]
    sentences: Sequence[str]
    tables: Sequence[Table]
    notes: Sequence[str]
    environment: Mapping[str, Any]
    command: str
    plan: str

    @property
    def facts(self) -> list[str]:
        """Machine, software and size of the run, for the head of the page."""
        known = dict(flat(self.environment))
        found = [known.get("gpu.name") or known.get("processor"), known.get("utc")]
        torch = f"torch {known['torch.version']}" if "torch.version" in known else None
        return [short(fact) for fact in (*found, torch, f"{len(self.records)} records") if fact]

    @property
    def method(self) -> str:
        """The paragraph for a paper."""
        return how_measured(self.records, self.environment)


def page(title: str, runs: Sequence[Run]) -> str:
    """The page, complete in one text."""
    from jinja2 import Environment, StrictUndefined

    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_printable)
    jinja.filters["powers"] = _powers
    drawings = [(run.label, svg) for run in runs for svg in run.drawings]
    # Tables of one title stand together, so that runs are easily compared.
    titles = list(dict.fromkeys(table.title for run in runs for table in run.tables))
    tables = [
        (run.label, table) for title in titles for run in runs for table in run.tables if table.title == title
    ]
    colours = variables("".join(svg for _, svg in drawings))
    return jinja.from_string(_text("page.html")).render(
        title=short(plain(title)),
        css=_text("page.css") + _style(colours),
        runs=runs,
        many=len(runs) > 1,
        drawings=drawings,
        tables=tables,
        right=right_aligned,
        environment=_environment(runs),
        sections=_sections(bool(drawings), bool(tables)),
        version=_version(),
    )


def _printable(value: Any) -> Any:
    """Text without control characters; lines stay lines where a plan or a command has several."""
    # Safe strings of the template are markup of this package.
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return "\n".join(map(plain, value[:_LONGEST_TEXT].split("\n")))
    return value


def _powers(text: str) -> str:
    """`n^1.98` as it is written by hand; everything else escaped."""
    return _POWER.sub(r"n<sup>\1</sup>", escape(_printable(text)))


def _style(colours: Mapping[str, tuple[str, str]]) -> str:
    """The colours of lines on white and at night."""
    day, night = (" ".join(f"{name}: {pair[side]};" for name, pair in colours.items()) for side in (0, 1))
    return f":root {{ {day} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {night} }} }}\n"


def _environment(runs: Sequence[Run]) -> Table:
    """One column per run."""
    known = [dict(flat(run.environment)) for run in runs]
    names = dict.fromkeys(name for one in known for name in one if name != "command")
    rows = [(name, *(short(one.get(name, "–"), _LONGEST_VALUE) for one in known)) for name in names]
    return Table("Environment", ("", *(run.label for run in runs)), tuple(rows))


def _sections(drawings: bool, tables: bool) -> list[tuple[str, str]]:
    optional = [("plots", "Plots", drawings), ("tables", "Tables", tables)]
    return [
        ("summary", "Summary"),
        *((name, heading) for name, heading, shown in optional if shown),
        ("method", "How this was measured"),
        ("again", "How to make it again"),
        ("environment", "Environment"),
    ]


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _version() -> str:
    try:
        return version("efficient-attn")
    except PackageNotFoundError:
        return ""
