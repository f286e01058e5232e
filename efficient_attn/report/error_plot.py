"""Errors against size, one panel per input, the mean of the values as a line to beat in each."""

from collections.abc import Mapping, Sequence
from typing import Any

from efficient_attn.analysis.accuracy import ErrorCurve, Panel, panels, quantity_in
from efficient_attn.analysis.statistics import FEWEST_FOR_95
from efficient_attn.errors import OptionError
from efficient_attn.report.error_table import NAMES, show_error, title
from efficient_attn.report.harmless import plain
from efficient_attn.report.palette import INK, MUTED, line_styles
from efficient_attn.report.readable import short
from efficient_attn.sweep.records import Record
from efficient_attn.sweep.sizes import MEAN_OF_VALUES

_PANEL_INCHES = (4.1, 3.3)
_HEAD_INCHES, _LEGEND_INCHES = 0.75, 2.6

# An error of this many times the yardstick is off the scale: a hundred or a million, both are no attention.
_WORST = 12.0

# Errors below this share of the yardstick are rounding, and leave the axes through their floor.
_ROUNDING = 1e-4

_LONGEST_NAME = 40

# Beyond this the margins of an axis are no floating-point numbers any more.
_LARGEST = 1e300

# Of the yardsticks that are no backends: low ranks, and Taylor series of order 1 and 2.
_STROKES: tuple[Any, ...] = ("-", (0, (1, 1.5)), (0, (6, 2, 1, 2)))

# How far below the best backend the axes follow a yardstick.
_FURTHER = 10.0


def plot(
    records: Sequence[Record], *, y: str = "output_relative_error", x: str | None = None, ax: Any = None
) -> Any:
    """Draw the error of every backend against its size; the axes of the first input.

    Args:
        ax: Axes for the only input, or one for each; a figure with a panel per input is made if left out.
    """
    if x not in (None, "size"):
        raise OptionError(f"x is size for errors, not {x!r}.")
    quantity = quantity_in(records, y)
    shown = panels(records, quantity)
    styles = styles_of(shown)
    axes = _grid(shown, styles, quantity) if ax is None else _given(ax, shown)
    for one, panel in zip(axes, shown, strict=True):
        # Inputs of one source share a scale, so that they can be compared.
        scale = _limits([other for other in shown if other.source == panel.source])
        _draw(one, panel, styles, scale)
        if ax is not None or one.get_subplotspec().is_first_col():
            one.set_ylabel(NAMES[quantity].lower(), color=INK)
    return axes[0]


def styles_of(shown: Sequence[Panel]) -> dict[str, dict[str, Any]]:
    """{label: style}, the same in every panel."""
    return line_styles(
        list({curve.label: curve.backend for panel in shown for curve in panel.curves}.items())
    )


def _given(ax: Any, shown: Sequence[Panel]) -> list[Any]:
    axes = list(ax) if isinstance(ax, (list, tuple)) else [ax]
    if len(axes) != len(shown):
        names = ", ".join(panel.inputs for panel in shown)
        raise OptionError(f"ax is one for each of the {len(shown)} inputs ({names}), not {len(axes)}.")
    return axes


def _grid(shown: Sequence[Panel], styles: Mapping[str, Mapping[str, Any]], quantity: str) -> list[Any]:
    """Axes for every panel, a row for each source of inputs, and the legend where there is room."""
    from matplotlib.figure import Figure

    sources = list(dict.fromkeys(panel.source for panel in shown))
    rows = [[panel for panel in shown if panel.source == source] for source in sources]
    columns = max(map(len, rows), default=1)
    free = next((row for row, group in enumerate(rows) if len(group) < columns), None)
    width, height = columns * _PANEL_INCHES[0], max(len(rows), 1) * _PANEL_INCHES[1] + _HEAD_INCHES
    figure = Figure(figsize=(width + (_LEGEND_INCHES if free is None else 0), height), layout="constrained")
    grid = figure.subplots(max(len(rows), 1), columns, squeeze=False, sharey="row")
    for row, group in enumerate(rows):
        for empty in grid[row, len(group) :]:
            empty.set_axis_off()
    _head(figure, shown, quantity)
    lines = handles(shown, styles)
    for line in lines:
        line.set_label(short(line.get_label(), _LONGEST_NAME))
    legend = {"handles": lines, "frameon": False, "fontsize": 10, "labelcolor": INK}
    if free is None:
        drawn = figure.legend(loc="outside right center", **legend)
    else:
        drawn = grid[free, len(rows[free])].legend(loc="center left", **legend)
    for text in drawn.get_texts():
        text.set_parse_math(False)
    return [grid[sources.index(p.source), rows[sources.index(p.source)].index(p)] for p in shown]


def headline(shown: Sequence[Panel], quantity: str) -> tuple[str, str]:
    """What the plots show, and what lines, bands and bars are."""
    points = [point for panel in shown for curve in panel.curves for point in curve.points]
    draws = max((point.draws for point in points), default=1)
    seeds = max((point.data_seeds for point in points), default=1)
    told = [f"lines and bands: median of {draws} draws and its {interval(draws)}"] if draws > 1 else []
    told += [f"bars: {interval(seeds)} over {seeds} seeds of the inputs"] if seeds > 1 else []
    return f"{NAMES[quantity]} against exact softmax attention in float64", "; ".join(told)


def interval(samples: int) -> str:
    """What `middle` gives around the median of so many samples."""
    return "95 % interval" if samples >= FEWEST_FOR_95 else "range"


def _head(figure: Any, shown: Sequence[Panel], quantity: str) -> None:
    figure.suptitle(
        "; ".join(filter(None, headline(shown, quantity))),
        x=0.01,
        ha="left",
        fontsize=12,
        fontweight="bold",
        color=INK,
    )


def handles(shown: Sequence[Panel], styles: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """The lines, the yardstick, and in words what has no line."""
    from matplotlib.lines import Line2D

    sized = {curve.label for panel in shown for curve in panel.curves if _has_sizes(curve)}
    made = [Line2D([], [], label=plain(label), **style) for label, style in styles.items() if label in sized]
    made.append(Line2D([], [], color=INK, linestyle=(0, (4, 3)), label=f"{MEAN_OF_VALUES} for every query"))
    others = {curve.label: curve for panel in shown for curve in panel.others}
    made += [Line2D([], [], label=plain(curve.label), **_plain_style(curve)) for curve in others.values()]
    for label in dict.fromkeys(c.label for p in shown for c in p.curves if not _has_sizes(c)):
        worst = max(c.points[0].value for p in shown for c in p.curves if c.label == label)
        if _is_rounding(worst, shown):
            text = f"{label}: at most {show_error(worst)}, rounding"
            made.append(Line2D([], [], linestyle="none", label=plain(text)))
        else:
            made.append(Line2D([], [], label=plain(label), **{**styles[label], "marker": ""}))
    return made


def _draw(
    ax: Any, panel: Panel, styles: Mapping[str, Mapping[str, Any]], limits: tuple[float, float]
) -> None:
    for curve in panel.curves:
        style = styles[curve.label]
        if _has_sizes(curve):
            _draw_curve(ax, curve, style)
        elif not _is_rounding(curve.points[0].value, [panel]):
            ax.axhline(curve.points[0].value, **{**style, "marker": ""}, label=plain(curve.label), zorder=3)
    for curve in panel.others:
        points = [point for point in curve.points if point.size is not None]
        if points:
            ax.plot([p.size for p in points], [p.value for p in points], **_plain_style(curve), zorder=1.5)
        else:
            ax.axhline(curve.points[0].value, **_plain_style(curve), zorder=1)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_ylim(*limits)
    _yardstick(ax, panel)
    _off_the_scale(ax, panel, styles, limits[1])
    _dress(ax, panel)


def _draw_curve(ax: Any, curve: ErrorCurve, style: Mapping[str, Any]) -> None:
    points = [point for point in curve.points if point.size is not None]
    sizes = [point.size for point in points]
    ax.plot(sizes, [point.value for point in points], **style, label=plain(curve.label), zorder=3)
    ax.fill_between(
        sizes,
        [point.low for point in points],
        [point.high for point in points],
        color=style["color"],
        alpha=0.18,
        linewidth=0,
        zorder=2,
    )
    for point in points:
        if point.data_low is not None and point.data_high is not None:
            ax.vlines(
                point.size, point.data_low, point.data_high, color=style["color"], linewidth=3.2, zorder=4
            )


def _plain_style(curve: ErrorCurve) -> dict[str, Any]:
    """Of a yardstick that is no backend: thin, grey, one stroke for each."""
    orders = [int(word) for word in curve.label.split() if word.isdecimal()]
    stroke = _STROKES[orders[0] % len(_STROKES) if orders else 0]
    return {"color": MUTED, "linestyle": stroke, "linewidth": 1.1}


def _yardstick(ax: Any, panel: Panel) -> None:
    if panel.yardstick is None:
        return
    ax.axhline(panel.yardstick, color=INK, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1)
    ax.annotate(
        f"{MEAN_OF_VALUES}\n{show_error(panel.yardstick)}",
        xy=(1.015, panel.yardstick),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=8.5,
        color=INK,
        annotation_clip=False,
    )


def _off_the_scale(ax: Any, panel: Panel, styles: Mapping[str, Mapping[str, Any]], high: float) -> None:
    """Say at the upper edge which curves run above it, and from where to where."""
    above = [
        curve for curve in (*panel.others, *panel.curves) if min(point.value for point in curve.points) > high
    ]
    for row, curve in enumerate(above):
        values = [point.value for point in curve.points]
        ax.annotate(
            plain(f"▲ {curve.label}: {show_error(min(values))} to {show_error(max(values))}"),
            xy=(0.02, 0.97),
            xycoords="axes fraction",
            xytext=(0, -12 * row),
            textcoords="offset points",
            va="top",
            fontsize=8.5,
            color=styles[curve.label]["color"] if curve.label in styles else MUTED,
            parse_math=False,
        )


def _dress(ax: Any, panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    sizes = sorted(
        {point.size for c in (*panel.others, *panel.curves) for point in c.points if point.size is not None}
    )
    ax.xaxis.set_major_locator(FixedLocator([size for size in sizes if size - 1 not in sizes]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(MUTED)
    ax.tick_params(colors=INK, which="both", length=3, labelsize=9, labelleft=True)
    matched = next((p.record.matched for c in panel.curves for p in c.points if p.record.matched), None)
    budget = f"budget: the {matched} of performer-positive with so many features"
    ax.set_xlabel(budget if matched else "size: features, rank or window", color=INK, fontsize=9.5)
    ax.set_title(plain(title(panel)), loc="left", fontsize=9.5, color=INK, parse_math=False)


def _limits(shown: Sequence[Panel]) -> tuple[float, float]:
    """From below the smallest error that is no rounding to above the largest that is no nonsense."""
    yardsticks = [panel.yardstick for panel in shown if panel.yardstick]
    worst = _WORST * max(yardsticks, default=1.0)
    curves = [c for panel in shown for c in panel.curves if min(point.value for point in c.points) <= worst]
    edges = [edge for c in curves for point in c.points for edge in (point.value, point.low)]
    told = [edge for edge in (*edges, *yardsticks) if 0 < edge < _LARGEST and not _is_rounding(edge, shown)]
    told = told or [1.0]
    others = [point.value for panel in shown for curve in panel.others for point in curve.points]
    near = [value for value in others if min(told) / _FURTHER <= value <= min(worst, _LARGEST)]
    return min(told + near) / 1.4, min(max(told + near), worst) * 1.8


def _is_rounding(value: float, shown: Sequence[Panel]) -> bool:
    return value < _ROUNDING * min((panel.yardstick or 1.0 for panel in shown), default=1.0)


def _has_sizes(curve: ErrorCurve) -> bool:
    return any(point.size is not None for point in curve.points)
