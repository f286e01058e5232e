"""Distance of a model with replaced attention from itself: end to end, by layer, and over its depth."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.palette import MUTED, line_styles
from efficient_attn.runner.records import Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES
from efficient_attn.studies.swap.analysis import HIDDEN, LARGEST, MEAN_POOL, Swap, by_text, swaps
from efficient_attn.studies.swap.tables import NAMES, heading

_ROW_INCHES = 0.48
# Texts are dots under the line of their mean, and names stand above it; distances are in rows.
_BELOW_LINE, _ABOVE_LINE = 0.22, 0.4
# How far an axis reaches beyond the differences.
_MARGIN = 1.3
# More rows are in the tables.
_MOST_ROWS = 40

_DISTANCES = {**NAMES, MEAN_POOL: "1 − cosine, mean pool"}


def swap_plot(records: Sequence[Record]) -> Plot:
    """Three charts for each model below each other."""
    found = swaps(records)
    rows = [(chart,) for one in found for chart in _charts(one, heading(one) if len(found) > 1 else "")]
    return Plot(
        "Distance of a converted model from itself",
        f"{heading(found[0]) if len(found) == 1 else ''}\n"
        "training-free conversion; crosses: uniform-attention baseline (mean of the values); backends that "
        "differ by rounding are left out",
        tuple(rows),
        (),
    )


def _charts(one: Swap, head: str) -> list[Chart]:
    styles = line_styles(
        [(row.label, row.backend) for _, row in one.changed if row.backend != MEAN_OF_VALUES]
    )
    cross = {"color": MUTED, "marker": "x", "linestyle": (0, (1, 2)), "linewidth": 1.2, "markersize": 6}
    styles[MEAN_OF_VALUES] = cross
    alone = [_alone(one, styles)] if one.layers else []
    return [_end_to_end(one, styles)._replace(title=head), *alone, _depth(one, styles)]


def _end_to_end(one: Swap, styles: dict[str, dict[str, Any]]) -> Chart:
    """One line for each backend: the mean, and each text as a dot."""
    rows = one.changed[:_MOST_ROWS]
    texts = [
        [fmean(draws) for draws in by_text(row.whole, one.quantity)] if row.whole else [] for _, row in rows
    ]
    every = [value for group in texts for value in group if value > one.rounding]
    limits = (min(every) / _MARGIN, max(every) * _MARGIN) if every else None
    series, names = [], {}
    for height, ((mean, row), dots) in enumerate(zip(rows, texts, strict=True)):
        # The line style of a name is the one of the other charts.
        style, start = styles[row.label], limits[0] if limits else mean
        small = {"color": style["color"], "linestyle": "none", "marker": ".", "alpha": 0.6, "markersize": 4}
        series += [
            Series("", dots, [height + _BELOW_LINE] * len(dots), small),
            Series("", (start, mean), (height, height), {**style, "marker": ""}),
            Series("", (mean,), (height,), {**style, "linestyle": "none", "markersize": 8, "clip_on": False}),
        ]
        names[height - _ABOVE_LINE] = row.label
    x = Axis(f"{_DISTANCES[one.quantity]}, all layers replaced; dots: texts", "log", limits=limits)
    y = Axis(ticks=names, limits=(len(rows) - 0.4, -0.9), inside=True)
    return Chart(x, y, tuple(series), height=_ROW_INCHES * len(rows))


def _alone(one: Swap, styles: dict[str, dict[str, Any]]) -> Chart:
    """A line over the layers for each backend."""
    lines = {row.label: row.by_layer(one.quantity) for _, row in one.changed[:_MOST_ROWS]}
    series = [
        Series(label, list(line), list(line.values()), styles[label]) for label, line in lines.items() if line
    ]
    layers = Axis("the only layer replaced", show="{:.0f}".format, ticks=one.layers)
    return Chart(layers, Axis(_DISTANCES[one.quantity], "log"), tuple(series))


def _depth(one: Swap, styles: dict[str, dict[str, Any]]) -> Chart:
    """The error of the hidden states after each layer, all of them replaced."""
    series = []
    for _, row in one.changed[:_MOST_ROWS]:
        states = row.whole.hidden_relative_error_layers if row.whole is not None else None
        if states and all(value is not None and value < LARGEST for value in states):
            series.append(Series(row.label, range(len(states)), states, styles[row.label]))
    layers = Axis(
        "after layer, all layers replaced",
        show="{:.0f}".format,
        ticks=range(max((len(line.x) for line in series), default=0)),
    )
    highest = max((value or 0.0 for line in series for value in line.y), default=1.0)
    return Chart(layers, Axis(NAMES[HIDDEN], limits=(0, 1.05 * highest or 1.0)), tuple(series))
