"""Figure of an advice without a model: time and error against the sequence length."""

import math
from collections.abc import Sequence

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import DENSE, MEAN_OF_VALUES, YARDSTICK
from efficient_attn.report.figures import (
    UNIFORM_STYLE,
    Axis,
    Chart,
    Plot,
    Series,
    baseline_style,
    line_styles,
)
from efficient_attn.report.text import show_error
from efficient_attn.stats.estimates import RUN_SHIFT
from efficient_attn.studies.advise.attention_view import Row, by_shape, rows_of
from efficient_attn.studies.bench.plot import HIGHEST, MARKS, cost_plot


def advice_plot(records: Sequence[Record], max_error: float) -> Plot:
    """For each shape times of calls, and errors of the worst layer: two charts, with one legend for all."""
    plots = []
    for group in by_shape(records):
        times = [one for one in group if one.case.kind == "time" and one.status == "ok"]
        if times:
            plots.append(_plot(times, rows_of(group), max_error))
    if len(plots) == 1:
        return plots[0]
    rows = []
    for plot in plots:
        first, *others = plot.rows[0]
        assert first is not None
        rows.append((first._replace(notes=(plot.conditions.partition(";")[0],)), *others))
    conditions = f"median with its 95 % interval, with a shift of {RUN_SHIFT:.0%} between runs"
    return plots[0]._replace(conditions=conditions, rows=tuple(rows))


def _plot(times: Sequence[Record], rows: Sequence[Row], max_error: float) -> Plot:
    plot = cost_plot(times)
    errors = [row for row in rows if row.errors and row.backend not in (YARDSTICK, DENSE)]
    if len(plot.charts) != 1 or not errors:
        return plot
    # One style in both charts, also for backends that were not timed.
    styles = line_styles([(row.label, row.backend) for row in rows if row.backend != MEAN_OF_VALUES])
    styles[MEAN_OF_VALUES] = UNIFORM_STYLE
    series = [
        Series(
            row.label,
            tuple(tokens for tokens, _ in row.errors),
            tuple(min(max(found), HIGHEST) for found in row.errors.values()),
            styles[row.label],
        )
        for row in errors
    ]
    series.append(Series(f"{100 * max_error:g} % of exact", (), (max_error,), baseline_style()))
    beyond = {HIGHEST: "higher"} if any(HIGHEST in one.y for one in series) else {}
    lowest = min(y or 0.0 for one in series for y in one.y)
    # A mark just below the word leaves no room for it.
    marks = {mark: f"{mark:g}" for mark in MARKS if lowest <= mark and not (beyond and 2 * mark > HIGHEST)}
    chart = Chart(
        Axis(
            "sequence length, tokens", "log2", "{:.0f}".format, sorted({n for one in series for n in one.x})
        ),
        Axis("relative output error, worst layer", "log", show_error, {**marks, **beyond}),
        tuple(series),
    )
    time = plot.charts[0]
    # Ticks at doublings, without the short calls between them.
    doublings = [tokens for tokens in time.x.ticks if math.log2(tokens).is_integer()]
    timed = tuple(one._replace(style=styles[one.label]) for one in time.series)
    time = time._replace(x=time.x._replace(ticks=doublings or time.x.ticks), series=timed)
    return plot._replace(title="Time and error of attention alone", rows=((time, chart),))
