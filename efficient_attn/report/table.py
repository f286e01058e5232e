"""Records as tables: for a terminal, for Markdown, for a spreadsheet, for a web page."""

import csv
import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from efficient_attn.analysis.curves import YARDSTICK, Curve, Point, by_subject, curves
from efficient_attn.analysis.fits import Growth
from efficient_attn.analysis.rate import rate_share
from efficient_attn.analysis.summary import gains
from efficient_attn.report.harmless import csv_cell, latex_cell, markdown_cell, markdown_line, plain
from efficient_attn.sweep.records import Record

# An interval wider than this share of the median to either side is shown beside it.
_NOISY = 0.1

# Lengths of one table; of more the shortest are left out and only the files hold them.
_MOST_LENGTHS = 8

_NUMBER = re.compile(r"[-+]?\d")

# A growth as it reads after escaping.
_POWER = re.compile(r"\bn\\textasciicircum\{\}(\d+(?:\.\d+)?)")

_MILLISECOND, _MEBIBYTE, _GIGA = 1e-3, 2.0**20, 1e9

_SHARE = "share of rate"


class Table(NamedTuple):
    """Plain text in rows; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def tables(records: Sequence[Record]) -> list[Table]:
    """The tables of a benchmark: time, then peak memory, as far as they were measured."""
    made = []
    for subject, group in by_subject(records).items():
        place = "" if subject == "attention" else f" of the {subject}"
        times = curves(group, "time_s")
        if times:
            ratios = {gain.label: f"{gain.ratio:.3g}x" for gain in gains(times)}
            speed = {curve.label: "1" for curve in times if curve.backend == YARDSTICK} | ratios
            extra = {"speed, exact = 1": speed if ratios else {}, _SHARE: _shares(times)}
            table = _cost_table(f"Time per call{place}, ms", times, _MILLISECOND, extra)
            made.append(table._replace(notes=table.notes + _rates(times)))
        peaks = curves(group, "peak_bytes")
        if peaks:
            bytes_of = {"weights": "parameter_bytes", "state": "state_bytes"}
            extra = {name: _largest(group, quantity) for name, quantity in bytes_of.items()}
            made.append(_cost_table(f"Peak memory of a call{place}, MiB", peaks, _MEBIBYTE, extra))
    return made


def show_growth(fit: Growth | None) -> str:
    """The power of tokens with its interval: `n^1.98 (1.95 to 2.01)`; `about` where there is none."""
    if fit is None:
        return ""
    if fit.low is None and not fit.clear:
        return f"about n^{fit.power:.2g}"
    low, high = (None if edge is None else f"{edge:.2f}" for edge in (fit.low, fit.high))
    return f"n^{fit.power:.2f}" + ("" if low == high else f" ({low} to {high})")


def to_markdown(table: Table) -> str:
    """The table in GitHub's Markdown; numbers are aligned to the right."""
    rules = tuple("---:" if right else "---" for right in right_aligned(table))
    cells = [[markdown_cell(cell) for cell in row] for row in (table.columns, *table.rows)]
    body = "\n".join(f"| {' | '.join(row)} |" for row in (cells[0], rules, *cells[1:]))
    return "\n\n".join([f"**{markdown_cell(table.title)}**", body, *map(markdown_line, table.notes)])


def to_latex(table: Table) -> str:
    """The table as a LaTeX `table` that needs no package; numbers are aligned to the right."""
    sides = "".join("r" if right else "l" for right in right_aligned(table))
    head, *body = (
        " & ".join(_POWER.sub(r"$n^{\1}$", latex_cell(cell)) for cell in row) + r" \\"
        for row in (table.columns, *table.rows)
    )
    notes = (rf"\par\smallskip {latex_cell(note)}" for note in table.notes)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_cell(table.title)}}}",
        rf"\begin{{tabular}}{{{sides}}}",
        *(r"\hline", head, r"\hline", *body, r"\hline"),
        r"\end{tabular}",
        *notes,
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


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


def _cost_table(
    title: str, all_curves: Sequence[Curve], unit: float, extra: Mapping[str, Mapping[str, str]]
) -> Table:
    lengths = sorted({point.tokens for curve in all_curves for point in curve.points})
    shown = lengths[-_MOST_LENGTHS:]
    columns = ["backend", *(str(tokens) for tokens in shown), "grows as"]
    rows = [
        [
            curve.label,
            *(_cost(_find(curve, tokens), unit) for tokens in shown),
            show_growth(curve.growth),
        ]
        for curve in all_curves
    ]
    for name, cells in extra.items():
        if cells:
            columns.append(name)
            for row in rows:
                row.append(cells.get(row[0], ""))
    notes = [f"Shorter lengths are in the files: {', '.join(map(str, lengths[:-_MOST_LENGTHS]))}."]
    return Table(
        title,
        tuple(columns),
        tuple(map(tuple, rows)),
        tuple(notes * (len(lengths) > _MOST_LENGTHS)) + _failures(all_curves),
    )


def _shares(all_curves: Sequence[Curve]) -> dict[str, str]:
    """Of the matrix-product rate each backend's share at its longest length, where it is known."""
    shares = {curve.label: rate_share(curve.measured[-1].record) for curve in all_curves if curve.measured}
    return {
        label: f"{share:.0%}" if share >= 0.1 else f"{share:.1%}" for label, share in shares.items() if share
    }


def _rates(all_curves: Sequence[Curve]) -> tuple[str, ...]:
    """What the shares are shares of: the range of what was measured."""
    found = [curve.measured[-1].record.matmul_flops_per_s for curve in all_curves if curve.measured]
    rates = [rate / _GIGA for rate in found if rate]
    if not rates:
        return ()
    low, high = (three_digits(rate) for rate in (min(rates), max(rates)))
    return (
        f"{_SHARE}: counted operations per second at the longest length, over what large matrix products "
        f"reach here: {low if low == high else f'{low} to {high}'} GFLOP/s.",
    )


def _largest(records: Sequence[Record], quantity: str) -> dict[str, str]:
    """Bytes at the longest length, in MiB, of every curve that has any."""
    last = {curve.label: curve.measured[-1] for curve in curves(records, quantity) if curve.measured}
    return {label: _cost(point, _MEBIBYTE) for label, point in last.items() if point.value}


def _find(curve: Curve, tokens: int) -> Point | None:
    return next((point for point in curve.points if point.tokens == tokens), None)


def _cost(point: Point | None, unit: float) -> str:
    if point is None:
        return ""
    if point.value is None:
        return point.record.status
    text = three_digits(point.value / unit)
    if point.low is None or point.high is None or not point.value:
        return text
    spread = max(point.high - point.value, point.value - point.low) / point.value
    return f"{text} ±{spread:.0%}" if spread > _NOISY else text


def three_digits(value: float) -> str:
    """Three significant digits and no exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.{2 if value < 10 else 1}f}" if value >= 1 else f"{value:.3g}"


def _failures(all_curves: Sequence[Curve]) -> tuple[str, ...]:
    """One line per backend and reason, with the lengths that it holds for."""
    lengths: dict[tuple[str, str, str | None], list[int]] = {}
    for curve in all_curves:
        for point in curve.points:
            if point.record.status != "ok":
                key = (curve.label, point.record.status, point.record.reason)
                lengths.setdefault(key, []).append(point.tokens)
    return tuple(
        f"{label}, {', '.join(map(str, tokens))} tokens: {status}: {reason}"
        for (label, status, reason), tokens in lengths.items()
    )
