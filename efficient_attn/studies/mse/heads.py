"""The error of each head: a table and a chart for each input."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from efficient_attn.report.error_table import show_error
from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import INK, MUTED, line_styles
from efficient_attn.report.table import Table
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES, YARDSTICKS
from efficient_attn.studies.mse.analysis import RELATIVE, Panel, panels

HEADS = "output_relative_error_heads"

_NAME = "Relative output error of each head"


class HeadRow(NamedTuple):
    """Relative output error of each head of one backend, at its largest size.

    Attributes:
        label: The backend with all its options.
        yardstick: Whether it is a baseline.
        values: Means over draws; None if a draw was not finite.
    """

    label: str
    backend: str
    yardstick: bool
    values: tuple[float | None, ...]


def head_error_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each input: backends at their largest size as rows, heads as columns."""
    return [
        Table(
            f"{_NAME}: {panel.title}",
            ("backend", *(f"head {number}" for number in range(max(len(row.values) for row in rows)))),
            tuple((row.label, *(show_error(v) if v is not None else "" for v in row.values)) for row in rows),
            ("Means over draws; each backend at its largest size.",),
        )
        for panel, rows in heads(records)
    ]


def head_plot(records: Sequence[Record]) -> Plot:
    """A chart for each input with the heads side by side."""
    shown = heads(records)
    labels = {row.label: row.backend for _, rows in shown for row in rows if not row.yardstick}
    styles = line_styles(list(labels.items()))
    charts = []
    for panel, rows in shown:
        series = []
        for number, row in enumerate(rows):
            bar = {"marker": "_", "markersize": 14, "color": MUTED if number else INK}
            bar["alpha"] = 1 / max(number, 1) ** 0.5
            series.append(_series(row, bar if row.yardstick else styles[row.label]))
        x = Axis("head", show="{:.0f}".format, ticks=range(max(len(row.values) for row in rows)))
        y = Axis("relative output error", "log", show_error)
        charts.append(Chart(x, y, tuple(series), panel.title, apart=True))
    conditions = "against exact softmax attention in float64; means over draws"
    return Plot(_NAME, conditions, tuple((chart,) for chart in charts))


def _series(row: HeadRow, style: dict[str, object]) -> Series:
    """Points for a backend, a short bar in each head for a baseline."""
    return Series(row.label, range(len(row.values)), row.values, {**style, "linestyle": "none"})


def heads(records: Iterable[Record]) -> tuple[tuple[Panel, tuple[HeadRow, ...]], ...]:
    """Inputs with errors per head, and their rows, baselines first."""
    with_heads = [record for record in records if getattr(record, HEADS)]
    return tuple((panel, _rows(panel, with_heads)) for panel in panels(with_heads, RELATIVE))


def _rows(panel: Panel, records: Iterable[Record]) -> tuple[HeadRow, ...]:
    last = [curve.points[-1].record for curve in (*panel.others, *panel.curves)]
    plainest = [r for r in records if r.case.backend == MEAN_OF_VALUES and r.case.inputs == panel.inputs]
    return tuple(
        HeadRow(
            record.case.label,
            record.case.backend,
            record.case.backend in YARDSTICKS,
            tuple(record.output_relative_error_heads or ()),
        )
        for record in (*plainest[:1], *last)
    )
