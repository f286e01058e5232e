"""Tables of text for terminals, Markdown, spreadsheets and web pages."""

import csv
import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from efficient_attn.report.escape import csv_cell, markdown_cell, markdown_line, plain

# A wider cell is a sentence, which is wrapped to no less than this.
_SENTENCE = 32

# Characters between two cells of a terminal's table, one more than at its two edges together.
_GAP = 3

_NUMBER = re.compile(r"[-+]?\d")


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
    """Table for a terminal, with columns that do not fit in blocks below."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    right = right_aligned(table)
    cells = [
        [plain(name), *(plain(row[number]) for row in table.rows)]
        for number, name in enumerate(table.columns)
    ]
    drawn: list[Any] = [Text(plain(table.title), style="bold")]
    for widths in _blocks(cells, width):
        block = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for number, size in widths.items():
            block.add_column(
                Text(cells[number][0]),
                justify="right" if right[number] else "left",
                overflow="fold",
                width=size,
            )
        for row in range(1, len(table.rows) + 1):
            block.add_row(*(Text(cells[number][row]) for number in widths))
        drawn.append(block)
    return Group(*drawn)


def _blocks(cells: Sequence[Sequence[str]], width: int) -> list[dict[int, int]]:
    """Widths of columns by number, in blocks that begin with the rows' names."""
    from rich.cells import cell_len

    def least(texts: Sequence[str]) -> int:
        """Width at which only sentences are wrapped."""
        heading, *values = texts
        sentences = [text for text in values if cell_len(text) > _SENTENCE]
        unbroken = [*" ".join([heading, *sentences]).split(), *(set(values) - set(sentences))]
        return max(1, *map(cell_len, unbroken), _SENTENCE if sentences else 1)

    natural = [max(1, *map(cell_len, texts)) for texts in cells]
    # A word beyond these widths is folded.
    further = [min(least(texts), width // 2) for texts in cells[1:]]
    room = max(1, width - 2 * _GAP - max(further, default=0))
    smallest = [min(max(least(cells[0]), min(natural[0], width // 2)), room), *further]
    rows = list(zip(*(texts[1:] for texts in cells), strict=True))
    distinct = (count for count in range(1, len(cells)) if len({row[:count] for row in rows}) == len(rows))
    names = list(range(next(distinct, 1)))
    if sum(smallest[number] + _GAP for number in names) > width // 2:
        names = [0]
    blocks = [list(names)]
    for number in range(len(names), len(cells)):
        if sum(smallest[column] + _GAP for column in (*blocks[-1], number)) > width + 1:
            blocks.append(list(names))
        blocks[-1].append(number)
    return [_widened({number: smallest[number] for number in block}, natural, width) for block in blocks]


def _widened(widths: dict[int, int], natural: Sequence[int], width: int) -> dict[int, int]:
    """Widths with the rest of the line, for narrow wrapped columns first."""
    for _ in range(width + 1 - sum(size + _GAP for size in widths.values())):
        if wrapped := [number for number, size in widths.items() if size < natural[number]]:
            widths[min(wrapped, key=lambda number: widths[number])] += 1
    return widths


def right_aligned(table: Table) -> list[bool]:
    """Columns to right-align; never the first."""
    return [
        number > 0 and any(_NUMBER.match(row[number]) for row in table.rows)
        for number in range(len(table.columns))
    ]
