"""Tables of text: for a terminal, for Markdown, for a spreadsheet, for a web page."""

import csv
import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from efficient_attn.report.escape import csv_cell, markdown_cell, markdown_line, plain
from efficient_attn.stats.growth import Growth
from efficient_attn.stats.rounds import Typical

# An interval wider than this share of the median to either side is shown.
_NOISY = 0.1

_NUMBER = re.compile(r"[-+]?\d")


class Table(NamedTuple):
    """Plain text in rows; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def renamed(self, labels: Mapping[str, str]) -> "Table":
        """The table with {name: text} in place of the names of rows and columns."""
        rows = tuple((labels.get(row[0], row[0]), *row[1:]) for row in self.rows)
        return self._replace(columns=tuple(labels.get(name, name) for name in self.columns), rows=rows)

    def _repr_html_(self) -> str:
        return to_html(self)


def show_growth(fit: Growth | None) -> str:
    """The power of tokens with its interval: `n^1.98 (1.95 to 2.01)`, or `unclear`; empty without a fit."""
    if fit is None:
        return ""
    if not fit.clear:
        return "unclear"
    low, high = (None if edge is None else f"{edge:.2f}" for edge in (fit.low, fit.high))
    return f"n^{fit.power:.2f}" + ("" if low == high else f" ({low} to {high})")


def show_range(low: float, high: float) -> str:
    """`0.83 to 1.2`: two edges to three digits."""
    return f"{three_digits(low)} to {three_digits(high)}"


def three_digits(value: float) -> str:
    """Three significant digits and no exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.{2 if value < 10 else 1}f}" if value >= 1 else f"{value:.3g}"


def show_spread(value: float, low: float | None, high: float | None, *, unit: float) -> str:
    """The value in the unit, with half of its interval where there is one and it is wide."""
    text = three_digits(value / unit)
    if low is None or high is None or not value:
        return text
    spread = max(high - value, value - low) / value
    return f"{text} ±{spread:.0%}" if spread > _NOISY else text


def show_ratio(ratio: Typical) -> str:
    """`3.10x`, with its interval where that is wide or holds 1."""
    text = f"{three_digits(ratio.median)}x"
    if ratio.low is None or ratio.high is None:
        return text
    telling = ratio.side_of_one and ratio.high - ratio.low <= 2 * _NOISY * ratio.median
    return text if telling else f"{text} ({show_range(ratio.low, ratio.high)})"


def to_markdown(table: Table) -> str:
    """The table in GitHub's Markdown; numbers are aligned to the right."""
    rules = tuple("---:" if right else "---" for right in right_aligned(table))
    cells = [[markdown_cell(cell) for cell in row] for row in (table.columns, *table.rows)]
    body = "\n".join(f"| {' | '.join(row)} |" for row in (cells[0], rules, *cells[1:]))
    return "\n\n".join([f"**{markdown_cell(table.title)}**", body, *map(markdown_line, table.notes)])


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Flat rows as CSV, text guarded against being run as a formula."""
    text = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(csv_cell, columns))
    writer.writerows([csv_cell(row.get(name)) for name in columns] for row in rows)
    return text.getvalue()


def to_html(table: Table) -> str:
    """The table for a notebook, every text escaped."""
    head = "".join(f"<th>{html.escape(plain(name))}</th>" for name in table.columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(plain(cell))}</td>' for cell in row)}</tr>" for row in table.rows
    )
    notes = "".join(f"<p>{html.escape(plain(note))}</p>" for note in table.notes)
    caption = html.escape(plain(table.title))
    return f"<table><caption>{caption}</caption><tr>{head}</tr>{body}</table>{notes}"


def to_rich(table: Table) -> Any:
    """The table for a terminal."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    title = Text(plain(table.title), style="bold")
    right = right_aligned(table)
    drawn = RichTable(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for number, name in enumerate(table.columns):
        numbers = right[number]
        drawn.add_column(
            Text(plain(name)), justify="right" if numbers else "left", overflow="fold", no_wrap=numbers
        )
    for row in table.rows:
        drawn.add_row(*(Text(plain(cell)) for cell in row))
    return drawn


def right_aligned(table: Table) -> list[bool]:
    """Which columns hold numbers; the first holds names, whatever they look like."""
    return [
        number > 0 and any(_NUMBER.match(row[number]) for row in table.rows)
        for number in range(len(table.columns))
    ]
