"""How near a model stays to itself with its attention replaced: end to end, by layer, and over its depth."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import MUTED, line_styles
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.studies.swap.analysis import HIDDEN, TURNED, Swap, SwapRow, by_text, spread, swaps
from efficient_attn.studies.swap.tables import NAMES, heading

# Name of the swap among the quantities to plot.
SWAP = "swap"

_ROW_INCHES = 0.48
# Texts are dots under the line of their mean; distances are in rows.
_BELOW_LINE = 0.22
# Names stand above the lines.
_ABOVE_LINE = 0.4
# How far an axis reaches beyond the largest difference.
_MARGIN = 1.3
# More than these are in the tables.
_MOST_MODELS, _MOST_ROWS = 8, 40
_LARGEST = 1e6

# Rounding is drawn this many times below the smallest real difference: its own distance means nothing.
_BELOW = 3.0
# Cosines and shares that are marked on their axis, whose steps are the distances from 1.
_MARKS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)

Styles = dict[str, dict[str, Any]]


def swap_plot(records: Sequence[Record]) -> Plot:
    """Three charts for each model below each other."""
    found = swaps(records)[:_MOST_MODELS]
    rows = [(chart,) for one in found for chart in _charts(one, heading(one) if len(found) > 1 else "")]
    return Plot(
        "Similarity of a converted model to itself",
        f"{heading(found[0]) if len(found) == 1 else ''}\n"
        "training-free conversion; crosses: uniform-attention baseline (mean of the values)",
        tuple(rows),
        (),
    )


def _charts(one: Swap, head: str) -> list[Chart]:
    styles = _styles(one)
    alone = [_alone(one, styles)] if one.layers else []
    return [_end_to_end(one, styles)._replace(title=head), *alone, _depth(one, styles)]


def _drawn(one: Swap) -> list[SwapRow]:
    """The rows that have a value, the nearest first; exact attention in all its ways is rounding."""
    known = [(value.mean, row) for row in one.rows if (value := row.spread(one.quantity)) is not None]
    return [row for _, row in sorted(known, key=lambda pair: pair[0])][:_MOST_ROWS]


def _styles(one: Swap) -> Styles:
    rows = _drawn(one)
    found = line_styles([(row.label, row.backend) for row in rows if row.backend != MEAN_OF_VALUES])
    cross = {"color": MUTED, "marker": "x", "linestyle": (0, (1, 2)), "linewidth": 1.2, "markersize": 6}
    return found | {row.label: cross for row in rows if row.backend == MEAN_OF_VALUES}


def _end_to_end(one: Swap, styles: Styles) -> Chart:
    """One line for each backend: the mean, and each text as a dot."""
    rows = _drawn(one)
    means = [value.mean for row in rows if (value := row.spread(one.quantity)) is not None]
    floor, largest = _floor(means, one.rounding), max(means, default=1.0)
    series = []
    for height, (row, mean) in enumerate(zip(rows, means, strict=True)):
        style, end = styles[row.label], max(mean, floor)
        texts = [max(fmean(draws), floor) for draws in by_text(row.whole, one.quantity)] if row.whole else []
        if mean > one.rounding:
            dots = {
                "color": style["color"],
                "linestyle": "none",
                "marker": ".",
                "alpha": 0.6,
                "markersize": 4,
            }
            series.append(Series("", texts, [height + _BELOW_LINE] * len(texts), dots))
        # The line style of a name is the one of the other charts.
        stroke = {**style, "marker": ""}
        point = {**style, "linestyle": "none", "markersize": 8, "clip_on": False}
        series.append(Series("", (_MARGIN * largest, end), (height, height), stroke))
        series.append(Series("", (end,), (height,), point))
    names = {height - _ABOVE_LINE: row.label for height, row in enumerate(rows)}
    x = _nearness(f"{NAMES[one.quantity]}, all layers replaced; dots: texts", one.quantity, floor, largest)
    y = Axis(ticks=names, limits=(len(rows) - 0.4, -0.9), inside=True)
    return Chart(
        x._replace(limits=x.limits and x.limits[::-1]), y, tuple(series), height=_ROW_INCHES * len(rows)
    )


def _alone(one: Swap, styles: Styles) -> Chart:
    """A line over the layers for each backend."""
    lines = {row.label: _by_layer(row, one.quantity) for row in _drawn(one) if row.alone}
    every = [value for line in lines.values() for value in line.values()]
    floor = _floor(every, one.rounding)
    series = [
        Series(label, list(line), [max(value, floor) for value in line.values()], styles[label])
        for label, line in lines.items()
        if any(value > one.rounding for value in line.values())
    ]
    y = _nearness(NAMES[one.quantity], one.quantity, floor, max(every, default=1.0))
    y = y._replace(limits=y.limits and y.limits[::-1])
    return Chart(_layers("the only layer replaced", one.layers), y, tuple(series))


def _depth(one: Swap, styles: Styles) -> Chart:
    """The error of the hidden states after each layer, all of them replaced."""
    series, most = [], 0
    for row in _drawn(one):
        states = row.whole.hidden_relative_error_layers if row.whole is not None else None
        if states and all(value is not None and value < _LARGEST for value in states):
            series.append(Series(row.label, range(len(states)), states, styles[row.label]))
            most = max(most, len(states))
    highest = max((value or 0.0 for one in series for value in one.y), default=1.0)
    y = Axis(NAMES[HIDDEN], limits=(0, 1.05 * highest or 1.0))
    return Chart(_layers("after layer, all layers replaced", range(most)), y, tuple(series))


def _by_layer(row: SwapRow, quantity: str) -> dict[int, float]:
    found = {layer: spread(record, quantity) for layer, record in sorted(row.alone.items())}
    return {layer: value.mean for layer, value in found.items() if value is not None}


def _floor(values: Sequence[float], rounding: float) -> float:
    """The place of rounding."""
    return min((value for value in values if value > rounding), default=10 * rounding) / _BELOW


def _nearness(label: str, quantity: str, floor: float, largest: float) -> Axis:
    """An axis of distances with marks at familiar cosines or shares."""
    limits = (floor / 1.15, _MARGIN * max(largest, 2 * floor))
    if quantity not in TURNED:
        return Axis(label, "log", limits=limits)
    marks = {1 - mark: f"{mark:g}" for mark in _MARKS if 1.5 * floor < 1 - mark <= _MARGIN * largest}
    return Axis(label, "log", ticks={floor: "1", **marks}, limits=limits)


def _layers(label: str, numbers: Sequence[int]) -> Axis:
    return Axis(label, show="{:.0f}".format, ticks=numbers)
