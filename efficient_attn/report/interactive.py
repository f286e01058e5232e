"""Plots for a browser, drawn by plotly from the declarations of the static plots."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import zip_longest
from textwrap import wrap
from typing import Any, NamedTuple

from efficient_attn.measure.units import show_seconds
from efficient_attn.measure.variants import YARDSTICK
from efficient_attn.report.figures import GRID, INK, MUTED, Axis, Chart, Plot, Series
from efficient_attn.report.table import plain, short
from efficient_attn.report.text import three_digits

PAGE = "interactive.html"

# Letters of a line on hover and of a name in the legend, and powers of two, that a telephone has room for.
_HOVER_LETTERS, _LEGEND_LETTERS, _POWERS = 38, 40, 8
# Without plotly's toolbar, which covers the buttons on a telephone.
_CONFIG = {"displayModeBar": False, "responsive": True}
_LAYOUT: dict[str, Any] = {
    **{"template": "none", "hovermode": "closest", "font": {"family": "system-ui, sans-serif", "color": INK}},
    **{"font_size": 13, "hoverlabel_align": "left", "hoverlabel_bgcolor": "white", "margin_r": 14},
    **{"margin_l": 10, "margin_b": 10, "legend_orientation": "h", "legend_yref": "container"},
    **{"legend_xref": "container", "legend_x": 0, "legend_y": 0, "legend_yanchor": "bottom"},
}
_AXIS = {"automargin": True, "gridcolor": GRID, "zeroline": False, "linecolor": MUTED, "ticks": "outside"}
_ABOVE: dict[str, Any] = {"y": 1, "yanchor": "bottom", "pad": {"t": 0, "b": 8}}


class _Point(NamedTuple):
    x: Any
    y: Any = None
    low: Any = None
    high: Any = None
    status: str = ""


def sections(plots: Collection[Plot]) -> list[tuple[Plot, list[Any]]]:
    """Plots and their charts in HTML, after errors against times where both were measured."""
    # Each chart by the positions of its slider.
    parts = [(plot, [{"": chart} for chart in plot.charts]) for plot in plots]
    if sliders := list(filter(None, _trade_offs(plots))):
        parts.insert(0, (Plot("Error against time", "vertical line: exact attention", ()), sliders))
    drawn = []
    for number, (plot, groups) in enumerate(parts):
        # Areas are drawn by matplotlib alone.
        texts = (text for text in re.split("; |\n", plot.conditions) if not text.startswith("shaded"))
        plot = plot._replace(conditions="; ".join(filter(None, texts)))
        ids = (f"chart-{number}-{place}" for place in range(len(groups)))
        drawn.append((plot, [_drawing(group, next(ids)) for group in groups]))
    return drawn


def _points(line: Series) -> list[_Point]:
    columns = zip_longest(line.x, line.y, line.low, line.high, line.hints)
    return [_Point(*point[:4], "measured" if point[4] is None else point[4]) for point in columns]


def _around(values: Iterable[float | None]) -> tuple[float, float]:
    numbers = [value for value in values if value is not None]
    return min(numbers, default=1.0) / 1.5, max(numbers, default=1.0) * 1.5


def _trade_offs(plots: Collection[Plot]) -> Iterator[dict[str, Chart]]:
    """Charts of errors against times, each as {length: chart}."""
    times = [chart for plot in plots for chart in plot.charts if chart.y.show is show_seconds]
    for row in (row for plot in plots for row in plot.rows):
        # Times of the same row have the shape of its errors.
        time = next((chart for chart in [*row, *times] if chart in times), None)
        for errors in filter(None, row):
            if time and "error" in errors.y.label and errors.x.label == time.x.label:
                yield _trade_off(time, errors)


def _trade_off(time: Chart, errors: Chart) -> dict[str, Chart]:
    times = {line.label: {point.x: point for point in _points(line)} for line in time.drawable().series}
    lines = {line.label: line for line in errors.series if line.label in times and line.label != YARDSTICK}
    lengths = sorted({x for label, line in lines.items() for x in line.x if x in times[label]})
    # All lengths share their axes.
    costs = (times[label][x].y for label in lines for x in lengths if x in times[label])
    x_axis = time.y._replace(label="time of one call", limits=_around(costs))
    values = (y for line in errors.series for y in line.y if errors.y.holds(y))
    y_axis = errors.y._replace(limits=_around(values))
    notes = (*time.notes, *(f"{tokens:.0f} tokens" for tokens in lengths if len(lengths) == 1))
    charts = {}
    for tokens in lengths:
        series = [line for line in errors.series if not len(line.x)]
        for label, line in lines.items():
            seconds = times[label].get(tokens, _Point(tokens))
            error = next((point for point in _points(line) if point.x == tokens), _Point(tokens))
            hint = f"{error.status}; time{_interval(time.y, seconds)}"
            # A logarithmic axis cannot hold 0: a line that lacks this length has no point.
            x = seconds.y if seconds.y and error.status else 0.0
            series.append(line._replace(x=(x,), y=(error.y,), low=(), high=(), hints=(hint,)))
        if tokens in times.get(YARDSTICK, ()):
            style = {"color": INK, "marker": "", "linewidth": 1.5}
            series.append(Series(YARDSTICK, (times[YARDSTICK][tokens].y,), (), style))
        charts[f"{tokens:.0f}"] = Chart(x_axis, y_axis, tuple(series), errors.title, notes)
    return charts


def _drawing(charts: Mapping[str, Chart], name: str) -> dict[str, Any]:
    """Title, HTML and number of names of a chart, or of several under a slider at the last one."""
    from plotly.graph_objects import Figure

    chart, steps = list(charts.values())[-1], [_traces(step) for step in charts.values()]
    across, upwards = ([value for trace in steps[-1] for value in trace[name] if value] for name in "xy")
    layout = {
        **{**_LAYOUT, "showlegend": True, "margin_t": 44},
        **{"xaxis": _axis(chart.x, across), "yaxis": _axis(chart.y, upwards)},
    }
    if len(charts) > 1:
        moved = [{name: [line[name] for line in step] for name in ("x", "y", "hovertext")} for step in steps]
        states = [
            {"label": length, "method": "restyle", "args": [step]}
            for length, step in zip(charts, moved, strict=True)
        ]
        slider = {**_ABOVE, "steps": states, "active": len(states) - 1, "x": 0.45, "len": 0.55, "ticklen": 0}
        layout |= {"sliders": [{**slider, "currentvalue": {"prefix": "tokens: "}}], "margin_t": 80}
    figure = Figure(steps[-1]).update_layout(**layout)
    html = figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG, div_id=name)
    title = "; ".join(filter(None, (chart.title, *chart.notes)))
    return {"title": title, "html": html, "names": sum(line["showlegend"] for line in steps[-1])}


def _interval(axis: Axis, point: _Point) -> str:
    """` (11 ms to 13 ms)`, or nothing without an interval."""
    if point.low is None or point.high is None or point.low == point.high:
        return ""
    return f" ({axis.show(point.low)} to {axis.show(point.high)})"


def _traces(chart: Chart) -> list[dict[str, Any]]:
    """Each line, and crosses at the lower edge for its points that were not measured."""
    complete = [line for line in chart.series if len(line.x) and len(line.y)]
    drawn = [point for line in complete for point in _points(line) if chart.x.holds(point.x)]
    across = sorted({point.x for point in drawn}) or chart.x.limits or (0, 1)
    upwards = chart.y.limits or _around(point.y for point in drawn if chart.y.holds(point.y))
    shared = {x for line in complete if line.label != YARDSTICK for x in line.x}
    baseline = [point for line in complete if line.label == YARDSTICK for point in _points(line)]
    base = {point.x: point.y for point in baseline if chart.y.holds(point.y) and point.x in shared}
    traces: list[dict[str, Any]] = []
    for number, line in enumerate(chart.series):
        points = _points(line)
        if line not in complete:
            points = [_Point(x, line.y[0]) for x in across] if len(line.y) else []
            points = points or [_Point(line.x[0], y) for y in upwards]
        x = [point.x for point in points]
        y = [point.y if chart.x.holds(point.x) and chart.y.holds(point.y) else None for point in points]
        texts = [_hover(chart, line, point, base) for point in points]
        group = {"legendgroup": line.label or str(number), "hoverinfo": "text"}
        trace = {
            **{"name": _text(line.label), "showlegend": bool(line.label), "hovertext": texts},
            **{"x": x, "y": y, "connectgaps": True, **group, **_look(line, number)},
        }
        off = [n for n, value in enumerate(y) if value is None and chart.x.holds(x[n])]
        marks = {"symbol": "x-thin-open", "color": line.style.get("color", INK), "size": 8}
        lost = {
            **{"x": [x[n] for n in off], "y": [upwards[0]] * len(off), "hovertext": [texts[n] for n in off]},
            **{**group, "mode": "markers", "marker": marks, "showlegend": False},
        }
        traces += [trace, lost]
    return traces


def _hover(chart: Chart, line: Series, point: _Point, base: Mapping[Any, Any]) -> str:
    """Label, place, value with its interval and ratio to exact attention, and status of a point."""
    lines = [line.label, ": ".join(filter(None, (chart.x.label, _shown(chart.x, point.x))))]
    if point.y is not None:
        value = f"{_shown(chart.y, point.y)}{_interval(chart.y, point)}"
        lines.append(": ".join(filter(None, (chart.y.label, value))))
        lines += [f"{three_digits(point.y / base[point.x])}× exact"] if point.x in base else []
    wrapped = [part for text in (*lines, point.status) for part in wrap(plain(text), _HOVER_LETTERS)]
    return "<br>".join(map(escape, wrapped))


def _shown(axis: Axis, value: float) -> str:
    return axis.ticks[value] if isinstance(axis.ticks, Mapping) and value in axis.ticks else axis.show(value)


def _text(text: str) -> str:
    return escape(plain(short(text, _LEGEND_LETTERS)))


def _look(line: Series, number: int) -> dict[str, Any]:
    """Mode, stroke and markers of plotly from a style of matplotlib; symbols count the lines."""
    stroke, colour = line.style.get("linestyle", "-"), line.style.get("color", INK)
    modes = ["lines"] * (stroke != "none" and len(line.x) != 1) + ["markers"] * bool(line.style.get("marker"))
    return {
        "mode": "+".join(modes) or "lines",
        "line": {"color": colour, "dash": "solid" if stroke in ("-", "none") else "dash"},
        "marker": {"symbol": number, "size": 8, "color": line.style.get("markerfacecolor", colour)},
    }


def _axis(axis: Axis, values: Sequence[float]) -> dict[str, Any]:
    """Axis of plotly, which chooses the ticks unless they are places or powers of two."""
    unit, ticks, log = axis.show(1.0).lstrip("1").strip(), axis.ticks, axis.scale != "linear"
    low, high = axis.limits or (min(values, default=1.0), max(values, default=1.0))
    if axis.scale == "log2" and not ticks:
        powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        ticks = [2.0**power for power in powers[:: -(-len(powers) // _POWERS)]]
    if not isinstance(ticks, Mapping):
        ticks = {tick: axis.show(tick) for tick in sorted(ticks)}
    marks = {"tickvals": list(ticks), "ticktext": list(map(_text, ticks.values())), "tickmode": "array"}
    shown = {
        **{**_AXIS, "type": "log" if log else "linear", "title": {"text": _text(axis.label)}},
        **{"tickformat": "~s" if unit.isalpha() else "~g", "ticksuffix": unit, **(marks if ticks else {})},
    }
    if axis.limits:
        low, high = (math.log10(end) if log else end for end in axis.limits)
        # Room for markers at the ends.
        shown["range"] = [low - 0.03 * (high - low), high + 0.03 * (high - low)]
    return shown
