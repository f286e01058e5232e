"""Tables of text for terminals, Markdown, spreadsheets and web pages, which escape external text."""

import csv
import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Characters between two cells of a terminal's table.
_GAP = 3

_NUMBER = re.compile(r"[-+]?\d")

# Characters that start a formula in a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\0")
# Control characters, line separators, bidirectional marks, non-characters, surrogates and invisible tags.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
# Windows opens these names as devices, whatever follows the first dot.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", flags=re.IGNORECASE)
_LONGEST_SLUG = 80


class Table(NamedTuple):
    """Plain text in rows, which the first column names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def renamed(self, labels: Mapping[str, str]) -> "Table":
        """Copy with {name: text} applied to the names of rows and columns."""
        rows = tuple((labels.get(row[0], row[0]), *row[1:]) for row in self.rows)
        return self._replace(columns=tuple(labels.get(name, name) for name in self.columns), rows=rows)

    def _repr_html_(self) -> str:
        return to_html(self)


def to_markdown(table: Table) -> str:
    """Table in GitHub's Markdown, with numbers aligned to the right."""
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
    """Table for a notebook, every text escaped."""
    head = "".join(f"<th>{html.escape(plain(name))}</th>" for name in table.columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(plain(cell))}</td>' for cell in row)}</tr>" for row in table.rows
    )
    notes = "".join(f"<p>{html.escape(plain(note))}</p>" for note in table.notes)
    caption = html.escape(plain(table.title))
    return f"<table><caption>{caption}</caption><tr>{head}</tr>{body}</table>{notes}"


def to_rich(table: Table, width: int) -> Any:
    """Table for a terminal, with columns that do not fit in blocks below, which repeat the rows' names."""
    from rich import box
    from rich.cells import cell_len
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    right = right_aligned(table)
    cells = [[plain(cell) for cell in column] for column in zip(table.columns, *table.rows, strict=True)]
    rows = [*zip(*(texts[1:] for texts in cells), strict=True)]
    # The fewest columns that tell the rows apart name them, if they leave room for others.
    distinct = (count for count in range(1, len(cells)) if len({row[:count] for row in rows}) == len(rows))
    widths = [max(map(cell_len, texts)) + _GAP for texts in cells]
    names = [*range(next(distinct, 1))]
    names = names if sum(widths[number] for number in names) <= width // 2 else [0]
    blocks = [[*names]]
    for number in range(len(names), len(cells)):
        if blocks[-1] != names and sum(widths[column] for column in (*blocks[-1], number)) > width + 1:
            blocks.append([*names])
        blocks[-1].append(number)
    drawn: list[Any] = [Text(plain(table.title), style="bold")]
    for block in blocks:
        part = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for number in block:
            head = Text(cells[number][0])
            part.add_column(head, justify="right" if right[number] else "left", overflow="fold")
        for row in rows:
            part.add_row(*(Text(row[number]) for number in block))
        drawn.append(part)
    return Group(*drawn)


def right_aligned(table: Table) -> list[bool]:
    """Columns to right-align; never the first."""
    return [
        number > 0 and any(_NUMBER.match(row[number]) for row in table.rows)
        for number in range(len(table.columns))
    ]


def plain(text: str) -> str:
    """Replace control characters and bidirectional marks, so that one line remains."""
    return _CONTROL.sub(" ", text)


def short(text: str, most: int = 80) -> str:
    """Shorten a text to `most` characters: beginning, ellipsis, end."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def csv_cell(value: object) -> object:
    """Escape text that a spreadsheet would run, and write None as empty."""
    if not isinstance(value, str):
        return "" if value is None else value
    text = plain(value)
    return f"'{text}" if value.startswith(_FORMULA) or text.lstrip().startswith(_FORMULA) else text


def markdown_cell(text: str) -> str:
    """Escape characters of markup, mathematics and comments, and the ends of cells."""
    return re.sub(r"([\\`*_|<>\[\]{}#$%&~!])", r"\\\1", plain(text))


def markdown_line(text: str) -> str:
    """Escape a paragraph that could start as a list, heading or rule."""
    return re.sub(r"^\s*(\d*)([-+=.)])", r"\1\\\2", markdown_cell(text))


def slug(text: str) -> str:
    """Part of a file name in ASCII, never empty, hidden or a device."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text[:1000]).strip("-.")[:_LONGEST_SLUG].rstrip("-.")
    return name if name and not _DEVICES.match(name) else f"run-{name}".rstrip("-")
