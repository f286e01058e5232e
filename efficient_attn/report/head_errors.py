"""The error of each head: a table and a panel for each layer."""

from collections.abc import Sequence
from typing import Any

from efficient_attn.analysis.head_errors import HeadRow, heads
from efficient_attn.report.error_table import show_error, title
from efficient_attn.report.harmless import plain
from efficient_attn.report.palette import GRID, INK, MUTED, line_styles
from efficient_attn.report.table import Table
from efficient_attn.sweep.records import Record

_INCHES, _LEGEND_INCHES = (4.1, 3.3), 2.8
_NAME = "Relative output error of each head"


def head_error_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each input: backends at their largest size as rows, heads as columns."""
    return [
        Table(
            f"{_NAME}: {title(panel)}",
            ("backend", *(f"head {number}" for number in range(max(len(row.values) for row in rows)))),
            tuple((row.label, *(show_error(v) if v is not None else "" for v in row.values)) for row in rows),
            ("Means over draws; each backend at its largest size.",),
        )
        for panel, rows in heads(records)
    ]


def plot_heads(records: Sequence[Record]) -> Any:
    """A panel for each input with the heads side by side; the axes of the first."""
    from matplotlib.figure import Figure

    shown = heads(records)
    width = len(shown) * _INCHES[0] + _LEGEND_INCHES
    figure = Figure(figsize=(width, _INCHES[1] + 0.5), layout="constrained")
    axes = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    labels = {row.label: row.backend for _, rows in shown for row in rows if not row.yardstick}
    styles = line_styles(list(labels.items()))
    lines: dict[str, Any] = {}
    for ax, (panel, rows) in zip(axes, shown, strict=True):
        for number, row in enumerate(rows):
            lines.setdefault(row.label, _draw(ax, row, styles, number))
        _dress(ax)
        ax.set_title(plain(title(panel)), loc="left", fontsize=9.5, color=INK, parse_math=False)
    axes[0].set_ylabel(_NAME.lower(), color=INK)
    figure.suptitle(
        f"{_NAME} against exact softmax attention in float64; means over draws",
        x=0.01,
        ha="left",
        fontsize=12,
        fontweight="bold",
        color=INK,
    )
    legend = figure.legend(
        handles=list(lines.values()), loc="outside right center", frameon=False, fontsize=9, labelcolor=INK
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return axes[0]


def _draw(ax: Any, row: HeadRow, styles: Any, number: int) -> Any:
    """Points for a backend, a short bar in each head for a yardstick."""
    known = [(head, value) for head, value in enumerate(row.values) if value]
    x, y = [head for head, _ in known], [value for _, value in known]
    if row.yardstick:
        style = {"linestyle": "none", "marker": "_", "markersize": 14, "color": INK if number == 0 else MUTED}
        style["alpha"] = 1.0 if number == 0 else 1 / number**0.5
    else:
        style = {**styles[row.label], "linestyle": "none"}
    return ax.plot(x, y, **style, label=plain(row.label))[0]


def _dress(ax: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.set_xlabel("head", color=INK, fontsize=9.5)
