"""Figures drawn with matplotlib, and their bytes as PNG, SVG and PDF."""

import io
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from textwrap import fill
from typing import Any

import numpy as np

from efficient_attn.errors import OptionError
from efficient_attn.report.figures import GRID, INK, MUTED, Axis, Chart, Plot, Series
from efficient_attn.report.table import plain, short

# Wide enough for two charts side by side, and narrow enough for a phone.
WIDTH_INCHES = 6.0
# Sizes of letters in points: of titles, of axes, of ticks and names.
_TITLE, _TEXT, SMALL = 11.5, 10.0, 9.0
# Height of axes over the width of a chart alone in its row, and of a chart among others.
_ALONE, _BESIDE = 0.46, 0.68
# Share of a chart's width that its axes take, next to the texts of ticks.
_AXES_SHARE = 0.78

_LONGEST_NAME, _LONGEST_TEXT = 60, 240
_POINT = 1 / 72
# Width of a letter, of the line before a name in a legend, and height of a line of text, in letters' heights.
_LETTER, _HANDLE, _LINE = 0.56, 5.9, 1.35
# Multiples of powers of ten at ticks, the first that fit.
_STEPS = ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,))

# Largest share of the width for names at the ends of lines, and steps that move them apart.
_NAMES_SHARE, _STEPS_APART = 0.34, 200

_DOTS_PER_INCH, _DOTS_PER_INCH_OF_A_NOTEBOOK = 200, 100

_SETTINGS: dict[Any, Any] = {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), _TEXT),
    **dict.fromkeys(
        ("xtick.labelsize", "ytick.labelsize", "legend.fontsize", "legend.title_fontsize"), SMALL
    ),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 3.0),
    **dict.fromkeys(("xtick.minor.size", "ytick.minor.size"), 0.0),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "axes.edgecolor": MUTED,
    "axes.grid.axis": "y",
    "axes.titlelocation": "left",
    "figure.constrained_layout.h_pad": 0.06,
    "figure.titlesize": _TITLE,
    "figure.titleweight": "bold",
    "font.family": "sans-serif",
    "grid.color": GRID,
    "legend.labelspacing": 0.35,
}


def draw(plot: Plot, *, ax: Any = None) -> list[Any]:
    """Draw the charts on a figure outside of pyplot, or the only chart on `ax`."""
    from matplotlib import rc_context

    plot = plot.drawable()
    if ax is not None:
        if len(plot.charts) != 1:
            raise OptionError(f"ax is for one chart, and this plot has {len(plot.charts)}: leave it out.")
        (chart,), (width, height) = plot.charts, (ax.bbox.size / ax.figure.dpi).tolist()
        heading = "\n".join(_wrapped(line, width, _TEXT) for line in _heading_lines(chart))
        _draw_chart(ax, chart, width, height, heading)
        return [ax]
    with rc_context(_SETTINGS):
        return _draw_figure(plot)


def _draw_figure(plot: Plot) -> list[Any]:
    from matplotlib.figure import Figure

    heights = [max(_chart_height(row, column) for column in range(len(row))) for row in plot.rows]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights)), layout="constrained")
    columns = math.lcm(*map(len, plot.rows))
    grid = figure.add_gridspec(len(plot.rows), columns, height_ratios=heights)
    axes = []
    named_lines = all(map(_names_fit, plot.rows))
    for number, row in enumerate(plot.rows):
        span = columns // len(row)
        first: tuple[Any, Axis] | None = None
        for column, chart in enumerate(row):
            if chart is None:
                continue
            shared = first[0] if first and chart.y == first[1] else None
            ax = figure.add_subplot(grid[number, column * span : (column + 1) * span], sharey=shared)
            first = first or (ax, chart.y)
            if shared:
                chart = chart._replace(y=chart.y._replace(label=""))
                ax.tick_params(labelleft=False)
            height, names_inches = _axes_height(row, chart), _names_inches(chart) if named_lines else 0.0
            _draw_chart(ax, chart, _axes_width(row) - names_inches, height, _heading(row, column))
            if named_lines:
                _name_lines(ax, chart, height)
            axes.append(ax)
    lines = _write_texts(figure, plot, legend=not named_lines)
    figure.set_figheight(sum(heights) + lines * _LINE * SMALL * _POINT)
    # The layout takes as long as drawing: it is found once for all files.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    # Notebooks show figures of pyplot only, unless an object draws itself.
    to_notebook = partial(to_bytes, figure, "png", salt="", dots_per_inch=_DOTS_PER_INCH_OF_A_NOTEBOOK)
    vars(figure)["_repr_png_"] = to_notebook
    return axes


def _axes_width(row: Sequence[Chart | None]) -> float:
    return _AXES_SHARE * WIDTH_INCHES / len(row)


def _axes_height(row: Sequence[Chart | None], chart: Chart) -> float:
    return chart.height or (_ALONE if len(row) == 1 else _BESIDE) * WIDTH_INCHES / len(row)


def _chart_height(row: Sequence[Chart | None], column: int) -> float:
    """Height of a chart with the texts above and below its axes."""
    chart = row[column]
    if chart is None:
        return 0.0
    texts = [_heading(row, column), _wrapped(chart.x.label, _axes_width(row), _TEXT)]
    lines = sum(text.count("\n") + bool(text) for text in texts) + 2
    return lines * _LINE * _TEXT * _POINT + _axes_height(row, chart)


def _heading_lines(chart: Chart | None) -> list[str]:
    return [line for line in (chart.title, *chart.notes) if line] if chart else []


def _heading(row: Sequence[Chart | None], column: int) -> str:
    """Lines above a chart. They may reach over charts to its right that have none."""
    bare = takewhile(lambda chart: chart is not None and not _heading_lines(chart), row[column + 1 :])
    # The space between two charts is free too.
    inches = 1.05 * _axes_width(row) + sum(WIDTH_INCHES / len(row) for _ in bare)
    return "\n".join(_wrapped(line, inches, _TEXT) for line in _heading_lines(row[column]))


def _write_texts(figure: Any, plot: Plot, *, legend: bool) -> int:
    """Write the title, and a legend under the conditions, and count their lines."""
    from matplotlib.lines import Line2D

    title = _wrapped(plot.title, WIDTH_INCHES, _TITLE)
    conditions = "\n".join(_wrapped(line, WIDTH_INCHES, SMALL) for line in plot.conditions.splitlines())
    figure.suptitle(title, x=0.01, ha="left")
    series = [line for chart in plot.charts for line in chart.series] if legend else []
    styles = {line.label: line.style for line in series if line.label}
    names = [plain(short(label, _LONGEST_NAME)) for label in styles]
    handles = [Line2D([], [], **style) for style in styles.values()]
    longest = (max(map(len, names), default=0) * _LETTER + _HANDLE) * SMALL * _POINT
    columns = min(max(int(WIDTH_INCHES / longest), 1), max(len(names), 1))
    if names or conditions:
        place: dict[str, Any] = {"loc": "outside lower left", "ncols": columns, "handlelength": 3.2}
        texts = figure.legend(handles, names, title=conditions, **place)
        texts.get_title().set_color(MUTED)
        texts.set_alignment("left")
    return sum(text.count("\n") + bool(text) for text in (title, conditions)) - (-len(names) // columns) + 1


def _names_fit(row: Sequence[Chart | None]) -> bool:
    """Whether the names of lines fit at their right ends, in place of a legend."""
    (chart, *others) = row
    if others or chart is None or chart.draw is not None or not chart.series:
        return False
    ends = {line.x[-1] for line in chart.series if len(line.x)}
    room = _axes_height(row, chart) / (_LINE * SMALL * _POINT)
    narrow = _names_inches(chart) <= _NAMES_SHARE * WIDTH_INCHES
    drawn = all(len(line.y) for line in chart.series)
    return len(ends) == 1 and drawn and len(chart.series) <= room and narrow


def _names_inches(chart: Chart) -> float:
    longest = max((len(plain(short(line.label, _LONGEST_NAME))) for line in chart.series), default=0)
    return longest * _LETTER * SMALL * _POINT


def _name_lines(ax: Any, chart: Chart, height: float) -> None:
    """Write each line's name at its right end, apart from the others."""
    to_axes = ax.transScale + ax.transLimits
    lines = [line for line in chart.series if line.label]
    ends = np.array([to_axes.transform((ax.get_xlim()[1], line.y[-1]))[1] for line in lines])
    order, gap = np.argsort(ends, kind="stable"), _LINE * SMALL * _POINT / height
    places = ends[order]
    for _ in range(_STEPS_APART):
        close = np.clip(gap - np.diff(places), 0, None) / 2
        places[1:] += close
        places[:-1] -= close
        places = np.clip(places, 0, 1)
    for place, index in zip(places, order, strict=True):
        line, colour = lines[index], lines[index].style.get("color", INK)
        ax.annotate(
            plain(short(line.label, _LONGEST_NAME)),
            xy=(line.x[-1] if len(line.x) else ax.get_xlim()[1], np.clip(line.y[-1], *ax.get_ylim())),
            xytext=(1.03, place),
            textcoords="axes fraction",
            va="center",
            color=colour,
            fontsize=SMALL,
            arrowprops={
                **{"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 5},
                # From the left edge of the name, so that no line crosses another name.
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )


def _wrapped(text: str, inches: float, size: float) -> str:
    return fill(short(plain(text), _LONGEST_TEXT), max(int(inches / (_LETTER * size * _POINT)), 10))


def _draw_chart(ax: Any, chart: Chart, width: float, height: float, heading: str) -> None:
    """Draw a chart on axes of about `width` × `height` inches."""
    for name, axis in (("x", chart.x), ("y", chart.y)):
        if axis.scale != "linear":
            ax.set(**{f"{name}scale": "log"})
        if axis.limits is not None:
            ax.set(**{f"{name}lim": axis.limits})
    for number, series in enumerate(chart.series):
        style: dict[str, Any] = {"zorder": 2 + number / 1000, "label": plain(series.label) or "_"}
        _draw_series(ax, series, {**series.style, **style})
    low, high = ax.get_xlim()
    if chart.x.scale != "linear" and high < low * (1 + 1e-9) and chart.x.limits is None:
        # matplotlib rounds the place of a single error bar to two, between which there is no room.
        ax.set_xlim(low / 3, high * 3)
    _label_axis(ax.xaxis, chart.x, width, across=True)
    _label_axis(ax.yaxis, chart.y, height, across=False)
    ax.set_title(heading)
    if chart.draw is not None:
        chart.draw(ax)


def _draw_series(ax: Any, series: Series, style: Mapping[str, Any]) -> None:
    if not len(series.x):
        ax.axhline(series.y[0], **{**style, "marker": ""})
    elif not len(series.y):
        ax.axvline(series.x[0], **{**style, "marker": ""})
    else:
        y, low, high = (np.asarray(edge, dtype=float) for edge in (series.y, series.low, series.high))
        if series.bars:
            ax.errorbar(series.x, y, yerr=[y - low, high - y], elinewidth=1.0, capsize=2, **style)
            return
        ax.plot(series.x, y, **style)
        if len(low):
            ax.fill_between(series.x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _label_axis(axis: Any, spec: Axis, inches: float, *, across: bool) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axis.set_label_text(_wrapped(spec.label, inches, _TEXT))
    axis.set_minor_locator(NullLocator())
    if isinstance(spec.ticks, Mapping):
        _name_ticks(axis, spec, inches, across=across)
        return
    axis.set_major_formatter(FuncFormatter(lambda value, _: spec.show(value)))
    if spec.scale == "linear" and not spec.ticks:
        return
    low, high = sorted(axis.get_view_interval())
    place = axis.get_transform().transform
    base, candidates = (2, _STEPS[-1:]) if spec.scale == "log2" else (10, _STEPS)
    shown: list[float] = []
    for steps in candidates:
        marks = [] if spec.ticks else LogLocator(base, steps, numticks=1000).tick_values(low, high)
        ticks = sorted(spec.ticks) or [tick for tick in marks if low <= tick <= high] or [low, high]
        letters = max(len(spec.show(tick)) for tick in ticks) + 1.2 if across else 2.4
        gap = letters * _LETTER * SMALL * _POINT / inches * np.ptp(place([low, high]))
        shown = []
        for tick in reversed(ticks):
            if not shown or np.ptp(place([tick, shown[-1]])) >= gap:
                shown.append(tick)
        if len(shown) == len(ticks):
            break
    axis.set_major_locator(FixedLocator(shown[::-1]))


def _name_ticks(axis: Any, spec: Axis, inches: float, *, across: bool) -> None:
    """Write texts at ticks, upright below a narrow chart."""
    assert isinstance(spec.ticks, Mapping)
    texts = {tick: plain(short(text, _LONGEST_NAME)) for tick, text in spec.ticks.items()}
    letters = sum(len(text) + 1 for text in texts.values())
    upright = across and letters * _LETTER * SMALL * _POINT > inches
    most = inches / (_LINE * SMALL * _POINT) if upright or not across else len(texts)
    ticks = list(texts)[:: -max(math.ceil(len(texts) / max(most, 1)), 1)][::-1]
    axis.set_ticks(ticks, [texts[tick] for tick in ticks], rotation=90 if upright else 0)


def to_bytes(figure: Any, kind: str, *, salt: str, dots_per_inch: int = _DOTS_PER_INCH) -> bytes:
    """Bytes of a figure as png, svg or pdf, equal for equal figures. `salt` seeds an SVG's names."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure.set_dpi(dots_per_inch)
    file = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    # Letters stay text in an SVG, and fonts of a PDF are of the type that publishers accept.
    settings: Any = {"svg.hashsalt": salt, "svg.fonttype": "none", "pdf.fonttype": 42}
    canvases = {"png": FigureCanvasAgg, "pdf": FigureCanvasPdf, "svg": FigureCanvasSVG}
    with rc_context(settings):
        # `savefig` draws everything twice, at first for the layout.
        getattr(canvases[kind](figure), f"print_{kind}")(file, metadata=undated)
    return file.getvalue()
