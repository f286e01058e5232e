"""Distance of a model with replaced attention from itself: all layers replaced, and one of them."""

from collections.abc import Sequence
from typing import Any

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION
from efficient_attn.report.figures import MUTED, Axis, Chart, Plot, Series, line_styles
from efficient_attn.report.text import heading
from efficient_attn.studies.swap.analysis import MEAN_POOL, NAMES, Swap, swaps

_ROW_INCHES = 0.48
# Names stand above their lines; distances are in rows.
_ABOVE_LINE = 0.4
# How far an axis reaches beyond the differences.
_MARGIN = 1.3
# More rows are in the tables.
_MOST_ROWS = 40

_DISTANCES = {**NAMES, MEAN_POOL: "1 − cosine, mean pool"}


def swap_plot(records: Sequence[Record]) -> Plot:
    """Two charts for each model, one below the other."""
    models = swaps(records)
    charts = [
        chart for swap in models for chart in _charts(swap, heading(swap.case) if len(models) > 1 else "")
    ]
    return Plot(
        "Distance of a converted model from itself",
        f"{heading(models[0].case) if len(models) == 1 else ''}\n"
        "training-free conversion; crosses: uniform attention (mean of the values); backends that "
        "differ by rounding are left out",
        tuple((chart,) for chart in charts),
        legend=False,
    )


def _charts(swap: Swap, head: str) -> list[Chart]:
    rows = swap.changed[:_MOST_ROWS]
    styles = line_styles([(row.label, row.backend) for _, row in rows if row.backend != UNIFORM_ATTENTION])
    cross = {"color": MUTED, "marker": "x", "linestyle": (0, (1, 2)), "linewidth": 1.2, "markersize": 6}
    styles[UNIFORM_ATTENTION] = cross
    alone = [
        Series(row.label, list(line), list(line.values()), styles[row.label])
        for _, row in rows
        if (line := row.by_layer(swap.quantity))
    ]
    layers = Axis("the only layer replaced", show="{:.0f}".format, ticks=swap.layers)
    second = [Chart(layers, Axis(_DISTANCES[swap.quantity], "log"), tuple(alone))] if swap.layers else []
    return [_end_to_end(swap, styles)._replace(title=head), *second]


def _end_to_end(swap: Swap, styles: dict[str, dict[str, Any]]) -> Chart:
    """One line for each backend up to its mean."""
    rows = swap.changed[:_MOST_ROWS]
    limits = (rows[0][0] / _MARGIN, rows[-1][0] * _MARGIN) if rows else None
    series, names = [], {}
    for height, (mean, row) in enumerate(rows):
        # The line style of a name is the one of the other chart.
        style, start = styles[row.label], limits[0] if limits else mean
        series += [
            Series("", (start, mean), (height, height), {**style, "marker": ""}),
            Series("", (mean,), (height,), {**style, "linestyle": "none", "markersize": 8, "clip_on": False}),
        ]
        names[height - _ABOVE_LINE] = row.label
    x = Axis(f"{_DISTANCES[swap.quantity]}, all layers replaced", "log", limits=limits)
    y = Axis(ticks=names, limits=(len(rows) - 0.4, -0.9), inside=True)
    return Chart(x, y, tuple(series), height=_ROW_INCHES * len(rows))
