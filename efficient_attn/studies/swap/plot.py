"""How near a model stays to itself with its attention swapped: end to end, by layer, and on its way up."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from efficient_attn.report.harmless import plain
from efficient_attn.report.palette import GRID, INK, MUTED, line_styles
from efficient_attn.report.readable import short
from efficient_attn.studies.swap.analysis import HIDDEN, TURNED, Swap, SwapRow, by_text, spread, swaps
from efficient_attn.studies.swap.tables import NAMES, heading
from efficient_attn.sweep.records import Record
from efficient_attn.sweep.sizes import MEAN_OF_VALUES

# Name of the swap among the quantities to plot.
SWAP = "swap"

_PANEL_INCHES, _NAMES_INCHES, _HEAD_INCHES = 4.2, 2.2, 0.7
_LEAST_INCHES, _ROW_INCHES = 3.2, 0.27
_LONGEST_NAME = 40
# Texts are dots under the line of their mean, so far in rows.
_BELOW_LINE = 0.28
# How far an axis reaches beyond the largest difference.
_MARGIN = 1.3
# More than these are in the tables.
_MOST_MODELS, _MOST_ROWS = 8, 40
_LARGEST = 1e6

# Rounding is drawn this many times below the smallest real difference: its own distance means nothing.
_BELOW = 3.0
# Cosines and shares that are marked on their axis, whose steps are the distances from 1.
_MARKS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)


def plot_swaps(records: Sequence[Record]) -> Any:
    """A row of panels for each model; the axes of the first."""
    from matplotlib.figure import Figure

    found = swaps(records)[:_MOST_MODELS]
    most = max((len(_panels(one)) for one in found), default=1)
    heights = [max(_LEAST_INCHES, _ROW_INCHES * len(_drawn(one)) + 1.2) for one in found] or [_LEAST_INCHES]
    size = (most * _PANEL_INCHES + _NAMES_INCHES, sum(heights) + _HEAD_INCHES)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(
        "How near a model stays to itself with its attention swapped\nnothing trained afterwards; "
        "crosses: every query gets the mean of the values",
        fontsize=11,
        color=INK,
    )
    grid = figure.subplots(max(len(found), 1), most, squeeze=False, height_ratios=heights)
    for axes, one in zip(grid, found, strict=False):
        styles = _styles(one)
        for ax, draw in zip(axes, _panels(one), strict=False):
            draw(ax, one, styles)
            for side in ("top", "right"):
                ax.spines[side].set_visible(False)
            ax.set_axisbelow(True)
            ax.tick_params(colors=INK, which="both", length=3, labelsize=9)
        for ax in axes[len(_panels(one)) :]:
            ax.set_axis_off()
        axes[0].set_title(plain(heading(one)), loc="left", fontsize=9, color=MUTED, parse_math=False)
    return grid[0, 0]


def _panels(one: Swap) -> list[Any]:
    return [_end_to_end, *([_alone] if one.layers else []), _depth]


def _drawn(one: Swap) -> list[SwapRow]:
    """The rows that have a value, the nearest first; exact attention in all its ways is rounding."""
    known = [(value.mean, row) for row in one.rows if (value := row.spread(one.quantity)) is not None]
    return [row for _, row in sorted(known, key=lambda pair: pair[0])][:_MOST_ROWS]


def _styles(one: Swap) -> dict[str, dict[str, Any]]:
    rows = _drawn(one)
    found = line_styles([(row.label, row.backend) for row in rows if row.backend != MEAN_OF_VALUES])
    cross = {"color": MUTED, "marker": "x", "linestyle": (0, (1, 2)), "linewidth": 1.2, "markersize": 6}
    return found | {row.label: cross for row in rows if row.backend == MEAN_OF_VALUES}


def _end_to_end(ax: Any, one: Swap, styles: dict[str, dict[str, Any]]) -> None:
    """One line for each backend: the mean, and each text as a dot."""
    rows = _drawn(one)
    means = [value.mean for row in rows if (value := row.spread(one.quantity)) is not None]
    floor, largest = _floor(means, one.rounding), max(means, default=1.0)
    for height, (row, mean) in enumerate(zip(rows, means, strict=True)):
        style = styles[row.label]
        texts = [max(fmean(draws), floor) for draws in by_text(row.whole, one.quantity)] if row.whole else []
        if mean > one.rounding:
            below = [height + _BELOW_LINE] * len(texts)
            ax.plot(texts, below, ".", color=style["color"], alpha=0.6, markersize=4)
        # The line style of a name is the one of the other panels.
        ax.plot([_MARGIN * largest, max(mean, floor)], [height] * 2, **{**style, "marker": ""})
        ax.plot(
            [max(mean, floor)], [height], **{**style, "linestyle": "none", "markersize": 8}, clip_on=False
        )
    ax.set_yticks(range(len(rows)), [short(plain(row.label), _LONGEST_NAME) for row in rows])
    for label in ax.get_yticklabels():
        label.set_parse_math(False)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(axis="x", color=GRID, linewidth=0.8)
    _nearness(ax.xaxis, one.quantity, floor, largest)
    ax.invert_xaxis()
    ax.set_xlabel(f"all layers: {NAMES[one.quantity]}; dots: texts", color=INK)


def _alone(ax: Any, one: Swap, styles: dict[str, dict[str, Any]]) -> None:
    """A line over the layers for each backend."""
    lines = {row.label: _by_layer(row, one.quantity) for row in _drawn(one) if row.alone}
    every = [value for line in lines.values() for value in line.values()]
    floor = _floor(every, one.rounding)
    for label, line in lines.items():
        if any(value > one.rounding for value in line.values()):
            ax.plot(
                list(line),
                [max(value, floor) for value in line.values()],
                **styles[label],
                label=plain(label),
            )
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    _nearness(ax.yaxis, one.quantity, floor, max(every, default=1.0))
    ax.invert_yaxis()
    _layers(ax)
    ax.set_xlabel("the only layer swapped", color=INK)
    ax.set_ylabel(NAMES[one.quantity], color=INK)


def _depth(ax: Any, one: Swap, styles: dict[str, dict[str, Any]]) -> None:
    """The error of the hidden states after each layer, all of them swapped."""
    for row in _drawn(one):
        states = row.whole.hidden_relative_error_layers if row.whole is not None else None
        if states and all(value is not None and value < _LARGEST for value in states):
            ax.plot(range(len(states)), states, **styles[row.label], label=plain(row.label))
    ax.set_ylim(bottom=0)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    _layers(ax)
    ax.set_xlabel("after layer, all layers swapped", color=INK)
    ax.set_ylabel(NAMES[HIDDEN], color=INK)


def _by_layer(row: SwapRow, quantity: str) -> dict[int, float]:
    found = {layer: spread(record, quantity) for layer, record in sorted(row.alone.items())}
    return {layer: value.mean for layer, value in found.items() if value is not None}


def _floor(values: Sequence[float], rounding: float) -> float:
    """Where rounding is drawn."""
    return min((value for value in values if value > rounding), default=10 * rounding) / _BELOW


def _nearness(axis: Any, quantity: str, floor: float, largest: float) -> None:
    """An axis of distances with marks at familiar cosines or shares."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    turned = quantity in TURNED
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.axes.set(**{f"{axis.axis_name}lim": (floor / 1.15, _MARGIN * max(largest, 2 * floor))})
    marks = [1 - mark for mark in _MARKS if 1.5 * floor < 1 - mark <= _MARGIN * largest]
    locator = FixedLocator([floor, *marks]) if turned else LogLocator(base=10, subs=(1, 3))
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _mark(value, turned, floor)))


def _mark(value: float, turned: bool, floor: float) -> str:
    if turned and value <= 1.01 * floor:
        return "1"
    return f"{1 - value:.4g}" if turned else f"{value:g}"


def _layers(ax: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
