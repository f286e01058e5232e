"""Errors of kernel entries over the angle of a pair: tables, agreement with theory, and the plot."""

import math
import re
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import sized
from efficient_attn.report import text
from efficient_attn.report.figures import Axis, Chart, Plot, Series, in_rows, line_styles
from efficient_attn.report.table import PREDICTED, Table
from efficient_attn.report.text import show_error
from efficient_attn.runs.store import over_budget
from efficient_attn.stats.estimates import grouped
from efficient_attn.theory.kernel import KINDS, log_pair_error

# A 95 % interval of a mean, in standard errors; further from theory than `_SURE` is no chance.
WIDE, _SURE = 1.96, 4.0
# Squared errors of kernel entries that are exact are rounding below this.
_EXACT = 1e-20

_PAIR = re.compile(r"pair\(norm=(.+), angle=(.+)\)")
_ANGLES = Axis("angle between query and key", show="{:g}°".format, ticks=(0, 60, 120, 180), limits=(0, 180))
_SIZES = Axis("number of features", "log2", "{:.0f}".format)
# Angles of a line of theory, without the two at which an error is 0.
_SMOOTH = np.linspace(1.5, 178.5, 60)
# Mark of an error far from theory.
_FAR = "≠"
# Decades of an axis, and room at its ends.
_DECADES, _MARGIN = 1e6, 2.0


class Entry(NamedTuple):
    """Mean squared error of kernel entries over their square.

    Attributes:
        label: Backend and its options without the number of features, which is `size`.
        norm, angle: Norm of x and y, and the angle between them in degrees.
        value: Mean over draws; the theoretical error where the draws are too few.
        low, high: 95 % interval of the mean.
        draws: Number of draws, 0 for a theoretical error.
        expected: Theoretical error; None without a closed form.
    """

    label: str
    size: int
    norm: float
    angle: float
    value: float
    low: float
    high: float
    draws: int
    expected: float | None
    record: Record

    @property
    def deviation(self) -> float | None:
        """Distance from theory in standard errors, None without a measured error or theory."""
        if self.high <= self.low or not self.expected or self.expected <= _EXACT:
            return None
        return abs(self.value - self.expected) * WIDE / (self.high - self.value)


def entry_of(record: Record) -> Entry | None:
    """Error of one record, None without a value, a size or a pair."""
    label, size = sized(record.case)
    pair = _PAIR.fullmatch(record.case.inputs)
    measured = record.kernel_mse is not None or record.expected_kernel_mse is not None
    if not (record.kernel_value and measured and size is not None and pair):
        return None
    square, expected = record.kernel_value**2, record.expected_kernel_mse
    expected = None if expected is None else expected / square
    draws = [draw / square for draw in record.measured.get("kernel_mse_draws", ())]
    value = fmean(draws) if draws else math.nan if expected is None else expected
    wide = WIDE * stdev(draws) / math.sqrt(len(draws)) if len(draws) > 1 else 0.0
    norm, angle = map(float, pair.groups())
    return Entry(label, size, norm, angle, value, value - wide, value + wide, len(draws), expected, record)


def tables(records: Sequence[Record]) -> list[Table]:
    """For each norm the errors by angle, or by size at a single angle."""
    shown = []
    for group in _by_norm(records):
        entries = list(filter(None, map(entry_of, group)))
        if entries or not all(over_budget(record) for record in group if record.status != "ok"):
            shown.append(_table(entries, group))
    return shown


def _by_norm(records: Sequence[Record]) -> list[list[Record]]:
    """Records by norm, head dimension and number of pairs."""
    groups: dict[Any, list[Record]] = {}
    for case in grouped(records, "key"):
        pair = _PAIR.fullmatch(case[0].case.inputs)
        norm = pair and pair[1]
        groups.setdefault((norm, case[0].case.head_dim, case[0].case.tokens), []).extend(case)
    return [*groups.values()]


def _table(entries: Sequence[Entry], records: Sequence[Record]) -> Table:
    # Without a value on any draw an error has neither theory nor a cell.
    silent = [record for record in records if record.kernel_value and entry_of(record) is None]
    few = [*silent, *(entry.record for entry in entries if not entry.draws)]
    remark = next((f"; {record.reason.partition(':')[0]}" for record in few if record.reason), "")
    names = ", ".join(dict.fromkeys(sized(record.case).series for record in silent))
    across, heads, lines = _grid(entries)
    cells = {label: {getattr(x, across): _cell(x) for x in line} for label, line in lines.items()}
    rows = tuple((label, *(row.get(place, "") for place in heads)) for label, row in cells.items())
    notes = (
        *([f"{_meaning(entries).capitalize()}: report.html. Starred: smallest error."] if entries else []),
        *([f"{_FAR}: more than {_SURE:.0f} standard errors from theory."] if _FAR in str(rows) else []),
        *text.mark_notes(rows, words=f"theory{remark}"),
        *([f"{names}: no theory{remark}."] if names else []),
        *text.failure_notes(r for r in records if r.status != "ok" and not r.kernel_value),
    )
    case, axis = records[0].case, _ANGLES if across == "angle" else _SIZES
    place = f", {entries[0].angle:g}°" if across == "size" and entries else ""
    norm = f"|x| = |y| = {entries[0].norm:g}" if entries else text.describe(case.inputs)
    title = f"Relative MSE of exp(x·y): {norm}{place}; {case.tokens} pairs, head dimension {case.head_dim}"
    columns = ("backend", *map(axis.show, heads))
    return Table(title, columns, rows, notes).compared(errors=columns[1:])


def _grid(entries: Sequence[Entry]) -> tuple[str, list[float], dict[str, list[Entry]]]:
    """Field on the horizontal axis, its values, and the entries of each line by its label."""
    across = "angle" if len({entry.angle for entry in entries}) > 1 else "size"
    sizes = sorted({entry.size for entry in entries})
    lines: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: (entry.label, entry.size, entry.angle)):
        several = across == "angle" and len(sizes) > 1
        label = f"{entry.label}, {entry.size} features" if several else entry.label
        lines.setdefault(label, []).append(entry)
    return across, sorted({getattr(entry, across) for entry in entries}), lines


def _cell(entry: Entry) -> str:
    if not entry.draws:
        return f"{PREDICTED}{show_error(entry.value)}"
    value = f"{show_error(entry.value)}{_FAR if (entry.deviation or 0.0) > _SURE else ''}"
    return f"{value}\t{show_error(entry.low)} to {show_error(entry.high)}" if entry.draws > 1 else value


def _meaning(entries: Sequence[Entry]) -> str:
    draws = max(entry.draws for entry in entries)
    return f"mean of {draws} draws, 95 % interval" if draws > 1 else "one draw"


def agreement(records: Sequence[Record]) -> list[str]:
    """Number of errors that agree with theory."""
    entries = [entry for record in records if (entry := entry_of(record)) is not None]
    judged = [entry for entry in entries if entry.deviation is not None]
    if not judged:
        return []
    close = sum((entry.deviation or 0.0) <= _SURE for entry in judged)
    ratios = [entry.value / (entry.expected or math.nan) for entry in judged]
    few = sum(not entry.draws for entry in entries)
    rest = f" {few} further points need more draws." if few else ""
    return [
        f"{close} of {len(judged)} kernel errors lie on the closed forms, within {_SURE:.0f} standard errors "
        f"(measured / theory {min(ratios):.2f} to {max(ratios):.2f}).{rest}"
    ]


def plots(records: Sequence[Record]) -> dict[str, Plot]:
    """The error over the angle, or over the size at a single angle, a chart for each norm."""
    groups = [[*filter(None, map(entry_of, group))] for group in _by_norm(records)]
    groups = [entries for entries in groups if entries]
    if not groups:
        return {}
    case, entries = groups[0][0].record.case, [entry for group in groups for entry in group]
    pairs = f"{case.tokens} pairs, head dimension {case.head_dim}"
    conditions = f"lines: theory; points where draws suffice: {_meaning(entries)}; {pairs}"
    if len({entry.angle for entry in entries}) == 1:
        conditions += f"; angle {entries[0].angle:g}°"
    styles = line_styles([*{entry.label: entry.record.case.backend for entry in entries}.items()])
    charts = [_chart(entries, styles) for entries in groups]
    title = "Relative MSE of the kernel estimate, exp(x·y)"
    return {"kernel_mse": Plot(title, conditions, in_rows(charts, 1 if len(charts) == 1 else 2))}


def _chart(entries: Sequence[Entry], styles: dict[str, dict[str, Any]]) -> Chart:
    across, places, lines = _grid(entries)
    sizes = [entry.size for entry in entries]
    largest = max(sizes)
    if across == "angle":
        lines = {label: line for label, line in lines.items() if line[0].size in (min(sizes), largest)}
    series = []
    for label, line in lines.items():
        faint = {"alpha": 0.5} if across == "angle" and line[0].size < largest else {}
        style = {**styles[line[0].label], "linewidth": 1.4, "markersize": 5, **faint}
        x, theory = _theory(line, across)
        hints = ["theory"] * len(x)
        points = [entry for entry in line if entry.draws]
        series.append(Series("" if points else label, x, theory, {**style, "marker": ""}, hints=hints))
        measured, low, high = ([getattr(x, name) for x in points] for name in ("value", "low", "high"))
        at = [getattr(entry, across) for entry in points]
        series.append(Series(label, at, measured, {**style, "linestyle": "none"}, low, high, bars=True))
    values = [entry.value for line in lines.values() for entry in line if entry.value > _EXACT]
    top = max(values, default=1.0) * _MARGIN
    limits = (max(min(values, default=1.0) / _MARGIN, top / _DECADES), top)
    horizontal = _ANGLES if across == "angle" else _SIZES._replace(ticks=places)
    vertical = Axis("relative MSE", "log", show_error, limits=limits)
    return Chart(horizontal, vertical, tuple(series), f"norm {entries[0].norm:g}")


def _theory(line: Sequence[Entry], across: str) -> tuple[list[float], list[float | None]]:
    """Places and errors of the closed form: at every angle where features are not calibrated."""
    case, entry = line[0].record.case, line[0]
    kind, projection = KINDS.get(case.backend), str(case.options.get("projection"))
    norms = str(case.options.get("norms", "chi"))
    if across == "angle" and kind is not None:
        pair: dict[str, Any] = {"kind": kind, "norm": entry.norm, "head_dim": case.head_dim}
        pair |= {"projection": projection, "norms": norms, "num_features": entry.size}
        curve = log_pair_error(_SMOOTH, **pair)
        if curve is not None:
            return _SMOOTH.tolist(), np.exp(curve).tolist()
    return [getattr(entry, across) for entry in line], [entry.expected for entry in line]
