"""Lines in panels with one list of names for all: what plots of papers have that are no sweep over tokens."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from efficient_attn.report.harmless import plain
from efficient_attn.report.palette import INK, MUTED, line_styles

_PANEL_INCHES = (5.0, 3.7)
_NAMES_INCHES = 0.9

# A range smaller than this gets numbers at 1, 2 and 5 of each decade.
_FEW_DECADES = 500


class Line(NamedTuple):
    """Values at places, each with an interval or with None.

    Attributes:
        backend: What its colour stands for.
    """

    label: str
    backend: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


def new_panels(rows: int, columns: int) -> Any:
    """An array of axes [rows columns] on one figure, without the window that pyplot would open."""
    from matplotlib.figure import Figure

    size = (columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1] + _NAMES_INCHES)
    return Figure(figsize=size, layout="constrained").subplots(rows, columns, squeeze=False)


def draw_lines(
    ax: Any,
    lines: Sequence[Line],
    *,
    title: str,
    subtitle: str,
    x_label: str,
    show_y: Callable[[float], str],
) -> None:
    """Draw lines on logarithmic axes, each in the colour that it has in every panel."""
    styles = line_styles([(line.label, line.backend) for line in lines])
    for line in lines:
        if not line.x:
            continue
        ax.plot(line.x, line.y, label=plain(line.label), **styles[line.label])
        if line.low is not None and line.high is not None:
            colour = styles[line.label]["color"]
            # None becomes NaN, a gap in the band.
            low, high = (np.asarray(edges, dtype=float) for edges in (line.low, line.high))
            ax.fill_between(line.x, low, high, color=colour, alpha=0.18, linewidth=0)
    dress(ax, title=title, subtitle=subtitle, x_label=x_label, show_y=show_y)


def dress(ax: Any, *, title: str, subtitle: str, x_label: str, show_y: Callable[[float], str]) -> None:
    """Logarithmic axes with ticks where something was measured, a title and a quiet grid."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    places = sorted({float(x) for line in ax.get_lines() for x in line.get_xdata()})
    ax.xaxis.set_major_locator(FixedLocator(places))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    ax.xaxis.set_minor_locator(NullLocator())
    low, high = ax.get_ylim()
    if high / low < _FEW_DECADES:
        ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_y(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(MUTED)
    ax.tick_params(colors=INK, which="both", length=3, labelsize=8.5)
    ax.set_xlabel(x_label, color=INK)
    ax.set_title(f"{title}\n", loc="left", fontsize=11, fontweight="bold", color=INK)
    ax.text(0, 1.02, plain(subtitle), transform=ax.transAxes, fontsize=9, color=MUTED, parse_math=False)


def name_lines(axes: Any, *, columns: int = 4) -> None:
    """One list of names below all panels, each name once."""
    named = {
        label: handle
        for ax in axes.flat
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    axes.flat[0].figure.legend(
        list(named.values()),
        list(named),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
    )
