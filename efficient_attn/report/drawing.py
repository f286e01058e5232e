"""Figures drawn with matplotlib, and their bytes as PNG, SVG and PDF."""

import io
import math
from collections.abc import Mapping, Sequence
from functools import partial
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.report.figures import GRID, INK, MUTED, Axis, Chart, Plot, Series
from efficient_attn.report.table import plain, short

# Wide enough for two charts side by side, and narrow enough for a phone.
WIDTH_INCHES = 6.0
_SMALLEST_WIDTH, _LARGEST_WIDTH = 2.0, 40.0
# A chart narrower than this moves to a row of its own.
_SMALLEST_CHART = 2.4
# Height of axes over the width of a chart alone in its row, and of a chart among others.
_ALONE, _BESIDE = 0.46, 0.68
# Share of a chart's width that its axes take, next to the texts of ticks.
_AXES_SHARE = 0.78

_LONGEST_NAME, _LONGEST_TEXT = 48, 240
_POINT = 1 / 72
# Largest share of the width for names at the ends of lines, and steps that move them apart.
_NAMES_SHARE, _STEPS_APART = 0.34, 200
# Width of a letter, of the line before a name in a legend, and height of a line of text, in letters' heights.
_LETTER, _HANDLE, _LINE = 0.56, 4.7, 1.35

_DOTS_PER_INCH, _DOTS_PER_INCH_OF_A_NOTEBOOK = 200, 100


class Style(NamedTuple):
    """Sizes of letters in points, and whether the figure has a title."""

    title: float
    text: float
    small: float
    titled: bool = True


STYLES = {"screen": Style(11.5, 10.0, 9.0), "paper": Style(8.0, 8.0, 7.0, titled=False)}


def draw(
    plot: Plot,
    *,
    width: float | None = None,
    style: str = "screen",
    labels: Mapping[str, str] | None = None,
    ax: Any = None,
) -> list[Any]:
    """Draw the charts on a figure outside of pyplot.

    Args:
        ax: Axes for the only chart, instead of a new figure.

    Raises:
        OptionError: `ax` with several charts, an unknown style, or a width out of range.
    """
    from matplotlib import rc_context

    if style not in STYLES:
        raise UnknownNameError("style", style, STYLES)
    sizes = STYLES[style]
    plot = plot.drawable(labels or {})
    if ax is not None:
        if len(plot.charts) != 1:
            raise OptionError(f"ax is for one chart, and this plot has {len(plot.charts)}: leave it out.")
        _draw_chart(ax, plot.charts[0], ax.bbox.width / ax.figure.dpi, ax.bbox.height / ax.figure.dpi, sizes)
        return [ax]
    width = WIDTH_INCHES if width is None else width
    if not _SMALLEST_WIDTH <= width <= _LARGEST_WIDTH:
        raise OptionError(
            f"width is {_SMALLEST_WIDTH:g} to {_LARGEST_WIDTH:g} inches, not {width:g}; a column of a paper "
            "is about 3.3."
        )
    with rc_context(_settings(sizes)):
        return _draw_figure(plot, width, sizes)


def _draw_figure(plot: Plot, width: float, sizes: Style) -> list[Any]:
    from matplotlib.figure import Figure

    # Charts that would be too narrow stand in rows of their own.
    rows = [
        part
        for row in plot.rows
        for part in ([row] if width / len(row) >= _SMALLEST_CHART else [(chart,) for chart in row if chart])
    ]
    heights = [_row_height(row, width, sizes) for row in rows]
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    columns = math.lcm(*map(len, rows))
    named_lines = plot.legend and all(_names_fit(row, width, sizes) for row in rows)
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    axes = []
    for number, row in enumerate(rows):
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
            names = _names_inches(chart, sizes) if named_lines else 0
            _draw_chart(
                ax, chart, _AXES_SHARE * width / len(row) - names, _axes_height(row, chart, width), sizes
            )
            if named_lines:
                _name_lines(ax, chart, _axes_height(row, chart, width), sizes)
            axes.append(ax)
    lines = _write_texts(figure, plot._replace(legend=plot.legend and not named_lines), sizes)
    figure.set_figheight(sum(heights) + lines * _LINE * sizes.small * _POINT)
    # The layout takes as long as drawing: it is found once for all files.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    # Notebooks show figures of pyplot only, unless an object draws itself.
    to_notebook = partial(to_bytes, figure, "png", salt="", dots_per_inch=_DOTS_PER_INCH_OF_A_NOTEBOOK)
    vars(figure)["_repr_png_"] = to_notebook
    return axes


def _settings(sizes: Style) -> dict[Any, Any]:
    """Settings of matplotlib: small quiet axes, texts without mathematics."""
    ink = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    small = ("xtick.labelsize", "ytick.labelsize", "legend.fontsize", "legend.title_fontsize")
    return {
        **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), sizes.text),
        **dict.fromkeys(small, sizes.small),
        **dict.fromkeys(ink, INK),
        **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 3.0),
        **dict.fromkeys(("xtick.minor.size", "ytick.minor.size"), 0.0),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False),
        **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
        "axes.edgecolor": MUTED,
        "axes.grid.axis": "y",
        "axes.titlelocation": "left",
        "figure.constrained_layout.h_pad": 0.06,
        "figure.titlesize": sizes.title,
        "figure.titleweight": "bold",
        "font.family": "sans-serif",
        "grid.color": GRID,
        "legend.labelspacing": 0.35,
    }


def _axes_height(row: Sequence[Chart | None], chart: Chart, width: float) -> float:
    return chart.height or (_ALONE if len(row) == 1 else _BESIDE) * width / len(row)


def _row_height(row: Sequence[Chart | None], width: float, sizes: Style) -> float:
    """Height of a row with the texts above and below its axes."""
    inches = _AXES_SHARE * width / len(row)
    heights = []
    for chart in filter(None, row):
        texts = (chart.title, *chart.notes, chart.x.label)
        lines = sum(_wrapped(text, inches, sizes.text).count("\n") + bool(text) for text in texts) + 2
        heights.append(lines * _LINE * sizes.text * _POINT + _axes_height(row, chart, width))
    return max(heights)


def _write_texts(figure: Any, plot: Plot, sizes: Style) -> int:
    """Write the title, and a legend under the conditions, and count their lines."""
    from matplotlib.lines import Line2D

    width, title, conditions = figure.get_figwidth(), "", ""
    if sizes.titled:
        title = _wrapped(plot.title, width, sizes.title)
        conditions = "\n".join(_wrapped(line, width, sizes.small) for line in plot.conditions.splitlines())
        figure.suptitle(title, x=0.01, ha="left")
    names = [plain(short(series.label, _LONGEST_NAME)) for series in plot.entries]
    handles = [Line2D([], [], **series.style) for series in plot.entries]
    longest = (max(map(len, names), default=0) * _LETTER + _HANDLE) * sizes.small * _POINT
    columns = min(max(int(width / longest), 1), max(len(names), 1))
    if names or conditions:
        legend = figure.legend(handles, names, loc="outside lower left", ncols=columns, title=conditions)
        legend.get_title().set_color(MUTED)
        legend.set_alignment("left")
    return sum(text.count("\n") + bool(text) for text in (title, conditions)) - (-len(names) // columns) + 1


def _wrapped(text: str, inches: float, size: float) -> str:
    """Escaped text in lines that fit."""
    return fill(short(plain(text), _LONGEST_TEXT), max(int(inches / (_LETTER * size * _POINT)), 10))


def _draw_chart(ax: Any, chart: Chart, width: float, height: float, sizes: Style) -> None:
    """Draw a chart on axes of about this size in inches."""
    for name, axis in (("x", chart.x), ("y", chart.y)):
        if axis.scale != "linear":
            ax.set(**{f"{name}scale": "log"})
        if axis.limits is not None:
            ax.set(**{f"{name}lim": axis.limits})
    for number, series in enumerate(chart.series):
        style: dict[str, Any] = {"zorder": 2 + number / 1000, "label": plain(series.label) or "_"}
        if chart.apart and len(series.x) > 2 and not series.bars:
            # Every second marker, so that lines on top of each other show both.
            style["markevery"] = (number % 2, 2)
        _draw_series(ax, series, {**series.style, **style})
    low, high = ax.get_xlim()
    if chart.x.scale != "linear" and high < low * (1 + 1e-9) and chart.x.limits is None:
        # matplotlib rounds the place of a single error bar to two, between which there is no room.
        ax.set_xlim(low / 3, high * 3)
    _label_axis(ax.xaxis, chart.x, width, sizes, across=True)
    _label_axis(ax.yaxis, chart.y, height, sizes, across=False)
    lines = [_wrapped(line, width, sizes.text) for line in (chart.title, *chart.notes) if line]
    ax.set_title("\n".join(lines))
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


def _names_fit(row: Sequence[Chart | None], width: float, sizes: Style) -> bool:
    """Whether the names of lines can stand at their right ends, in place of a legend."""
    (chart, *others) = row
    if others or chart is None or chart.draw is not None or not chart.series:
        return False
    ends = {line.x[-1] for line in chart.series if len(line.x)}
    room = _axes_height(row, chart, width) / (_LINE * sizes.small * _POINT)
    wide = _names_inches(chart, sizes) > _NAMES_SHARE * width
    crossed = any(not len(line.y) for line in chart.series)
    return len(ends) == 1 and not crossed and len(chart.series) <= room and not wide


def _names_inches(chart: Chart, sizes: Style) -> float:
    longest = max((len(plain(short(line.label, _LONGEST_NAME))) for line in chart.series), default=0)
    return longest * _LETTER * sizes.small * _POINT


def _name_lines(ax: Any, chart: Chart, height: float, sizes: Style) -> None:
    """Write each line's name at its right end, apart from the others."""
    to_axes = ax.transScale + ax.transLimits
    lines = [line for line in chart.series if line.label]
    ends = np.array([to_axes.transform((ax.get_xlim()[1], line.y[-1]))[1] for line in lines])
    order, gap = np.argsort(ends, kind="stable"), _LINE * sizes.small * _POINT / height
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
            xy=(line.x[-1] if len(line.x) else ax.get_xlim()[1], line.y[-1]),
            xytext=(1.03, place),
            textcoords="axes fraction",
            va="center",
            color=colour,
            fontsize=sizes.small,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 5},
            annotation_clip=False,
        )


def _label_axis(axis: Any, spec: Axis, inches: float, sizes: Style, *, across: bool) -> None:
    """Write the label and as many ticks as fit."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axis.set_label_text(_wrapped(spec.label, inches, sizes.text))
    if isinstance(spec.ticks, Mapping):
        _name_ticks(axis, spec, inches, sizes, across=across)
        return
    axis.set_major_formatter(FuncFormatter(lambda value, _: spec.show(value)))
    if spec.scale == "linear" and not spec.ticks:
        return
    low, high = sorted(getattr(axis.axes, f"get_{axis.axis_name}lim")())
    ticks, base = sorted(spec.ticks), 2 if spec.scale == "log2" else 10
    letter = _LETTER * sizes.small * _POINT
    for steps in [(1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)] if base == 10 else [(1,)]:
        if not spec.ticks:
            marks = LogLocator(base, steps, numticks=1000).tick_values(low, high)
            ticks = [tick for tick in marks if low <= tick <= high] or [low, high]
        longest = max((len(spec.show(tick)) for tick in ticks), default=1) + 1.2
        places = (
            inches
            * axis.get_transform().transform(ticks)
            / np.ptp(axis.get_transform().transform([low, high]))
        )
        gap = longest * letter if across else 2.4 * letter
        shown: list[int] = []
        for index in reversed(range(len(ticks))):
            if not shown or places[shown[-1]] - places[index] >= gap:
                shown.append(index)
        if len(shown) == len(ticks):
            break
    axis.set_major_locator(FixedLocator([ticks[index] for index in reversed(shown)]))
    axis.set_minor_locator(NullLocator())


def _name_ticks(axis: Any, spec: Axis, inches: float, sizes: Style, *, across: bool) -> None:
    """Write texts at ticks, upright below a narrow chart."""
    assert isinstance(spec.ticks, Mapping)
    texts = {tick: plain(short(text, _LONGEST_NAME)) for tick, text in spec.ticks.items()}
    letters = sum(len(text) + 1 for text in texts.values())
    upright = across and letters * _LETTER * sizes.small * _POINT > inches
    most = inches / (_LINE * sizes.small * _POINT) if upright or not across else len(texts)
    ticks = list(texts)[:: -max(math.ceil(len(texts) / max(most, 1)), 1)][::-1]
    axis.set_ticks(ticks, [texts[tick] for tick in ticks], rotation=90 if upright else 0)
    if spec.inside:
        axis.set_tick_params(pad=-4, length=0)
        axis.axes.grid(visible=False)
        axis.axes.grid(axis="x")
        for label in axis.get_ticklabels():
            label.set_ha("left")


def to_bytes(figure: Any, kind: str, *, salt: str, dots_per_inch: int = _DOTS_PER_INCH) -> bytes:
    """Bytes of a figure as png, svg or pdf, equal for equal figures.

    Args:
        salt: Seed of the names of an SVG's parts.
    """
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
