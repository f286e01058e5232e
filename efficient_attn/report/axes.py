"""The drawing of figures with matplotlib: style, sizes, ticks, legends, intervals."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.report.escape import plain, short
from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.markers import move_apart
from efficient_attn.report.palette import GRID, INK, MUTED

# Wide enough for two charts side by side, and narrow enough for a phone.
WIDTH_INCHES = 6.0
_LEAST_WIDTH, _LARGEST_WIDTH = 2.0, 40.0

# A chart narrower than this moves to a row of its own.
_LEAST_CHART_INCHES = 2.4
# Height of axes over the width of a chart alone in its row, and of a chart among others.
_ALONE, _BESIDE = 0.46, 0.68

_LONGEST_NAME, _LONGEST_TEXT = 48, 240
_POINT = 1 / 72
# Width of a letter, of the line before a name in a legend, and height of a line of text, in letters' heights.
_LETTER, _HANDLE, _LINE = 0.56, 5.0, 1.35
# Texts of a legend whose width is measured.
_MEASURED = 5


class Style(NamedTuple):
    """Letters in points, and whether there is a title."""

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
    """Draw the charts; their matplotlib axes, on a figure without the window that pyplot would open.

    Args:
        ax: Axes for the only chart, instead of a new figure.

    Raises:
        OptionError: If the axes are for several charts, there is no such style, or the width is no width for
            letters or a screen.
    """
    from matplotlib import rc_context

    if style not in STYLES:
        raise UnknownNameError("style", style, STYLES)
    sizes = STYLES[style]
    plot = plot.renamed(labels or {}).map_charts(Chart.drawable)
    if ax is not None:
        if len(plot.charts) != 1:
            raise OptionError(f"ax is for one chart, and this plot has {len(plot.charts)}: leave it out.")
        _draw_chart(ax, plot.charts[0], sizes)
        _write_texts(ax, plot.charts[0], sizes)
        move_apart(ax, plot.charts[0])
        return [ax]
    width = WIDTH_INCHES if width is None else width
    if not _LEAST_WIDTH <= width <= _LARGEST_WIDTH:
        raise OptionError(
            f"width is {_LEAST_WIDTH:g} to {_LARGEST_WIDTH:g} inches, not {width:g}; a column of a paper "
            "is about 3.3."
        )
    # Charts that would be too narrow stand in rows of their own.
    rows = [
        part
        for row in plot.rows
        for part in ([row] if width / len(row) >= _LEAST_CHART_INCHES else [(one,) for one in row if one])
    ]
    with rc_context(_settings(sizes)):
        return _on_a_figure(plot, rows, width, sizes)


def _on_a_figure(plot: Plot, rows: Sequence[Sequence[Chart | None]], width: float, sizes: Style) -> list[Any]:
    from matplotlib.figure import Figure

    from efficient_attn.report.save import to_notebook

    heights = [_height(row, width, sizes) for row in rows]
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    columns = math.lcm(*map(len, rows))
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    drawn = []
    for number, row in enumerate(rows):
        span = columns // len(row)
        first: tuple[Any, Axis] | None = None
        for place, chart in enumerate(row):
            if chart is None:
                continue
            shared = first[0] if first and chart.y == first[1] else None
            ax = figure.add_subplot(grid[number, place * span : (place + 1) * span], sharey=shared)
            first = first or (ax, chart.y)
            if shared:
                chart = chart._replace(y=chart.y._replace(label=""))
                ax.tick_params(labelleft=False)
            drawn.append((ax, chart))
            _draw_chart(ax, chart, sizes)
    lines = _write_legend(figure, plot, sizes)
    lines += _write_title(figure, plot, sizes) if sizes.titled else 0
    figure.set_figheight(sum(heights) + lines * _LINE * sizes.small * _POINT)
    axes = [ax for ax, _ in drawn]
    _lay_out(figure)
    for ax, chart in drawn:
        # Now the size of the axes without their texts is known.
        _write_texts(ax, chart, sizes)
    settle(figure)
    for ax, chart in drawn:
        move_apart(ax, chart)
    # Notebooks show figures of pyplot only, unless an object draws itself.
    vars(figure)["_repr_png_"] = partial(to_notebook, figure)
    return axes


def _settings(sizes: Style) -> dict[Any, Any]:
    """Settings of matplotlib for a figure: small quiet axes, and texts that are no mathematics."""
    ink = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    small = ("xtick.labelsize", "ytick.labelsize", "legend.fontsize")
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
        "font.family": "sans-serif",
        "grid.color": GRID,
        "legend.labelspacing": 0.35,
    }


def _height(row: Sequence[Chart | None], width: float, sizes: Style) -> float:
    """Height of a row: that of its axes, and of the texts above and below them."""
    own = width / len(row)
    line = _LINE * sizes.small * _POINT
    heights = []
    for chart in filter(None, row):
        texts = (chart.title, *chart.notes, chart.x.label)
        lines = sum(_wrapped(text, 0.75 * own, sizes.small).count("\n") + bool(text) for text in texts) + 2
        heights.append(lines * line + (chart.height or (_ALONE if own == width else _BESIDE) * own))
    return max(heights)


def _write_title(figure: Any, plot: Plot, sizes: Style) -> int:
    """Write title and conditions; how many lines they take."""
    from matplotlib.text import Annotation

    width = figure.get_figwidth()
    title = _wrapped(plot.title, width, sizes.title)
    conditions = "\n".join(_wrapped(line, width, sizes.small) for line in plot.conditions.splitlines())
    lines = conditions.count("\n") + bool(conditions)
    top = figure.suptitle(title + "\n" * lines, x=0.01, ha="left", fontweight="bold")
    # Small text in the empty lines at the end of the title.
    below = -1.25 * sizes.title * (title.count("\n") + 1)
    small: dict[str, Any] = {"fontsize": sizes.small, "color": MUTED, "va": "top", "annotation_clip": False}
    figure.add_artist(
        Annotation(conditions, (0, 1), (0, below), xycoords=top, textcoords="offset points", **small)
    )
    return title.count("\n") + lines + 1


def _wrapped(text: str, inches: float, size: float) -> str:
    """Harmless text in lines that fit."""
    return fill(short(plain(text), _LONGEST_TEXT), max(int(inches / (_LETTER * size * _POINT)), 10))


def _write_legend(figure: Any, plot: Plot, sizes: Style) -> int:
    """Write the legend below all charts, in columns; how many lines it takes."""
    from matplotlib.lines import Line2D
    from matplotlib.textpath import TextPath

    texts = [plain(short(one.text, _LONGEST_NAME)) for one in plot.entries]
    handles = [Line2D([], [], **one.style, label=text) for one, text in zip(plot.entries, texts, strict=True)]
    if not handles:
        return 0
    # The widest text has nearly the most letters. Measuring a hundred takes as long as drawing them.
    measured = sorted((text or " " for text in texts), key=len)[-_MEASURED:]
    longest = max(TextPath((0, 0), text, size=sizes.small).get_extents().width for text in measured)
    across = max(int(figure.get_figwidth() / ((longest + _HANDLE * sizes.small) * _POINT)), 1)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(across, len(handles)))
    return -(-len(handles) // across) + 1


def _draw_chart(ax: Any, chart: Chart, sizes: Style) -> None:
    for axis, spec in (("x", chart.x), ("y", chart.y)):
        if spec.scale != "linear":
            ax.set(**{f"{axis}scale": "log"})
        if spec.limits is not None:
            ax.set(**{f"{axis}lim": spec.limits})
    for number, one in enumerate(chart.series):
        _draw_series(ax, one, zorder=2 + number / 1000)
    _write_texts(ax, chart, sizes)
    if chart.draw is not None:
        chart.draw(ax)


def _write_texts(ax: Any, chart: Chart, sizes: Style) -> None:
    """Title, labels and ticks, as far as there is room for them."""
    inches = [size / ax.figure.dpi for size in (ax.bbox.width, ax.bbox.height)]
    _dress(ax.xaxis, chart.x, inches[0], sizes, across=True)
    _dress(ax.yaxis, chart.y, inches[1], sizes, across=False)
    lines = [_wrapped(line, inches[0], sizes.text) for line in (chart.title, *chart.notes) if line]
    ax.set_title("\n".join(lines), loc="left")


def _draw_series(ax: Any, one: Series, zorder: float) -> None:
    style = {"zorder": zorder, **one.style, "label": plain(one.label) or "_"}
    if not len(one.x) or not len(one.y):
        across, places = (ax.axhline, one.y) if len(one.y) else (ax.axvline, one.x)
        across(places[0], **{**style, "marker": ""})
        return
    y, low, high = (np.asarray(edge, dtype=float) for edge in (one.y, one.low, one.high))
    if one.bars:
        ax.errorbar(one.x, y, yerr=[y - low, high - y], elinewidth=1.0, capsize=2, **style)
        return
    ax.plot(one.x, y, **style)
    if len(low):
        ax.fill_between(one.x, low, high, color=one.style["color"], alpha=0.18, linewidth=0)


def _dress(axis: Any, spec: Axis, inches: float, sizes: Style, *, across: bool) -> None:
    """Label, ticks and their texts, as many as there is room for."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = sorted(getattr(axis.axes, f"get_{axis.axis_name}lim")())
    axis.set_label_text(_wrapped(spec.label, inches, sizes.text))
    show, size = spec.show, sizes.small
    letter = _LETTER * size * _POINT
    if isinstance(spec.ticks, Mapping):
        texts = {place: plain(short(text, _LONGEST_NAME)) for place, text in spec.ticks.items()}
        upright = across and sum(len(text) + 1 for text in texts.values()) * letter > inches
        most = inches / (_LINE * size * _POINT) if upright or not across else len(texts)
        places = list(texts)[:: -max(math.ceil(len(texts) / max(most, 1)), 1)][::-1]
        axis.set_ticks(places, [texts[place] for place in places], rotation=90 if upright else 0)
        if spec.inside:
            axis.set_tick_params(pad=-4, length=0)
            axis.axes.grid(visible=False)
            axis.axes.grid(axis="x")
            for label in axis.get_ticklabels():
                label.set_ha("left")
        return
    if len(spec.ticks):
        places = sorted(spec.ticks)
    elif spec.scale == "linear":
        axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
        return
    else:
        places = []

    def room(ticks: Sequence[float]) -> float:
        """How many of these texts there is room for."""
        longest = max((len(show(tick)) for tick in ticks), default=1) + 1.2
        return max(inches / (longest * letter if across else 2.4 * letter), 2)

    if not places:
        places = log_ticks(low, high, room, base=2 if spec.scale == "log2" else 10)
    step = math.ceil(len(places) / room(places))
    axis.set_major_locator(FixedLocator(places[::-step][::-1]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    axis.set_minor_locator(NullLocator())


def log_ticks(low: float, high: float, room: Any, *, base: int) -> list[float]:
    """Round places of a logarithmic axis, as many as there is room for."""
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    dense = [(1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3)] if base == 10 else []
    for steps, every in [*((steps, 1) for steps in dense), *(((1,), n) for n in range(1, last - first + 2))]:
        powers = range(first, last + 1)
        ticks = [step * float(base) ** power for power in powers if power % every == 0 for step in steps]
        shown = [tick for tick in ticks if low <= tick <= high]
        if len(shown) <= room(shown):
            break
    return shown or [low, high]


def settle(figure: Any) -> None:
    """Find where everything stands, once for all files: it takes as long as drawing."""
    if figure.get_layout_engine() is not None:
        # The second time around it knows which ticks the axes have room for.
        _lay_out(figure)
        _lay_out(figure)
        figure.set_layout_engine("none")


def _lay_out(figure: Any) -> None:
    figure.get_layout_engine().execute(figure)
