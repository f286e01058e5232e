"""Plots for a browser, drawn by plotly from the declarations of the static plots."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from html import escape
from itertools import zip_longest
from textwrap import wrap
from typing import Any, NamedTuple

from efficient_attn.measure.variants import YARDSTICK
from efficient_attn.report.figures import GRID, INK, MUTED, Axis, Chart, Plot, Series
from efficient_attn.report.table import plain, short
from efficient_attn.report.text import three_digits

PAGE = "interactive.html"

# Letters of a line on hover and of a name in the legend, and ticks, that a telephone has room for.
_HOVER_LETTERS, _LEGEND_LETTERS, _TICKS_ACROSS, _TICKS_UPWARDS = 38, 40, 5, 11
# Height of a row of points off the axis, as a share of the chart.
_ROW_SHARE = 0.035
# Names of matplotlib's markers, and of fillings that are not full.
_SYMBOLS = {
    **{"o": "circle", "s": "square", "^": "triangle-up", "v": "triangle-down", "<": "triangle-left"},
    **{">": "triangle-right", "D": "diamond", "d": "diamond-tall", "P": "cross", "X": "x", "*": "star"},
    **{"p": "pentagon", "h": "hexagon", "H": "hexagon2", "8": "octagon"},
}
_FILLS = {"none": "-open", "left": "-dot", "bottom": "-open-dot"}
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
_BUTTONS = {**_ABOVE, "type": "buttons", "direction": "right"}


class _Point(NamedTuple):
    x: Any
    y: Any = None
    low: Any = None
    high: Any = None
    status: str = ""


def sections(plots: Collection[Plot]) -> list[tuple[Plot, list[Any]]]:
    """Plots and their charts in HTML."""
    drawn = []
    for number, plot in enumerate(plots):
        # Areas are drawn by matplotlib alone.
        texts = (text for text in re.split("; |\n", plot.conditions) if not text.startswith("shaded"))
        plot = plot._replace(conditions="; ".join(filter(None, texts)))
        charts = [_drawing(x, f"chart-{number}-{place}") for place, x in enumerate(plot.charts)]
        drawn.append((plot, charts))
    return drawn


def _points(line: Series) -> list[_Point]:
    columns = zip_longest(line.x, line.y, line.low, line.high, line.hints)
    return [_Point(*point[:4], "measured" if point[4] is None else point[4]) for point in columns]


def _drawing(chart: Chart, name: str) -> dict[str, Any]:
    """Title, HTML and number of names of a chart."""
    from plotly.graph_objects import Figure

    rows: dict[str, int] = {}
    # Without points off the axis there is no axis for them.
    traces = [trace for trace in _traces(chart, rows) if rows or "yaxis" not in trace]
    lines = [trace for trace in traces if "yaxis" not in trace]
    across, upwards = ([value for line in lines for value in line[name] if value] for name in ("x", "y"))
    x_axis, y_axis = _axis(chart.x, across, _TICKS_ACROSS), _axis(chart.y, upwards, _TICKS_UPWARDS)
    layout = {**_LAYOUT, "showlegend": True, "margin_t": 44, "xaxis": x_axis, "yaxis": y_axis}
    if rows:
        strip, last = _ROW_SHARE * len(rows), len(rows) - 1
        ticks = {"tickvals": [last / 2], "ticktext": ["off axis"], "ticks": "", "showgrid": False}
        ends = {"domain": [0, strip], "range": [-0.5, last + 0.5], "fixedrange": True}
        layout |= {"yaxis2": {**_AXIS, **ticks, **ends}, "yaxis_domain": [strip + 0.02, 1]}
        layout["xaxis_anchor"] = "y2"
    menus, ratios = [], [line.pop("relative") for line in lines]
    if chart.y.scale != "linear":
        kinds = {"log": "array", "linear": "auto"}
        states = [
            _state(kind, "relayout", {"yaxis.type": kind, "yaxis.tickmode": mode, "yaxis.autorange": True})
            for kind, mode in kinds.items()
        ]
        menus.append({**_BUTTONS, "buttons": states, "x": 0, "xanchor": "left"})
    if any(map(any, ratios)):
        ratio = Axis(scale=chart.y.scale, show="{:g}×".format)
        values = [value for line in ratios for value in line if value]
        views = {
            "absolute": (y_axis, [line["y"] for line in lines]),
            "vs exact": (_axis(ratio, values, _TICKS_UPWARDS), ratios),
        }
        places = [place for place, trace in enumerate(traces) if "yaxis" not in trace]
        states = []
        for label, (axis, y) in views.items():
            ticks = {f"yaxis.{name}": axis[name] for name in axis if name.startswith("tick")}
            shown = {"y": y, "error_y.visible": axis is y_axis}
            states.append(_state(label, "update", shown, {**ticks, "yaxis.autorange": True}, places))
        menus.append({**_BUTTONS, "buttons": states, "x": 1, "xanchor": "right"})
    figure = Figure(traces).update_layout(**layout, updatemenus=menus)
    html = figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG, div_id=name)
    title = "; ".join(filter(None, (chart.title, *chart.notes)))
    return {"title": title, "html": html, "names": sum(line["showlegend"] for line in lines)}


def _state(label: str, method: str, *arguments: Any) -> dict[str, Any]:
    """Button of a menu."""
    return {"label": label, "method": method, "args": list(arguments)}


def _traces(chart: Chart, rows: dict[str, int]) -> list[dict[str, Any]]:
    """Each line, and its points off the axis of values in a row, which is added to `rows`."""
    complete = [line for line in chart.series if len(line.x) and len(line.y)]
    drawn = [point for line in complete for point in _points(line) if chart.x.holds(point.x)]
    across = sorted({point.x for point in drawn}) or chart.x.limits or (0, 1)
    values = [point.y for point in drawn if chart.y.holds(point.y)]
    upwards = chart.y.limits or (min(values, default=1.0) / 1.5, max(values, default=1.0) * 1.5)
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
            **{"x": x, "y": y, "connectgaps": True, **group, **_look(line)},
            "relative": [value and base.get(x) and value / base[x] for x, value in zip(x, y, strict=True)],
        }
        if any(point.low is not None for point in points):
            above = [point.high and point.high - point.y for point in points]
            below = [point.low and point.y - point.low for point in points]
            trace["error_y"] = {"array": above, "arrayminus": below, "symmetric": False, "thickness": 1}
        off = [n for n, value in enumerate(y) if value is None and chart.x.holds(x[n])]
        row = rows.setdefault(line.label, len(rows)) if off else 0
        marks = {"symbol": "x-thin-open", "color": line.style.get("color", INK), "size": 8}
        lost: dict[str, Any] = {
            "x": [x[n] for n in off],
            "y": [row] * len(off),
            "hovertext": [texts[n] for n in off],
        }
        lost |= {**group, "yaxis": "y2", "mode": "markers", "marker": marks, "showlegend": False}
        traces += [trace, lost]
    return traces


def _hover(chart: Chart, line: Series, point: _Point, base: Mapping[Any, Any]) -> str:
    """Label, place, value with its interval and ratio to exact attention, and status of a point."""
    lines = [line.label, ": ".join(filter(None, (chart.x.label, _shown(chart.x, point.x))))]
    if point.y is not None:
        value = _shown(chart.y, point.y)
        if point.low is not None and point.high is not None and point.low != point.high:
            value += f" ({chart.y.show(point.low)} to {chart.y.show(point.high)})"
        lines.append(": ".join(filter(None, (chart.y.label, value))))
        lines += [f"{three_digits(point.y / base[point.x])}× exact"] if point.x in base else []
    wrapped = [part for text in (*lines, point.status) for part in wrap(plain(text), _HOVER_LETTERS)]
    return "<br>".join(map(escape, wrapped))


def _shown(axis: Axis, value: float) -> str:
    return axis.ticks[value] if isinstance(axis.ticks, Mapping) and value in axis.ticks else axis.show(value)


def _text(text: str) -> str:
    return escape(plain(short(text, _LEGEND_LETTERS)))


def _look(line: Series) -> dict[str, Any]:
    """Mode, stroke and markers of plotly, with the symbols of the static plots."""
    style = line.style
    colour, stroke, marked = style.get("color", INK), style.get("linestyle", "-"), bool(style.get("marker"))
    drawn = not marked or (stroke != "none" and len(line.x) != 1)
    dash = "solid" if stroke in ("-", "none") else "dash"
    edge = {"color": colour, "width": 1.5}
    symbol = _SYMBOLS.get(style.get("marker", ""), "circle") + _FILLS.get(style.get("fillstyle", ""), "")
    marker = {"symbol": symbol, "size": 8, "line": edge, "color": colour}
    return {
        "mode": "+".join(["lines"] * drawn + ["markers"] * marked),
        "line": {"color": colour, "width": style.get("linewidth", 1.5), "dash": dash},
        "marker": marker if marked else {},
    }


def _axis(axis: Axis, values: Sequence[float], most: int) -> dict[str, Any]:
    """Axis of plotly, with at most `most` ticks if it is logarithmic."""
    unit, ticks, log = axis.show(1.0).lstrip("1").strip(), axis.ticks, axis.scale != "linear"
    low, high = axis.limits or (min(values, default=1.0), max(values, default=1.0))
    if log and not ticks:
        ticks = _log_ticks(low, high, 2 if axis.scale == "log2" else 10, most)
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


def _log_ticks(low: float, high: float, base: int, most: int) -> list[float]:
    """Powers of the base, with steps between them where there is room."""
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    ticks: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)) if base == 10 else ((1,),):
        ticks = [step * float(base) ** power for power in powers for step in steps]
        ticks = [tick for tick in ticks if low / 1.5 <= tick <= high * 1.5]
        if len(ticks) <= most:
            return ticks
    return ticks[:: -(-len(ticks) // most)]
