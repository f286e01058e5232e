"""Tables of text for terminals, Markdown, spreadsheets and web pages, which escape external text."""

import csv
import html
import io
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from efficient_attn.measure.variants import DENSE, UNIFORM_ATTENTION, YARDSTICK

# Widest table and text of a terminal, widest name of a row, and characters between two cells.
WIDEST, _WIDEST_NAME, _GAP = 100, 40, 2

# Row of a model with its original attention.
ORIGINAL = "original"

NOT_MEASURED = "–"

# Marks of a cell: predicted or extrapolated in front, undecided and best behind.
PREDICTED, UNDECIDED, BEST = "~", "?", "*"
_NUMBER = re.compile(r"[≤>~]?[-+]?\d")
_VALUE = re.compile(r"~?([-+]?\d[\d.]*(?:e[-+]?\d+)?)")

# Characters that start a formula in a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\0")
# Control characters, line separators, bidirectional marks, non-characters, surrogates and invisible tags.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


class Table(NamedTuple):
    """Table of plain text. The first column names the rows.

    Attributes:
        columns: Headings. `quantity, unit` takes two rows.
        rows: Cells. A tab separates a value from its interval, which terminals omit.
        best, worse: Cells (row, column) of the best values, and of values worse than uniform attention.
        detail: Shown on the page and left out in a terminal.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    best: tuple[tuple[int, int], ...] = ()
    worse: tuple[tuple[int, int], ...] = ()
    detail: bool = False

    def compared(
        self,
        *,
        errors: Collection[str] = (),
        scores: Collection[str] = (),
        costs: Collection[str] = (),
        speeds: Collection[str] = (),
        skip: Collection[str] = (),
    ) -> "Table":
        """Copy with the best decided values of these columns marked.

        Baselines and the rows of `skip` are never best. Marks errors and scores worse than uniform
        attention's.
        """
        best, worse = list(self.best), list(self.worse)
        kinds = ((errors, min, True), (scores, max, True), (costs, min, False), (speeds, max, False))
        for (names, best_of, quality), (column, name) in product(kinds, enumerate(self.columns)):
            cells = ((number, row[0], _VALUE.match(row[column])) for number, row in enumerate(self.rows))
            values = {(number, label): float(match[1]) for number, label, match in cells if match}
            skipped = {UNIFORM_ATTENTION, YARDSTICK, DENSE, ORIGINAL, *skip}
            competing = [value for (_, label), value in values.items() if label not in skipped]
            uniform = [value for (_, label), value in values.items() if label == UNIFORM_ATTENTION]
            if name not in names or len(competing) < 2:
                continue
            for (number, label), value in values.items():
                decided = not brief(self.rows[number][column]).endswith(UNDECIDED)
                if label not in skipped and decided and value == best_of(competing):
                    best.append((number, column))
                if quality and uniform and value != best_of(value, uniform[0]):
                    worse.append((number, column))
        return self._replace(best=tuple(best), worse=tuple(worse))

    def _repr_html_(self) -> str:
        return to_html(self)


def to_markdown(table: Table) -> str:
    """Table in GitHub's Markdown, with numbers aligned to the right."""
    rules = tuple("---:" if right else "---" for right in right_aligned(table))
    cells = [[markdown_cell(full(cell)) for cell in row] for row in (table.columns, *table.rows)]
    for marked, mark in ((table.best, "**"), (table.worse, "*")):
        for row, column in marked:
            cells[row + 1][column] = f"{mark}{cells[row + 1][column]}{mark}"
    body = "\n".join(f"| {' | '.join(row)} |" for row in (cells[0], rules, *cells[1:]))
    return "\n\n".join([f"**{markdown_cell(table.title)}**", body, *map(markdown_line, table.notes)])


def brief(cell: str) -> str:
    """The value of a cell without its interval."""
    return plain(cell.partition("\t")[0])


def full(cell: str) -> str:
    """The value of a cell with its interval in brackets."""
    value, _, interval = cell.partition("\t")
    return f"{value} ({interval})" if interval else value


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
    head = "".join(f"<th>{html.escape(plain(name)).replace(', ', '<br>', 1)}</th>" for name in table.columns)
    body = ""
    for number, row in enumerate(table.rows):
        marks = (BEST * ((number, column) in table.best) for column in range(len(row)))
        cells = (html.escape(plain(full(cell)) + mark) for cell, mark in zip(row, marks, strict=True))
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    notes = "".join(f"<p>{html.escape(plain(note))}</p>" for note in table.notes)
    caption = html.escape(plain(table.title))
    return f"<table><caption>{caption}</caption><tr>{head}</tr>{body}</table>{notes}"


def to_rich(table: Table, width: int) -> Any:
    """Table for a terminal. Columns that do not fit follow in blocks that repeat the names of the rows."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    width, columns = min(width, WIDEST), _columns(table)
    dropped = dropped_columns(table, width)
    drawn: list[Any] = [Text(plain(table.title), style="bold")]
    if dropped:
        drawn += map(Text, dropped_words(table, dropped))
    styles = {**dict.fromkeys(table.best, "bold"), **dict.fromkeys(table.worse, "dim")}
    shown = [number for number in range(len(columns)) if number not in dropped]
    for block in _blocks(shown, columns, width):
        part = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for number in block:
            column = columns[number]
            head = Text(column.head, justify="right" if column.right else "left")
            part.add_column(head, overflow="fold", width=column.width - _GAP)
        for line in range(len(table.rows)):
            part.add_row(*(Text(columns[n].cells[line], styles.get((line, n), "")) for n in block))
        drawn.append(part)
    return Group(*drawn)


class _Column(NamedTuple):
    """Texts of a column in a terminal, and its width with the gap to the next one."""

    head: str
    cells: list[str]
    right: bool
    width: int


def _columns(table: Table) -> list[_Column]:
    """Columns with marks that leave digits below digits."""
    from rich.cells import cell_len

    columns = []
    for number, (name, right) in enumerate(zip(table.columns, right_aligned(table), strict=True)):
        head, cells = plain(name).replace(", ", "\n", 1), [brief(row[number]) for row in table.rows]
        cells = [cell + BEST * ((line, number) in table.best) for line, cell in enumerate(cells)]
        if right:
            marks = [len(cell) - len(cell.rstrip(UNDECIDED + BEST)) for cell in cells]
            cells = [cell + " " * (max(marks) - count) for cell, count in zip(cells, marks, strict=True)]
        width = max(map(cell_len, (*head.split("\n"), *cells)))
        if number == 0:
            # Names are wrapped between words.
            words = [word for text in (head, *cells) for word in text.split()]
            width = min(width, max(_WIDEST_NAME, *map(cell_len, words)))
        if right:
            # Rich would strip the spaces that leave room for marks.
            cells = [" " * (width - cell_len(cell)) + cell for cell in cells]
        columns.append(_Column(head, cells, right, width + _GAP))
    return columns


def dropped_columns(table: Table, width: int) -> dict[int, str]:
    """{column: value} of columns to drop: unmeasured, or constant in a table that is too wide."""
    if len(table.rows) < 2:
        return {}
    wide = sum(column.width for column in _columns(table)) > width + 1
    dropped = {}
    for number, cells in enumerate(zip(*table.rows, strict=True)):
        values = {brief(cell) or NOT_MEASURED for cell in cells}
        if number and len(values) == 1 and (wide or values == {NOT_MEASURED}):
            dropped[number] = values.pop()
    return dropped if len(dropped) + 1 < len(table.columns) else {}


def dropped_words(table: Table, dropped: Mapping[int, str]) -> list[str]:
    """Lines above a table that name its dropped columns."""
    pairs = [(plain(table.columns[number]), value) for number, value in dropped.items()]
    unmeasured = [name.partition(", ")[0] for name, value in pairs if value == NOT_MEASURED]
    same = [f"{name} {value}" for name, value in pairs if value != NOT_MEASURED]
    lines = ((unmeasured, "not measured"), (same, "in all rows"))
    shown = [f"{', '.join(parts)} {words}." for parts, words in lines if parts]
    return [text[0].upper() + text[1:] for text in shown]


def _blocks(shown: Sequence[int], columns: Sequence[_Column], width: int) -> list[list[int]]:
    """Columns side by side in as many blocks as needed, each with the names of the rows."""
    # The fewest columns that tell the rows apart name them, if they leave room for others.
    names, rows = [shown[0]], len(columns[0].cells)
    for count in range(1, len(shown)):
        cells = [columns[number].cells for number in shown[:count]]
        if len(set(zip(*cells, strict=True))) == rows:
            names = [*shown[:count]]
            break
    if sum(columns[number].width for number in names) > width // 2:
        names = [shown[0]]
    blocks = [[*names]]
    for number in shown[len(names) :]:
        if blocks[-1] != names and sum(columns[n].width for n in (*blocks[-1], number)) > width:
            blocks.append([*names])
        blocks[-1].append(number)
    return blocks


def right_aligned(table: Table) -> list[bool]:
    """Columns to right-align, never the first."""
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
